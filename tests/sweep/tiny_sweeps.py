"""Sweeps of GPT-2 on four slow devices, which plan a combination in a tenth of a second."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from tap_planner import api
from tap_planner.plan import PlanOptions
from tap_planner.sweep import Outcome, Sweep, SweepRequest, parse_grid

MODEL = Path(__file__).parents[1] / "data" / "gpt2_tiny.onnx"
CLUSTER = str(Path(__file__).parents[2] / "plans" / "demo-cluster.yaml")
OPTIONS = PlanOptions(batch=8, dims={"seq": 16}, precision="fp32", loss="mean")


def sweep_of(*grid: str, state: Path | None = None, processes: int = 1, **options: object) -> Sweep:
    """A sweep that was not run yet."""
    given = replace(OPTIONS, **options)  # type: ignore[arg-type]
    request = SweepRequest(
        model=MODEL,
        cluster=CLUSTER,
        options=given,
        grid=parse_grid(grid, given),
        state=state,
        processes=processes,
    )
    return api.prepare_sweep(request)


def swept(*grid: str, state: Path | None = None, processes: int = 1, **options: object) -> Sweep:
    """The same, run."""
    sweep = sweep_of(*grid, state=state, processes=processes, **options)
    sweep.run()
    return sweep


def timeless(sweep: Sweep) -> dict[str, Outcome]:
    """What was found, but for how long it took."""
    return {row.combination.shown: replace(row.outcome, seconds=0.0) for row in sweep.rows}
