"""Slots, transfers and the background one nanosecond after the other: what playing them in events is compared with.

At a stage, of what needs a level of the topology in the same nanosecond, the main stream goes first, then transfers,
then the background.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tap_planner.simulate.overlap import Background, Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.routes import Route
from tap_planner.simulate.sending import StageOrder

NOTHING: Levels = frozenset()


@dataclass(eq=False)
class Item:
    """A collective of the background stream."""

    given: Background
    bound: bool
    left: int = 0
    start: int = 0
    """Position at which it may start in the slot that it came with; -1 once that slot is over."""

    def __post_init__(self) -> None:
        self.left, self.start = self.given.ns, self.given.start


class Slot:
    """A slot on its way, with the queue of its stage."""

    def __init__(self, given: Pass, queue: list[Item], loose: Sequence[Background]) -> None:
        self.queue = queue
        end = len(given.main)
        fresh = [*(Item(job, True) for job in given.background), *(Item(job, False) for job in loose)]
        fresh.sort(key=lambda item: (item.start, end if item.given.needed is None else item.given.needed))
        queue.extend(fresh)
        self.main = given.main
        self.offsets: list[int] = []
        self.clock = self.position = self.piece = self.spent = 0
        self.is_over = False
        self.exposed: dict[str, int] = {}

    def settle(self) -> None:
        """Whatever takes no time."""
        while not self.is_over and not self._waits_for():
            if self.position == len(self.main):
                if len(self.offsets) == self.position:
                    self.offsets.append(self.clock)  # and then for what it must finish
                    continue
                self.is_over = True
                for item in self.queue:
                    item.start = -1
                return
            if len(self.offsets) == self.position:
                self.offsets.append(self.clock)
            pieces = self.main[self.position]
            if self.piece < len(pieces) and self.spent < pieces[self.piece].ns:
                return
            self.piece, self.spent = self.piece + 1, 0
            if self.piece >= len(pieces):
                self.position, self.piece = self.position + 1, 0

    def _waits_for(self) -> bool:
        """Whether the main stream waits for the background."""
        if self.piece or self.spent or len(self.offsets) > self.position:
            if self.position < len(self.main):
                return False
            needed = [number for number, item in enumerate(self.queue) if item.bound]
        else:
            needed = [
                number for number, item in enumerate(self.queue) if item.bound and item.given.needed == self.position
            ]
        return any(item.left for item in self.queue[: max(needed, default=-1) + 1])

    @property
    def uses(self) -> Levels:
        """Of the main stream, in the next nanosecond."""
        if self.is_over or self._waits_for():
            return NOTHING
        return self.main[self.position][self.piece].levels

    def tick(self, shared: Levels) -> None:
        """One nanosecond, in which transfers of the stage move over some levels."""
        waits, head = self._waits_for(), next((item for item in self.queue if item.left), None)
        taken = shared if waits else shared | self.uses
        if head is not None and (waits or head.start <= self.position) and not head.given.levels & taken:
            head.left -= 1
            if waits:
                self.exposed[head.given.kind] = self.exposed.get(head.given.kind, 0) + 1
        if not waits:
            self.spent += 1
        self.clock += 1


def alone(given: Pass) -> Slot:
    """A slot by itself."""
    slot = Slot(given, [], ())
    slot.settle()
    while not slot.is_over:
        slot.tick(NOTHING)
        slot.settle()
    return slot


@dataclass(eq=False)
class Way:
    """A transfer."""

    route: Route
    microbatch: int
    issued: int
    order: tuple[int, int]
    left: int
    links: tuple[object, object]
    start: int = -1
    end: int = -1
    moved: list[int] = field(default_factory=list)


@dataclass(eq=False)
class Stage:
    """One of the stages."""

    order: StageOrder
    base: int
    """How many slots the stages before have."""
    starts: list[int] = field(default_factory=list)
    slots: list[Slot] = field(default_factory=list)
    issued: int = 0
    """How many sends of the last slot were."""
    free: int = 0
    queue: list[Item] = field(default_factory=list)
    shared: list[Levels] = field(default_factory=list)
    """Levels over which its transfers move, by nanosecond."""
    done: list[tuple[str, int]] = field(default_factory=list)
    waited: int = 0
    exposed: dict[str, int] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        return len(self.slots) == len(self.order.passes) and (not self.slots or self.slots[-1].is_over)


class Reference:
    """Plays passes; arguments as ``play``."""

    def __init__(self, passes: Sequence[Pass], orders: Sequence[StageOrder]) -> None:
        self.passes = passes
        bases = [sum(len(order.passes) for order in orders[:stage]) for stage in range(len(orders))]
        self.stages = [Stage(order, base) for order, base in zip(orders, bases, strict=True)]
        self.ways: list[Way] = []
        self.came: dict[tuple[int, bool, int], tuple[int, Way | None]] = {}
        """By operator, direction and microbatch, when it came."""
        self.leads = {
            (route.operator, route.forward): alone(each).offsets[position]
            for each in passes
            for position, route in each.receives
        }
        self.now = 0
        while not all(stage.is_over and not stage.queue for stage in self.stages) or any(w.end < 0 for w in self.ways):
            while self._settle():
                pass
            self._tick()
            self.now += 1
            assert self.now < 100_000
        self._settle()

    # -- what happens at a time ----------------------------------------------------------------------------------------

    def _settle(self) -> bool:
        """Everything that happens at this time; whether anything did."""
        numbered = list(enumerate(self.stages))
        return any([self._arrivals(), *(self._of_stage(*one) for one in numbered)]) or self._departures()

    def _arrivals(self) -> bool:
        changed = False
        for way in sorted(self.ways, key=lambda way: way.order):
            if way.start >= 0 and way.end < 0 and not way.left:
                way.end, changed = self.now, True
                self.came[way.route.operator, way.route.forward, way.microbatch] = (self.now, way)
        return changed

    def _departures(self) -> bool:
        changed = False
        for way in sorted(self.ways, key=lambda way: (way.issued, way.order)):
            if way.issued > self.now or way.start >= 0:
                continue
            earlier = [
                other
                for other in self.ways
                if (other.issued, other.order) < (way.issued, way.order) and set(other.links) & set(way.links)
            ]
            if all(other.end >= 0 for other in earlier):
                way.start, changed = self.now, True
        return changed

    def _of_stage(self, number: int, stage: Stage) -> bool:
        changed = False
        if stage.slots and not stage.slots[-1].is_over:
            changed = self._go_on(number, stage)
        elif len(stage.slots) < len(stage.order.passes):
            changed = self._place(stage)
        while stage.queue and not stage.queue[0].left and (stage.queue[0].start < 0 or not stage.slots[-1].is_over):
            stage.done.append((stage.queue.pop(0).given.kind, self.now))
            changed = True
            if stage.is_over:
                stage.free = max(stage.free, self.now)
        return changed

    def _go_on(self, number: int, stage: Stage) -> bool:
        slot = stage.slots[-1]
        before = (slot.position, slot.is_over, stage.issued)
        slot.settle()
        position = len(stage.slots) - 1
        sends = self.passes[stage.order.passes[position]].sends
        while stage.issued < len(sends) and sends[stage.issued][0] < len(slot.offsets):
            at, route = sends[stage.issued]
            self._send(number, stage, route, stage.starts[-1] + slot.offsets[at])
            stage.issued += 1
        if slot.is_over:
            stage.free = stage.starts[-1] + slot.clock
            for kind, ns in slot.exposed.items():
                stage.exposed[kind] = stage.exposed.get(kind, 0) + ns
        return before != (slot.position, slot.is_over, stage.issued)

    def _place(self, stage: Stage) -> bool:
        position = len(stage.slots)
        microbatch, given = stage.order.microbatches[position], self.passes[stage.order.passes[position]]
        keys = [(route.operator, route.forward, microbatch) for _, route in given.receives]
        if any(key not in self.came or self.came[key][0] > self.now for key in keys):
            return False
        ready = [(self.came[key][0] - self.leads[key[:2]], self.came[key][1]) for key in keys]
        start = max([stage.free, *(time for time, _ in ready)])
        came = [(-time, way.order, way) for time, way in ready if way is not None]
        last = min(came, key=lambda one: one[:2], default=(0, (), None))[2]
        if start > stage.free and last is not None:
            stage.waited += sum(tick >= last.end - (start - stage.free) for tick in last.moved)
        slot = Slot(given, stage.queue, stage.order.loose.get(position, ()))
        stage.starts.append(start)
        stage.slots.append(slot)
        stage.issued = 0
        for tick in range(start, self.now):  # what it does before it receives anything
            slot.settle()
            slot.tick(stage.shared[tick])
        return True

    def _send(self, number: int, stage: Stage, route: Route, issued: int) -> None:
        position = len(stage.slots) - 1
        microbatch = stage.order.microbatches[position]
        if route.is_local:
            self.came[route.operator, route.forward, microbatch] = (issued, None)
            return
        count = len(self.stages)
        ahead = (route.stages[1] - route.stages[0]) % count
        direction = "next" if ahead <= count - ahead else "previous"
        links = (("out", number, direction), ("in", route.stages[1], direction))
        order = (stage.base + position, stage.issued)
        self.ways.append(Way(route, microbatch, issued, order, route.ns, links))

    # -- one nanosecond ------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        uses = [stage.slots[-1].uses if stage.slots else NOTHING for stage in self.stages]
        moving: list[Way] = []
        for way in self.ways:
            if way.start >= 0 and way.left:
                source, target = way.route.stages
                if not way.route.levels & (uses[source] | uses[target]):
                    moving.append(way)
        for way in moving:
            way.left -= 1
            way.moved.append(self.now)
        for number, stage in enumerate(self.stages):
            shared = NOTHING.union(*(way.route.levels for way in moving if number in way.route.stages))
            stage.shared.append(shared)
            if stage.slots and not stage.slots[-1].is_over:
                stage.slots[-1].tick(shared)
            elif stage.queue and not stage.queue[0].given.levels & shared:
                stage.queue[0].left -= 1
                if stage.is_over:
                    kind = stage.queue[0].given.kind
                    stage.exposed[kind] = stage.exposed.get(kind, 0) + 1

    # -- what is compared ----------------------------------------------------------------------------------------------

    def transfers(self) -> Iterator[tuple[int, int, int, int, bool]]:
        """Of each: start, end, microbatch, operator, direction."""
        return ((w.start, w.end, w.microbatch, w.route.operator, w.route.forward) for w in self.ways)
