"""What no simulated step can be faster than, from the plan alone: nothing here looks at streams or links in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.cluster import Cluster
from tap_planner.plan import Overlap
from tap_planner.program import Program
from tap_planner.schedule import Work
from tap_planner.simulate.loads import level_loads
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.slots import Slots, ways


@dataclass(frozen=True, slots=True, kw_only=True)
class LowerBounds:
    """Times that the step takes at least, for one reason each."""

    critical_path_ns: int
    """One microbatch through all chunks, forward and back, with its transfers; then its stage's end of the step."""
    stage_ns: int
    """The busiest stage: until a microbatch can have come there, its main stream, its end of the step."""
    link_ns: int
    """The transfers over the busiest link in one direction; between devices of a cluster, over the busiest channel."""
    level_ns: int
    """What one stage's collectives, and its transfers over one link, send over the busiest level of the topology."""

    @property
    def step_ns(self) -> int:
        """The largest."""
        return max(self.critical_path_ns, self.stage_ns, self.link_ns, self.level_ns)


def lower_bounds(
    program: Program, cluster: Cluster, *, overlap: Overlap | None = None, devices: Sequence[int] = ()
) -> LowerBounds:
    """Bound the step of a Program from below; arguments as ``simulate``."""
    every = [Slots(program, cluster, overlap=way, devices=devices) for way in ways(overlap)]
    return min((_Bounds(slots).result() for slots in every), key=lambda bounds: bounds.step_ns)


class _Bounds:
    """Working state of ``lower_bounds``."""

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._counts = [Counter(order.passes) for order in slots.orders]
        stages = range(len(slots.orders))
        self._endings_ns = [slots.closing.least_ns(stage) for stage in stages]
        self._begin: dict[int, int] = {}
        """Per pass when a microbatch can come to it at the earliest."""
        self._walk()

    def result(self) -> LowerBounds:
        """All of them."""
        stages = range(len(self._slots.orders))
        passes = self._slots.passes
        loads = level_loads(passes, self._slots.orders)
        ends = [
            self._begin[index] + passes[index].main_ns + self._endings_ns[stage]
            for stage in stages
            for index in self._counts[stage]
        ]
        return LowerBounds(
            critical_path_ns=max(ends, default=0),
            stage_ns=max((self._stage_ns(stage) for stage in stages), default=0),
            link_ns=max(self._links().values(), default=0),
            level_ns=max((ns for load in loads for ns in load.values()), default=0),
        )

    def _walk(self) -> None:
        """One microbatch through all passes, each as soon as what it needs is there."""
        issued: dict[tuple[int, bool], int] = {}
        done: dict[int, int] = {}
        """Per chunk when what it did before is done; of two ways to do the same the first counts."""
        passes = self._slots.passes
        forward = [index for index, each in enumerate(passes) if each.works[0][0] is Work.FORWARD]
        later = [index for index in range(len(passes)) if index not in set(forward)]
        later.sort(key=lambda index: (-passes[index].chunk, _TURN[passes[index].works[0][0]]))
        for index in (*forward, *later):
            each = passes[index]
            offsets = _offsets(each)
            arrivals = [
                issued[route.operator, route.forward] + route.ns - offsets[position]
                for position, route in each.receives
            ]
            before = done.get(each.chunk, 0)
            if each.works[0][0] is Work.WEIGHT_BACKWARD:
                self._begin[index] = before
                continue
            self._begin[index] = max([before, *arrivals])
            for position, route in each.sends:
                issued.setdefault((route.operator, route.forward), self._begin[index] + offsets[position])
            if each.works[0][0] is not Work.BACKWARD:
                done[each.chunk] = self._begin[index] + each.main_ns

    def _stage_ns(self, stage: int) -> int:
        order = self._slots.orders[stage].passes
        spent = sum(count * self._slots.passes[index].main_ns for index, count in self._counts[stage].items())
        return (self._begin[order[0]] if order else 0) + spent + self._endings_ns[stage]

    def _links(self) -> Counter[tuple[int, ...]]:
        """Time of transfers by stage that sends and direction, or by channel."""
        found: Counter[tuple[int, ...]] = Counter()
        channels = self._slots.channels
        for counts in self._counts:
            for index, count in counts.items():
                for _, route in self._slots.passes[index].sends:
                    if channels is None:
                        links = [(route.stages[0], int(route.is_next(len(self._counts))))]
                    else:
                        links = [(channel,) for channel in channels.between(*route.stages)]
                    for link in links:
                        found[link] += count * route.ns
        return found


_TURN = {Work.BACKWARD: 0, Work.INPUT_BACKWARD: 1, Work.WEIGHT_BACKWARD: 2}


def _offsets(given: Pass) -> Sequence[int]:
    """When the main stream comes to each position if it waits for nothing."""
    offsets = [0]
    for pieces in given.main:
        offsets.append(offsets[-1] + sum(piece.ns for piece in pieces))
    return offsets
