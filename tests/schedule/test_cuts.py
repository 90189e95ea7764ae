"""Balanced cuts against all cuts there are."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import balanced_cuts


def parts(work: list[int], border: list[int], cuts: tuple[int, ...]) -> list[int]:
    """What every part takes."""
    ends = (*cuts[1:], len(work))
    return [
        sum(work[a:b]) + (border[a] if a else 0) + (border[b] if b < len(work) else 0)
        for a, b in zip(cuts, ends, strict=True)
    ]


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_are_better(seed: int) -> None:
    """The longest part is as short as it can be, and of such cuts the sum of borders is least."""
    draw = random.Random(seed)
    size, count = draw.randint(1, 9), draw.randint(1, 4)
    work = [draw.randint(0, 9) for _ in range(size)]
    border = [draw.randint(0, 4) for _ in range(size)]
    allowed = [draw.random() < 0.8 for _ in range(size)]
    places = [index for index in range(1, size) if allowed[index]]
    options = [(0, *chosen) for chosen in itertools.combinations(places, count - 1)]
    if not options:
        with pytest.raises(UsageError, match=f"{count} pipeline stages"):
            balanced_cuts(np.array([work]), border, [0] * count, allowed)
        return
    found = balanced_cuts(np.array([work]), border, [0] * count, allowed)
    assert found is not None and found in options
    best = min((max(parts(work, border, cuts)), sum(border[c] for c in cuts[1:])) for cuts in options)
    assert (max(parts(work, border, found)), sum(border[c] for c in found[1:])) == best


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_are_better_where_parts_count_several_times(seed: int) -> None:
    """A part whose length counts k times is so much shorter; with room for each part, too."""
    draw = random.Random(seed)
    size, count = draw.randint(4, 9), draw.randint(1, 4)
    work, border = [draw.randint(0, 9) for _ in range(size)], [draw.randint(0, 4) for _ in range(size)]
    times = [draw.randint(1, 3) for _ in range(count)]
    most = draw.choice([size, 3])

    def fits(part: int, places: np.ndarray) -> np.ndarray:
        return places[None, :] - places[:, None] <= most

    options = [
        cuts
        for cuts in ((0, *chosen) for chosen in itertools.combinations(range(1, size), count - 1))
        if all(b - a <= most for a, b in itertools.pairwise((*cuts, size)))
    ]
    found = balanced_cuts(np.array([work]), border, [0] * count, None, fits if most < size else None, times)

    def key(cuts: tuple[int, ...]) -> tuple[int, int]:
        longest = max(k * part for k, part in zip(times, parts(work, border, cuts), strict=True))
        return longest, sum(border[c] for c in cuts[1:])

    if not options:
        assert found is None
        return
    assert found in options
    assert key(found) == min(map(key, options))


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_that_fit_are_better(seed: int) -> None:
    """The same where each part may hold so much of what operators hold, each in its own measure; none, if none fit."""
    draw = random.Random(seed)
    size, count = draw.randint(2, 9), draw.randint(1, 4)
    work = [draw.randint(0, 9) for _ in range(size)]
    border = [draw.randint(0, 4) for _ in range(size)]
    held = [draw.randint(0, 5) for _ in range(size)]
    room = [draw.randint(2, 14) for _ in range(count)]
    sums = np.concatenate([[0], np.cumsum(held)])

    def fits(part: int, places: np.ndarray) -> np.ndarray:
        return sums[places][None, :] - sums[places][:, None] <= room[part]

    options = [
        cuts
        for cuts in ((0, *chosen) for chosen in itertools.combinations(range(1, size), count - 1))
        if all(sum(held[a:b]) <= most for a, b, most in zip(cuts, (*cuts[1:], size), room, strict=True))
    ]
    if size < count:
        return
    found = balanced_cuts(np.array([work]), border, [0] * count, None, fits)
    if not options:
        assert found is None
        return
    assert found in options
    best = min((max(parts(work, border, cuts)), sum(border[c] for c in cuts[1:])) for cuts in options)
    assert (max(parts(work, border, found)), sum(border[c] for c in found[1:])) == best


@pytest.mark.parametrize("seed", range(60))
def test_no_cuts_are_better_where_operators_take_unlike_times(seed: int) -> None:
    """The same where each part has times of its own, and counts several times."""
    draw = random.Random(seed)
    size, count, kinds = draw.randint(4, 9), draw.randint(1, 4), draw.randint(1, 3)
    work = [[draw.randint(0, 9) for _ in range(size)] for _ in range(kinds)]
    border = [draw.randint(0, 4) for _ in range(size)]
    rows = [draw.randrange(kinds) for _ in range(count)]
    times = [draw.randint(1, 3) for _ in range(count)]
    options = [(0, *chosen) for chosen in itertools.combinations(range(1, size), count - 1)]
    found = balanced_cuts(np.array(work), border, rows, None, None, times)

    def key(cuts: tuple[int, ...]) -> tuple[int, int]:
        lengths = [parts(work[row], border, cuts)[part] for part, row in enumerate(rows)]
        return max(k * length for k, length in zip(times, lengths, strict=True)), sum(border[c] for c in cuts[1:])

    assert found in options
    assert key(found) == min(map(key, options))


def test_equal_layers() -> None:
    """Layers of equal work are dealt out evenly."""
    assert balanced_cuts(np.array([[10, 30] * 8]), [1, 2] * 8, [0] * 4) == (0, 4, 8, 12)
