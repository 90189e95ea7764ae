"""tap-show: explain a plan, or a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from tap_planner_cli.console import make_console, show_warnings
from tap_planner_cli.errors import EXIT_NEGATIVE, run
from tap_planner_cli.locate import locate_model
from tap_planner_cli.parameters import check_writable, common_options, settings

if TYPE_CHECKING:
    from tap_planner.plan import PlanDocument


@click.command(context_settings=settings("tap-show"))
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--program", is_flag=True, help="Print what each rank does, step by step (reads the model).")
@click.option("--timeline", is_flag=True, help="Simulate a step: what every stage does when (reads the model).")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the simulated step for Perfetto or chrome://tracing (reads the model).",
)
@click.option("--model", type=click.Path(path_type=Path), help="The ONNX file; default: beside the plan, or here.")
@click.option("--cluster", metavar="FILE", help="Print how a cluster.yaml or NxM:DEVICE is understood, and lint it.")
@click.option("--strict", is_flag=True, help="Exit with 1 if the cluster has findings.")
@common_options
def command(
    plan: Path | None,
    program: bool,
    timeline: bool,
    trace: Path | None,
    model: Path | None,
    cluster: str | None,
    strict: bool,
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Explain PLAN: mesh, time, memory, communication and every decision."""
    if plan is None and cluster is None:
        raise click.UsageError("give a PLAN or --cluster FILE")
    reads = {"--program": program, "--timeline": timeline, "--trace": trace is not None}
    asked = [name for name, given in reads.items() if given]
    if plan is None and asked:
        raise click.UsageError(f"{asked[0]} is of a plan: give a PLAN")
    show_warnings(quiet=quiet, verbose=verbose)
    check_writable(trace, "trace.json")
    code = 0
    if cluster is not None:
        code = _show_cluster(cluster, color, strict=strict)
    if plan is not None:
        document = _show_plan(plan, color, quiet=quiet)
        if asked:
            path = locate_model(model, plan, document.model.name)
            _show_step(document, path, color, program=program, timeline=timeline, trace=trace, quiet=quiet)
    return code


def _show_cluster(source: str, color: str, *, strict: bool) -> int:
    from tap_planner.cluster import lint, load_cluster
    from tap_planner_cli.show_cluster import print_cluster

    loaded = load_cluster(source)
    findings = lint(loaded)
    print_cluster(make_console(color), loaded, findings)
    return EXIT_NEGATIVE if findings and strict else 0


def _show_plan(path: Path, color: str, *, quiet: bool) -> PlanDocument:
    from tap_planner.errors import PlanFormatError
    from tap_planner.plan import check_digests, read_plan
    from tap_planner_cli.show_text import print_plan

    document = read_plan(path)
    try:
        check_digests(document)
    except PlanFormatError as error:
        if not quiet:
            click.echo(f"warning: {error.message}", err=True)
    print_plan(make_console(color), document)
    return document


def _show_step(
    document: PlanDocument, model: Path, color: str, *, program: bool, timeline: bool, trace: Path | None, quiet: bool
) -> None:
    """What of a plan takes its model to tell."""
    from tap_planner import api
    from tap_planner.simulate import write_trace
    from tap_planner_cli.show_program import print_program
    from tap_planner_cli.show_timeline import print_timeline

    console = make_console(color)
    lowered = api.lower_plan(document, model)
    if program:
        print_program(console, lowered)
    if not timeline and trace is None:
        return
    step = api.simulate_program(document, lowered)
    if timeline:
        print_timeline(console, step)
    if trace is not None:
        write_trace(step, trace)
        if not quiet:
            click.echo(f"trace written to {trace}: open it in https://ui.perfetto.dev", err=True)


def main() -> None:
    """Entry point."""
    run(command, "tap-show")
