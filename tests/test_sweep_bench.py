"""The benchmark of sweeps: it measures what it says."""

from __future__ import annotations

from tap_planner.plan import PlanOptions
from tests.bench.sweep import Case, figures


def test_figures_of_a_sweep() -> None:
    """Every combination is counted, with those that have a plan; times are positive and fit together."""
    case = Case(
        part="small",
        model="gpt2_tiny.onnx",
        cluster="1x4:a100-sxm4-80gb",
        options=PlanOptions(batch=8, dims={"seq": 16}, loss="mean"),
        grid="dp=2|4,tp,microbatches=2|3",
    )
    found = figures(case, 1)
    assert (found["combinations"], found["planned"]) == (4, 2)
    median, longest, total = (float(str(found[name])) for name in ("median_s", "longest_s", "total_s"))
    assert 0 <= median <= longest <= total + 0.1
    assert float(str(found["alone_median_s"])) > 0
