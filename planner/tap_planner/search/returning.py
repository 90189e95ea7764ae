"""From a fast plan back to an old one, as far as the time allowed permits, under one configuration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from tap_planner.search.choices import Assignment, Choices, Values, fold_assignment
from tap_planner.search.distance import Distance
from tap_planner.search.factors import WidthError
from tap_planner.search.limited import LimitedSearch
from tap_planner.search.mixing import mixed
from tap_planner.search.penalties import ChangeTables, PenalisedModel, PenalisedSolver
from tap_planner.search.pricing import price_choices

MAX_PENALTIES = 8
"""Penalties that are tried."""
MAX_TRIALS = 300
"""Groups of changes that are tried to be undone."""
_STAGES = 4
"""Stages of the limited search for each penalty: all but those of the master."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A plan with what it takes and how much it changes."""

    choices: Choices
    assignment: Assignment
    ns: int
    num_bytes: int
    changes: int


class Returning:
    """Looks for few changes within a time.

    Args:
        distance: the old plan in the variables of the model.
        limit_bytes: memory limit per device; None for none.
        most_ns: the time allowed.
        least_ns: no plan is faster.
        start: a plan that is known to be within the time, if any.
        multiplier: price of memory that served the search for it.
    """

    def __init__(
        self,
        distance: Distance,
        *,
        limit_bytes: int | None,
        most_ns: int,
        least_ns: int,
        start: Assignment | None,
        multiplier: Fraction,
    ) -> None:
        self._distance = distance
        self._model = distance.costed.model
        self._limit = limit_bytes
        self._most_ns = most_ns
        self._room = max(most_ns - least_ns, 0) + 1
        self._start = start
        self._multiplier = multiplier
        self._tables = ChangeTables(distance)

    def run(self) -> Point | None:
        """The plan with the fewest changes that was met; None where none is within the time."""
        whole = self._distance.assignment()
        old = None if whole is None else self._point(whole)
        if old is not None and self._is_within(old):
            return old
        within = None if self._start is None else self._point(self._start)
        if within is not None and not self._is_within(within):
            within = None
        within, beyond = self._bracket(within)
        if within is None:
            return None
        for other in (beyond, old):
            if other is not None:
                within = self._mix(within, other)
        return self._undo(within)

    def _is_within(self, point: Point) -> bool:
        return point.ns <= self._most_ns and self._fits(point)

    def _fits(self, point: Point) -> bool:
        return self._limit is None or point.num_bytes <= self._limit

    def _point(self, assignment: Assignment) -> Point:
        return self._point_of(_merged(fold_assignment(self._model, assignment)), assignment)

    def _point_of(self, choices: Choices, assignment: Assignment) -> Point:
        price = price_choices(self._distance.costed, choices)
        return Point(
            choices=choices,
            assignment=assignment,
            ns=price.ns,
            num_bytes=price.num_bytes,
            changes=self._distance.count(assignment),
        )

    # -- penalties ---------------------------------------------------------------------------------------------

    def _bracket(self, within: Point | None) -> tuple[Point | None, Point | None]:
        """The plan with the fewest changes within the time, and the one with the most beyond it."""
        beyond = self._minimise(self._room)
        if beyond is None or self._is_within(beyond):
            return _fewer(within, beyond), None
        within = _fewer(within, None) or self._minimise(1)
        if within is None or not self._is_within(within):
            return None, beyond
        tried = {self._room}
        for _ in range(MAX_PENALTIES):
            penalty = (beyond.ns - within.ns) // max(within.changes - beyond.changes, 1)
            if penalty < 1 or penalty in tried:
                break
            tried.add(penalty)
            found = self._minimise(penalty)
            if found is None:
                break
            if self._is_within(found):
                if found.changes >= within.changes:
                    break
                within = found
            elif found.ns < beyond.ns:
                beyond = found
            else:
                break
        return within, beyond

    def _minimise(self, penalty_ns: int) -> Point | None:
        """Least time + penalty x changes under the limit; None where nothing that fits was found."""
        solver = PenalisedSolver(PenalisedModel(self._tables, penalty_ns))
        state = LimitedSearch(solver, self._limit)
        try:
            for _ in range(_STAGES):
                if not state.finished:
                    state.advance(self._multiplier, None)
        except WidthError:
            pass
        if state.best is None or state.best.choices is None:
            return None
        return self._point_of(state.best.choices, state.best.choices.expand())

    # -- mixtures ----------------------------------------------------------------------------------------------

    def _mix(self, within: Point, beyond: Point) -> Point:
        """As many occurrences from the plan beyond the time as the time allows."""
        best = within
        total = sum(len(sequence) for sequence in within.choices.sequences)
        for outer in (beyond.choices.outer, within.choices.outer):
            low, high = 0, total
            while low <= high:
                middle = (low + high) // 2
                choices = mixed(outer, within.choices, beyond.choices, middle)
                point = self._point_of(choices, choices.expand())
                if self._is_within(point):
                    low = middle + 1
                    if point.changes < best.changes:
                        best = point
                else:
                    high = middle - 1
        return best

    # -- single groups -----------------------------------------------------------------------------------------

    def _undo(self, point: Point) -> Point:
        """Put back what differs, group by group, while the time and the memory allow it."""
        trials = 0
        improved = True
        while improved and point.changes:
            improved = False
            for assignment in self._undone(point.assignment):
                if trials >= MAX_TRIALS:
                    return point
                if assignment == point.assignment:
                    continue
                trials += 1
                other = self._point(assignment)
                if other.changes < point.changes and self._is_within(other):
                    point, improved = other, True
                    break
        return point

    def _undone(self, current: Assignment) -> Iterator[Assignment]:
        """The assignment with a group of decisions as in the old plan: all of a run, or of what lies between runs; all
        recompute settings of a run; all ZeRO settings; one operator of a block in all occurrences; one occurrence."""
        old = self._distance.assignment(current)
        if old is None:
            return
        model = self._model
        everywhere = set(range(model.places.num_regions))
        runs = [set(regions) for regions in model.places.run_regions]
        groups = [everywhere.difference(*runs), *runs]
        for regions in groups:
            yield self._with_regions(current, old, regions)
        for regions in runs:
            yield replace(current, recompute=_taken(current.recompute, old.recompute, regions))
        yield replace(current, zero=dict(old.zero))
        yield replace(current, parameters=dict(old.parameters))
        classes: dict[int, list[int]] = {}
        for index, (value, wanted) in enumerate(zip(current.operators, old.operators, strict=True)):
            if value != wanted:
                classes.setdefault(int(model.class_of[index]), []).append(index)
        for indices in classes.values():
            operators = list(current.operators)
            for index in indices:
                operators[index] = old.operators[index]
            yield self._with_zero(replace(current, operators=tuple(operators)))
        for regions in runs:
            for region in sorted(regions):
                yield self._with_regions(current, old, {region})

    def _with_regions(self, current: Assignment, old: Assignment, regions: set[int]) -> Assignment:
        """Some regions as in the old plan, with their settings."""
        region_of = self._model.region_of.tolist()
        operators = tuple(
            before if region in regions else now
            for before, now, region in zip(old.operators, current.operators, region_of, strict=True)
        )
        recompute = _taken(current.recompute, old.recompute, regions)
        return self._with_zero(replace(current, operators=operators, recompute=recompute))

    def _with_zero(self, assignment: Assignment) -> Assignment:
        """ZeRO settings for what is now stored otherwise; the others stay as they are."""
        wanted = self._distance.zero_settings(assignment, {})
        return replace(assignment, zero={**wanted, **assignment.zero})


def _fewer(one: Point | None, other: Point | None) -> Point | None:
    points = [point for point in (one, other) if point is not None]
    return min(points, key=lambda point: (point.changes, point.ns)) if points else None


def _taken(current: Values, old: Values, regions: set[int]) -> dict[int, int]:
    """Values of some regions from ``old``, the others from ``current``."""
    return {region: (old if region in regions else current).get(region, 0) for region in {*current, *old}}


def _merged(choices: Choices) -> Choices:
    """The same choices with equal occurrences written once."""
    links: list[tuple[Values, ...]] = []
    sequences: list[tuple[int, ...]] = []
    for found, sequence in zip(choices.links, choices.sequences, strict=True):
        numbers: dict[tuple[tuple[int, int], ...], int] = {}
        different: list[Values] = []
        places: list[int] = []
        for link in found:
            key = tuple(sorted(link.items()))
            if key not in numbers:
                numbers[key] = len(different)
                different.append(link)
            places.append(numbers[key])
        links.append(tuple(different))
        sequences.append(tuple(places[link] for link in sequence))
    return Choices(choices.model, choices.outer, tuple(links), tuple(sequences))


__all__ = ["Point", "Returning"]
