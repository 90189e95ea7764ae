"""DistIR's own experiments: the degrees it measured as best, its grid of configurations, and measured steps of MLPs.

Source: Santhanam et al., "DistIR: An Intermediate Representation and Simulator for Efficient Neural Network
Distribution" (microsoft/dist-ir, MIT); every row of the files names its notebook. The space is DistIR's: data, tensor
(columns and rows in pairs) and pipeline degrees that multiply to 16, microbatches, ZeRO 0, no recomputation, GPipe and
1F1B, gradients reduced after backward without overlap, 16-bit training with SGD, 28 GB a device.

    python -m tests.bench.distir [--data DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import csv
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from statistics import mean

import numpy as np
from scipy.stats import rankdata

from tap_planner.cluster import Cluster, load_cluster
from tap_planner.plan import Overlap
from tap_planner.simulate import simulate
from tests.bench.instances import DATA, table, write_json
from tests.bench.mlp import MEDIUM, SMALL, Degrees, Mlp, program_of

DGX2 = "1x16:v100-sxm3-32gb"
MOST_BYTES = 28 * 10**9
"""What DistIR leaves of a device (its figures count in 10^9)."""
MLPS = {"mlp-small": SMALL, "mlp-medium": MEDIUM, "MLP-1B": SMALL, "MLP-17B": MEDIUM}
SCHEDULES = ("fill-drain", "1f1b")
WORLD = 16
CLEAR = 0.02
"""A winner is clear where the runner-up in DistIR's grid is further behind than this part."""

Row = Mapping[str, str]


def rows_of(data: Path, name: str) -> list[Row]:
    """The rows of a file of measurements."""
    with (data / "measurements" / name).open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A configuration, by our simulator."""

    degrees: Degrees
    step_ns: int
    peak_bytes: int


def run(mlp: Mlp, batch: int, degrees: Degrees, cluster: Cluster) -> Simulated:
    """Simulate one configuration. DistIR updates 16-bit weights in place: float32 copies of them do not count."""
    timeline = simulate(program_of(mlp, batch, degrees), cluster, overlap=Overlap.NONE)
    peak = max(stage.memory.peak_bytes - stage.memory.optimizer_bytes for stage in timeline.stages)
    return Simulated(degrees=degrees, step_ns=timeline.step_ns, peak_bytes=peak)


def space(batch: int) -> Iterator[Degrees]:
    """DistIR's space for a batch."""
    sizes = [1 << k for k in range(5)]
    for data in sizes:
        for tensor in sizes:
            stages, rest = divmod(WORLD, data * tensor)
            if rest or stages < 1:
                continue
            for count in (1 << k for k in range(1, 8)) if stages > 1 else (1,):
                if batch % (data * count) == 0:
                    for schedule in SCHEDULES if stages > 1 else SCHEDULES[:1]:
                        yield Degrees(data=data, tensor=tensor, pipeline=stages, microbatches=count, schedule=schedule)


# -- winners -----------------------------------------------------------------------------------------------------------


def winners(data: Path) -> list[dict[str, object]]:
    """Our choice for every measured winner, and its regret on DistIR's grid."""
    grid: defaultdict[tuple[str, int], list[tuple[float, tuple[int, int, int]]]] = defaultdict(list)
    for row in rows_of(data, "distir_simulated_grid.csv"):
        if float(row["sim_peak_mem_GB"]) <= MOST_BYTES / 1e9:
            shape = (int(row["dp"]), int(row["tp"]), int(row["pp"]))
            grid[row["model"], int(row["batch_size"])].append((float(row["sim_throughput_samples_per_s"]), shape))
    names = {"MLP-1B": "mlp-small", "MLP-17B": "mlp-medium"}
    found: list[dict[str, object]] = []
    for row in rows_of(data, "distir_measured_winners.csv"):
        batch, measured = int(row["batch"]), (int(row["D"]), int(row["T"]), int(row["P"]))
        points = sorted(grid[names[row["model"]], batch], reverse=True)
        best = {shape: max(rate for rate, other in points if other == shape) for _, shape in points}
        first, *others = sorted(best.values(), reverse=True)
        behind = 1 - others[0] / first
        chosen = choose(MLPS[row["model"]], batch)
        shape = (chosen.degrees.data, chosen.degrees.tensor, chosen.degrees.pipeline)
        found.append(
            {
                "model": row["model"],
                "batch": batch,
                "measured": "/".join(map(str, measured)),
                "chosen": "/".join(map(str, shape)),
                "microbatches": chosen.degrees.microbatches,
                "schedule": chosen.degrees.schedule if chosen.degrees.pipeline > 1 else "",
                "step_ms": round(chosen.step_ns / 1e6, 2),
                "peak_GB": round(chosen.peak_bytes / 1e9, 2),
                "runner_up_behind_percent": round(100 * behind, 1),
                "same": shape == measured,
                "regret_percent": round(100 * (1 - best.get(shape, 0.0) / first), 2),
                "ok": shape == measured if behind > CLEAR else best.get(shape, 0.0) >= (1 - CLEAR) * first,
            }
        )
    return found


def choose(mlp: Mlp, batch: int) -> Simulated:
    """The fastest configuration that fits (ties: as listed)."""
    cluster = load_cluster(DGX2)
    simulated = (run(mlp, batch, degrees, cluster) for degrees in space(batch))
    return min((one for one in simulated if one.peak_bytes <= MOST_BYTES), key=lambda one: one.step_ns)


def _pearson(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation; ties share their mean rank."""
    return _pearson(rankdata(one).tolist(), rankdata(other).tolist())


# -- the grid ----------------------------------------------------------------------------------------------------------


def _grid_row(row: Row) -> tuple[float, float]:
    """Our time in ms and peak in GB of a row of DistIR's grid."""
    degrees = Degrees(
        data=int(row["dp"]),
        tensor=int(row["tp"]),
        pipeline=int(row["pp"]),
        microbatches=int(row["microbatches"]),
    )
    found = run(MLPS[row["model"]], int(row["batch_size"]), degrees, load_cluster(DGX2))
    return found.step_ns / 1e6, found.peak_bytes / 1e9


def grid_rows(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Our times in ms and peaks in GB of rows of DistIR's grid."""
    return [_grid_row(row) for row in rows]


def grid(data: Path, processes: int) -> dict[str, object]:
    """All configurations of mlp-small: how long they take us, and how our figures go with DistIR's."""
    rows = [row for row in rows_of(data, "distir_simulated_grid.csv") if row["model"] == "mlp-small"]
    began = time.perf_counter()
    if processes > 1:
        size = -(-len(rows) // processes)
        parts = [rows[start : start + size] for start in range(0, len(rows), size)]
        with ProcessPoolExecutor(processes) as pool:
            found = [one for part in pool.map(grid_rows, parts) for one in part]
    else:
        found = grid_rows(rows)
    seconds = time.perf_counter() - began
    theirs = [int(row["batch_size"]) / float(row["sim_throughput_samples_per_s"]) * 1e3 for row in rows]
    ours = [ms for ms, _ in found]
    peaks = [float(row["sim_peak_mem_GB"]) for row in rows]
    return {
        "configurations": len(rows),
        "processes": processes,
        "seconds": round(seconds, 2),
        "ms_each": round(1e3 * seconds / len(rows), 2),
        "spearman_time": round(spearman(ours, theirs), 3),
        "spearman_peak": round(spearman([gb for _, gb in found], peaks), 3),
    }


# -- measured steps ----------------------------------------------------------------------------------------------------

MEASURED = "v100-sxm2-16gb"


def measured(data: Path) -> list[dict[str, object]]:
    """Predicted and measured steps of data-parallel MLPs in fp32, with one link bandwidth that is fitted."""
    rows = rows_of(data, "distir_mlp_measured.csv")
    bandwidth = min(_bandwidths(), key=lambda value: _error(rows, value))
    predicted = [_predicted_ms(row, bandwidth) for row in rows]
    real = [float(row["real_ms"]) for row in rows]
    found: list[dict[str, object]] = []
    for name in ("1", "2", "all"):
        chosen = [i for i, row in enumerate(rows) if name in (row["world_size"], "all")]
        ours, theirs = [predicted[i] for i in chosen], [real[i] for i in chosen]
        found.append(
            {
                "world_size": name,
                "rows": len(chosen),
                "link_GB_per_s": round(bandwidth / 1e9, 2),
                "pearson": round(_pearson(ours, theirs), 4),
                "spearman": round(spearman(ours, theirs), 4),
                "mape_percent": round(100 * mean(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True)), 1),
                "distir_mape_percent": round(
                    100 * mean(abs(float(rows[i]["simulated_ms"]) / real[i] - 1) for i in chosen), 1
                ),
            }
        )
    return found


def _bandwidths() -> list[int]:
    return [int(10**9 * Fraction(11, 10) ** step / 4) for step in range(60)]


def _error(rows: Sequence[Row], bandwidth: int) -> float:
    """Mean relative error of the rows on two devices."""
    two = [row for row in rows if row["world_size"] == "2"]
    return mean(abs(_predicted_ms(row, bandwidth) / float(row["real_ms"]) - 1) for row in two)


def _predicted_ms(row: Row, bandwidth: int) -> float:
    mlp = Mlp(name="mlp", num_layers=int(row["num_layers"]), hidden=int(row["hidden_dim"]))
    world = int(row["world_size"])
    cluster = load_cluster(f"1x{world}:{MEASURED}")
    cluster = replace(cluster, levels=(cluster.levels[0].at(bandwidth), *cluster.levels[1:]))
    program = program_of(mlp, int(row["batch_size"]), Degrees(data=world, tensor=1))
    program = replace(program, decisions=replace(program.decisions, precision="fp32"))
    return simulate(program, cluster, overlap=Overlap.NONE).step_ns / 1e6


# -- the command -------------------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with measurements/distir_*.csv")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--processes", type=int, default=2, help="for the grid")
    given = parser.parse_args(arguments)
    result: dict[str, object] = {
        "grid": grid(given.data, given.processes),
        "winners": winners(given.data),
        "measured": measured(given.data),
    }
    print(table([result["grid"]]))  # type: ignore[list-item]
    for name in ("winners", "measured"):
        print()
        print(table(result[name]))  # type: ignore[arg-type]
    write_json(given.json, result)
    return result


if __name__ == "__main__":
    main()
