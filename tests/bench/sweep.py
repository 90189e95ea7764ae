"""Sweeps of ``tap-plan --grid``: what a combination takes, and what sharing saves.

    python -m tests.bench.sweep [--part small|large] [--processes 1 2] [--json build/sweep.json] [--markdown]

*Small*: GPT-2 of two layers on 32 A100s, 100 to 300 combinations. *Large*: GPT-3 175B on 128 A100s of 80 GB,
batch 192, meshes of pipelines with 16 microbatches. Each row is a sweep as a command makes it, without the start of
Python; *alone* is the time of ``api.make_plan`` for some of its combinations, each read and bound anew.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tap_planner import api
from tap_planner.errors import TapError
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.processes import usable_cores
from tap_planner.sweep import Status, Sweep, SweepRequest, parse_grid
from tests.bench.instances import DATA, markdown, table, write_json

ALONE = 6
"""Combinations that are planned by themselves as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A grid on a cluster."""

    part: str
    model: str
    cluster: str
    options: PlanOptions
    grid: str


_SMALL = PlanOptions(batch=64, dims={"seq": 512}, loss="mean")
_LARGE = PlanOptions(batch=192, dims={"seq": 2048}, loss="cross-entropy", microbatches=16)
CASES = (
    Case(
        part="small",
        model="gpt2_tiny.onnx",
        cluster="4x8:a100-sxm4-80gb",
        options=_SMALL,
        grid="pp,dp,tp,microbatches",
    ),
    Case(
        part="small",
        model="gpt2_tiny.onnx",
        cluster="4x8:a100-sxm4-80gb",
        options=_SMALL,
        grid="pp=2|4,dp,tp,schedule,microbatches=8|16|32,zero=0|1",
    ),
    Case(
        part="small",
        model="gpt2_tiny.onnx",
        cluster="4x8:a100-sxm4-80gb",
        options=_SMALL,
        grid="dp,tp,microbatches=1|2|4,zero,recompute",
    ),
    Case(
        part="large",
        model="hm_gpt3_175b.onnx",
        cluster="16x8:a100-sxm4-80gb",
        options=_LARGE,
        grid="pp=4|8|16,dp,tp=4|8",
    ),
)


def _request(case: Case, processes: int) -> SweepRequest:
    return SweepRequest(
        model=DATA / case.model,
        cluster=case.cluster,
        options=case.options,
        grid=parse_grid([case.grid], case.options),
        processes=processes,
    )


def figures(case: Case, processes: int) -> dict[str, object]:
    """One sweep."""
    started = time.perf_counter()
    sweep = api.prepare_sweep(_request(case, processes))
    read = time.perf_counter() - started
    sweep.run()
    seconds = time.perf_counter() - started
    each = sorted(outcome.seconds for outcome in sweep.outcomes.values())
    planned = sum(outcome.status is Status.PLANNED for outcome in sweep.outcomes.values())
    return {
        "model": case.model.removesuffix(".onnx"),
        "grid": case.grid,
        "combinations": len(each),
        "planned": planned,
        "processes": processes,
        "read_s": round(read, 2),
        "total_s": round(seconds, 1),
        "per_combination_s": round(seconds / len(each), 3),
        "median_s": round(statistics.median(each), 3),
        "longest_s": round(each[-1], 2),
        "alone_median_s": round(statistics.median(_alone(case, sweep)), 3),
    }


def _alone(case: Case, sweep: Sweep) -> Iterator[float]:
    """What some of the combinations take that have a plan, when each is planned by itself."""
    rows = [row for row in sweep.rows if row.rank is not None]
    for row in rows[:: max(len(rows) // ALONE, 1)][:ALONE]:
        started = time.perf_counter()
        try:
            options = row.combination.options
            api.make_plan(PlanRequest(model=DATA / case.model, cluster=case.cluster, options=options))
        except TapError as error:
            raise AssertionError(f"{row.combination.shown} has no plan by itself") from error
        yield time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Sweep, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("small", "large"), help="only one of them")
    parser.add_argument("--processes", type=int, nargs="+", default=[usable_cores()], help="default: one per core")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    options = parser.parse_args(arguments)
    logging.getLogger("tap_planner").addHandler(logging.NullHandler())
    rows = [
        figures(case, processes)
        for case in CASES
        if options.part in (None, case.part)
        for processes in options.processes
    ]
    print((markdown if options.markdown else table)(rows))
    result: dict[str, object] = {"sweeps": rows}
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
