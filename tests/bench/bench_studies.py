"""Reduced forms of the studies of the search: each runs, and its claims hold, on what is small."""

from __future__ import annotations

from pathlib import Path

from tests.bench import depth, determinism, experts, ilp
from tests.bench.instances import DATA


def test_ilp() -> None:
    """Two layers: HiGHS finishes in a minute with the optimum that the search proved; CP-SAT is never better."""
    (row,) = ilp.main(["--models", "gpt", "--layers", "2", "--time-limit", "120", "--solvers", "highs"])
    assert row["gap_ns"] == 0
    assert row["highs_optimum"] == "equal"


def test_windowed_gpt_has_many_strategies() -> None:
    """The model of the comparison has more than 50 strategies an operator, on two axes."""
    (row,) = ilp.main(["--models", "windowed_gpt", "--layers", "2", "--solvers"])
    strategies = row["strategies_each"]
    assert isinstance(strategies, float)
    assert strategies > 50
    assert row["gap_ns"] == 0


def test_depth(tmp_path: Path) -> None:
    """Two depths, one run each; the picture can be drawn. Times are printed and never asserted."""
    picture = tmp_path / "depth.svg"
    rows = depth.main(["--layers", "12", "24", "--runs", "1", "--svg", str(picture)])
    assert [row["none_gap_ns"] for row in rows] == [0, 0]
    assert picture.read_text(encoding="utf-8").count("<polyline") == len(depth.LIMITS)


def test_experts() -> None:
    """No expert's plan for three small models on 2 nodes is better than the search's (``main`` asserts it)."""
    rows = experts.main(["--models", "bert", "vit", "dlrm", "--clusters", "2x8:a100-sxm4-80gb"])
    assert {row["expert"] for row in rows} >= {"FSDP", "Megatron TP", "Megatron TP+SP", "row-wise embeddings"}


def test_determinism() -> None:
    """Two hash seeds, one core and two: the same bytes (``main`` ends with an error otherwise), under a tight limit."""
    planning = ["--cluster", "1x4:a100-sxm4-80gb", "--batch", "8", "--dim", "seq=16", "--max-memory", "2MB"]
    model = str(DATA / "hm_gpt_tiny.onnx")
    rows = determinism.main(["--model", model, "--seeds", "0", "1", "--runs", "1", "--", *planning])
    assert len({row["digest"] for row in rows}) == 1
    assert len(rows) == 4
