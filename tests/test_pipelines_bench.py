"""175B in pipelines: interleaving gains, and the planner's best pipeline is no slower than the experts'."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tap_planner.pipelining import _needed  # pyright: ignore[reportPrivateUsage]
from tests.bench.pipelines import CONTESTS, contest, gains


def test_little_that_crosses_at_the_ends_is_no_measure() -> None:
    """Of a chain whose ends are thin, four parts need the bytes of the best place near each equal cut."""
    crossing = np.array([0, 1, 1, *[90, 40, 90, 50] * 8, 1, 1])
    work = np.ones(len(crossing), dtype=np.int64)
    assert _needed(crossing, work, 4) == 40
    assert _needed(crossing, work, len(crossing)) == 90
    assert _needed(np.array([0, 5]), np.array([0, 0]), 2) == 5
    assert _needed(np.array([0]), np.array([3]), 2) == 0


@pytest.mark.full
def test_interleaving_gains(tmp_path: Path) -> None:
    """On 1,024 devices three parts a stage gain over two, two over one, under both papers' settings; all fit."""
    rows = list(gains(tmp_path))
    assert all(row["fits"] for row in rows)
    steps = [float(str(row["step_s"])) for row in rows]
    assert steps[0] > steps[1] > steps[2] and steps[3] > steps[4] > steps[5]


@pytest.mark.full
def test_the_planner_finds_no_slower_pipeline(tmp_path: Path) -> None:
    """On 64 devices the planner's own choice is faster than the experts' plan and than what it finds on their mesh,
    where stages are of about equal length."""
    given = replace(CONTESTS[0], meshes=("pp=8,tp=8",))
    _, chosen, *rows = contest(given, tmp_path)
    percents = [float(str(row["percent"])) for row in rows if row["percent"] is not None]
    assert len(percents) == len(rows)
    assert float(str(chosen["percent"])) < 0
    assert float(str(chosen["percent"])) <= min(percents)
    plain = next(row for row in rows if (row["mesh"], row["schedule"]) == ("pp=8,tp=8", "1f1b"))
    assert float(str(plain["gap_percent"])) < 9  # the bound has no limit, and of the bubble what all cuts have
