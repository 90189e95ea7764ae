"""Transfers on their way, of stages that use their links: first issued first served, each over all links of its way."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Sequence

from tap_planner.simulate.crossing import Crossing, Kept, Transfer
from tap_planner.simulate.opening import OpenSlot
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playback import Playback, no_receiver
from tap_planner.simulate.running import Run
from tap_planner.simulate.sending import Out, StageOrder
from tap_planner.simulate.sharing import Sharing


class Transfers(Playback, ABC):
    """Those of all stages; who plays the slots is another matter."""

    def __init__(
        self,
        passes: Sequence[Pass],
        runs: Sequence[Run],
        outs: Sequence[tuple[Out, ...]],
        orders: Sequence[StageOrder],
    ) -> None:
        super().__init__(passes, runs, outs, orders)
        self._crossing = Crossing(
            passes, runs, self._pass_of, first=self._first, following=self._next, starts_ns=self._starts
        )
        self._sharing = Sharing(passes, outs, orders)
        self._open: list[OpenSlot | None] = [None] * len(orders)
        """Per stage the slot on its way that transfers may yet change."""
        self._sends = [tuple((out, self._crossing.kept(out)) for out in of_pass) for of_pass in outs]
        self._width = max(map(len, outs), default=0)
        self._came: list[Transfer | None] = [None] * len(self._pass_of)
        """Per slot the transfer that came last."""
        self._sent: list[list[Transfer]] = [[] for _ in orders]
        """Per stage its transfers that have started, where these count."""
        self._events: list[tuple[int, int, Transfer | int]] = []
        """Times of what is to be looked at: a transfer, or a stage, by their numbers."""
        self._now = 0
        self._queues: list[deque[Transfer]] = [deque() for _ in range(self._links)]
        """Per link what is on its way, and what waits for it."""
        self._link_free = [0] * self._links

    @abstractmethod
    def _advance(self, stage: int) -> None:
        """Play the slots of a stage that have all that they receive."""

    @abstractmethod
    def _touch(self, stages: Iterable[int]) -> None:
        """Transfers of some stages move at other times."""

    def _send(self, number: int, turn: int, out: Out, kept: Kept, issued: int) -> None:
        microbatch = self._microbatch_of[number]
        if out.route.is_local:
            self._arrive(out, microbatch, issued, None)
        else:
            turn += number * self._width
            heapq.heappush(self._events, (issued, turn, Transfer(out, kept, microbatch, issued, turn)))

    def _issue(self, given: Transfer) -> None:
        out_of, into = given.out.links
        queues = self._queues
        if not queues[out_of] and not queues[into] and self._starts_now(given):
            self._arrived(given)
            return
        queues[out_of].append(given)
        queues[into].append(given)

    def _starts_now(self, given: Transfer) -> bool:
        """Let a transfer take its links; whether it is known when it arrives."""
        start = given.issued_ns
        for link in given.out.links:
            if self._link_free[link] > start:
                start = self._link_free[link]
        given.start_ns = start
        if not self._sharing.counts:
            return self._arrives(given)
        stages = given.out.route.stages
        for stage in stages:
            self._sent[stage].append(given)
        has_arrived = self._arrives(given)
        if self._sharing.changes_slots:
            self._touch(stages)
        return has_arrived

    def _arrives(self, given: Transfer) -> bool:
        """Whether it is known when a transfer arrives; else it is looked at again."""
        end = self._crossing.move(given)
        if end <= self._now:
            return True
        for stage, _ in given.kept:
            if end > self._free[stage] and not self._is_quiet(stage, given):
                heapq.heappush(self._events, (end, given.number, given))
                return False
        return True

    def _is_quiet(self, stage: int, given: Transfer) -> bool:
        """Whether a stage starts no other slot before a transfer arrives, as it waits for it or has no more."""
        if self._open[stage] is not None:
            return False
        following = self._next[stage]
        if following == self._first[stage + 1]:
            return True
        return stage == given.out.target and following == given.out.slots[given.microbatch]

    def _leave(self, given: Transfer) -> None:
        """A transfer that has been the first at its links arrives, and others follow."""
        gone = [given]
        while gone:
            given = gone.pop()
            queues = [self._queues[link] for link in given.out.links]
            for queue in queues:
                queue.popleft()
            self._arrived(given)
            for queue in queues:
                if queue and queue[0].start_ns < 0:
                    first = queue[0]
                    if all(self._queues[link][0] is first for link in first.out.links) and self._starts_now(first):
                        gone.append(first)

    def _arrived(self, given: Transfer) -> None:
        out, end = given.out, given.end_ns
        given.has_arrived = True
        for link in out.links:
            self._link_free[link] = end
        self._transfers.append((out, given.microbatch, given.start_ns, end))
        self._arrive(out, given.microbatch, end, given)
        target = out.target
        following = self._next[target]
        if following == out.slots[given.microbatch] and not self._pending[following] and self._open[target] is None:
            self._advance(target)

    def _arrive(self, out: Out, microbatch: int, end: int, given: Transfer | None) -> None:
        number = out.slots[microbatch]
        if number < 0:
            raise no_receiver(out, microbatch)
        self._pending[number] -= 1
        ready, came = end - out.lead_ns, self._came[number]
        is_first = given is not None and came is not None and given.number < came.number
        if ready > self._ready[number] or (ready == self._ready[number] and is_first):
            self._ready[number], self._came[number] = ready, given
        if out.lead_ns:
            self._crossing.hide(number, end)
