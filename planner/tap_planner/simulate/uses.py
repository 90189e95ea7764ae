"""When the main stream of a pass uses links of the topology, from its start."""

from __future__ import annotations

from collections.abc import Iterator

from tap_planner.simulate.intervals import Intervals, joined
from tap_planner.simulate.overlap import Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Run


def uses_of(given: Pass, run: Run, levels: Levels) -> Intervals | None:
    """When it uses any of some levels; None: never."""
    found = joined(_pieces(given, run, levels))
    return found if found.starts else None


def _pieces(given: Pass, run: Run, levels: Levels) -> Iterator[tuple[int, int]]:
    for clock, pieces in zip(run.offsets_ns, given.main, strict=False):
        for piece in pieces:
            end = clock + piece.ns
            if end > clock and not levels.isdisjoint(piece.levels):
                yield clock, end
            clock = end
