"""tap-calibrate: measure a cluster, for a truer cost model."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar

from tap_planner.cluster import Calibration, calibration_text
from tap_planner.plan import write_text
from tap_planner_cli.console import make_console, show_warnings
from tap_planner_cli.errors import printable, run
from tap_planner_cli.parameters import SECONDS, check_writable, common_options, settings
from tap_planner_cli.tables import table
from tap_planner_cli.units import format_ns

if TYPE_CHECKING:
    from tap_planner.calibrating import Progress


@click.command(context_settings=settings("tap-calibrate"))
@click.option("--cluster", metavar="FILE|NxM:DEVICE", required=True, help="cluster.yaml, or as 1x4:cpu-core.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Local processes to start; default: join a launcher's (torchrun), else one for each device; 1: device alone.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Calibration file; default: stdout.")
@click.option("--budget", type=SECONDS, default="60s", show_default=True, help="Time for measuring, as 90s or 5min.")
@click.option("--report", type=click.Path(path_type=Path), help="Write wall time and residuals as JSON.")
@common_options
def command(
    cluster: str,
    nproc: int | None,
    output: Path | None,
    budget: float,
    report: Path | None,
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Measure devices and links of a cluster, and write what the cost model needs of them."""
    show_warnings(quiet=quiet, verbose=verbose)
    check_writable(output, "calibration.json")
    check_writable(report, "report.json")
    started = time.perf_counter()
    from tap_planner import api

    console = make_console(color, stderr=True)
    request = api.CalibrateRequest(cluster=cluster, nproc=nproc, budget_s=budget)
    with _progress(console, shown=not quiet and sys.stderr.isatty()) as on_progress:
        calibration = api.calibrate_cluster(request, on_progress)
    if calibration is None:
        return 0
    text = calibration_text(calibration)
    if output is None:
        click.echo(text, nl=False)
    else:
        write_text(output, text)
    seconds = time.perf_counter() - started
    if not quiet:
        _print_fit(console, calibration, output, seconds)
    if report is not None:
        document = {"seconds": round(seconds, 3), "fit": [asdict(row) for row in calibration.fit]}
        write_text(report, json.dumps(document, indent=2) + "\n")
    return 0


@contextlib.contextmanager
def _progress(console: Console, *, shown: bool) -> Iterator[Callable[[Progress], None]]:
    """A bar for each stage, on a terminal."""
    if not shown:
        yield lambda progress: None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        tasks = {}

        def on_progress(progress: Progress) -> None:
            if progress.stage not in tasks:
                tasks[progress.stage] = bar.add_task(f"measuring {progress.stage}", total=progress.total)
            bar.update(tasks[progress.stage], completed=progress.done)

        yield on_progress


def _print_fit(console: Console, calibration: Calibration, output: Path | None, seconds: float) -> None:
    device = calibration.device
    console.print(f"{printable(device.name)}: {', '.join(_figures(calibration))}", soft_wrap=True)
    rows = [
        (row.kind, str(row.rows), f"{row.median_permille / 10:.1f} %", f"{row.worst_permille / 10:.1f} %")
        for row in calibration.fit
    ]
    columns = ("measured", "rows", "median error", "worst error")
    console.print(table(columns, rows, right=columns[1:]))
    console.print(f"{seconds:.0f} s" + (f", written to {printable(str(output))}" if output else ""))


def _figures(calibration: Calibration) -> Iterator[str]:
    device = calibration.device
    for name, value in (("launch", device.launch_ns), ("backward launch", device.backward_launch_ns)):
        if value is not None:
            yield f"{name} {format_ns(value)}"
    efficiency = device.matrix_efficiency_permille or 1000
    for dtype, peak in device.peak_flops.items():
        yield f"{dtype} {peak * efficiency / 1e12:.4g} GFLOP/s"
    if device.memory_bandwidth_bytes_per_s is not None:
        reached = device.memory_bandwidth_bytes_per_s * (device.memory_efficiency_permille or 1000)
        yield f"memory {reached / 1e12:.4g} GB/s"
    for level in calibration.levels:
        if level.bandwidth_bytes_per_s is not None:
            yield f"{level.name} {level.bandwidth_bytes_per_s / 1e9:.3g} GB/s"


def main() -> None:
    """Entry point."""
    run(command, "tap-calibrate")


if __name__ == "__main__":
    main()
