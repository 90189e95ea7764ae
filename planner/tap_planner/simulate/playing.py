"""Plays the slots of all stages in time: a discrete-event simulation.

A stage runs its slots in order, each as soon as the one before has left it and what it receives has come. Sends are
issued at their offsets and do not wait. Each stage has, for each of the two directions along the pipeline, one link out
and one link in; stages that are devices of a cluster have its channels in their place, some of which they share
(``devices.Channels``). A transfer takes all links of its way when what was issued before has left them, keeps them for
its whole time, latency included, and arrives when that is over. So none waits for one that was issued later, and none
for ever. Within a stage nothing is sent.

Transfers that are issued at the same time over channels come as the program has them, chunks forward, then back again;
those of one slot tensor by tensor, and each to devices by their ranks. Which stage has which number does not matter.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tap_planner.errors import UsageError
from tap_planner.simulate.devices import Channels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Run, Span, Streams
from tap_planner.simulate.sending import Out, StageOrder, outs_of

Sent = tuple[Out, int, int]
"""A transfer that was made: what, of which microbatch, and when it started; it took ``Out.ns``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a stage did, and when."""

    starts_ns: Sequence[int]
    """Per slot."""
    runs: Sequence[Run]
    """Per slot."""
    spans: Sequence[Span]
    """Background that was done between slots."""
    transfers: Sequence[Sent]
    """Of all stages."""
    waited_ns: int
    """For transfers that were on their way while the stage had nothing to do."""
    free_ns: int
    """When the last slot has left it."""
    exposed_ns: Mapping[str, int]
    """What the main stream waited for of the background, by kind."""


def play(passes: Sequence[Pass], orders: Sequence[StageOrder], channels: Channels | None = None) -> tuple[Played, ...]:
    """Play all slots.

    Args:
        passes: what slots may do.
        orders: per stage.
        channels: where stages are devices of a cluster, what transfers between them occupy.

    Returns:
        Per stage.

    Raises:
        UsageError: the stages wait for each other, or for a slot that is in no order.
    """
    playing = _Playing(passes, orders, channels)
    playing.run()
    return tuple(playing.played(stage) for stage in range(len(orders)))


class _Playing:
    """Working state of ``play``. Slots of all stages are numbered stage by stage."""

    def __init__(self, passes: Sequence[Pass], orders: Sequence[StageOrder], channels: Channels | None) -> None:
        self._passes, self._orders = passes, orders
        self._runs = [Streams().run(each.main, each.background) for each in passes]
        self._outs = outs_of(passes, self._runs, orders, channels)
        self._pass_of = [index for order in orders for index in order.passes]
        self._microbatch_of = [number for order in orders for number in order.microbatches]
        lengths = [len(order.passes) for order in orders]
        self._first = list(itertools.accumulate(lengths, initial=0))
        self._next = self._first[:-1]
        self._free = [0] * len(orders)
        self._tail = [
            first + min(order.loose, default=length)
            for first, order, length in zip(self._first, orders, lengths, strict=False)
        ]
        """Per stage the first slot behind which reductions of the end of the step run."""
        self._streams = [Streams() for _ in orders]
        receives = [len(each.receives) for each in passes]
        self._pending = [receives[index] for index in self._pass_of]
        self._ready = [0] * len(self._pass_of)
        self._transfer = [0] * len(self._pass_of)
        """Per slot the time of the transfer that came last."""
        self._starts = [0] * len(self._pass_of)
        self._run_of = [self._runs[index] for index in self._pass_of]
        self._waited = [0] * len(orders)
        self._spans: list[list[Span]] = [[] for _ in orders]
        self._transfers: list[Sent] = []

    def played(self, stage: int) -> Played:
        """What a stage did."""
        slots = slice(self._first[stage], self._first[stage + 1])
        return Played(
            starts_ns=self._starts[slots],
            runs=self._run_of[slots],
            spans=self._spans[stage],
            transfers=self._transfers,
            waited_ns=self._waited[stage],
            free_ns=self._free[stage],
            exposed_ns=self._exposed(stage),
        )

    def _exposed(self, stage: int) -> Mapping[str, int]:
        found: Counter[str] = Counter()
        first, tail, stop = self._first[stage], self._tail[stage], self._first[stage + 1]
        for index, count in Counter(self._pass_of[first:tail]).items():
            for kind, ns in self._runs[index].exposed_ns.items():
                found[kind] += count * ns
        for run in self._run_of[tail:stop]:
            found.update(run.exposed_ns)
        return found

    def run(self) -> None:
        """Until nothing happens any more."""
        # Local names and functions: looking up attributes would take half of the time.
        pending, ready, transfer, starts = self._pending, self._ready, self._transfer, self._starts
        following, free_of, stops, tails = self._next, self._free, self._first[1:], self._tail
        pass_of, microbatch_of, run_of, outs_of_pass = self._pass_of, self._microbatch_of, self._run_of, self._outs
        durations = [run.duration_ns for run in self._runs]
        events: list[tuple[int, int, Out, int]] = []
        issues = itertools.count()
        push, pop = heapq.heappush, heapq.heappop

        def arrive(out: Out, microbatch: int, end: int) -> None:
            number = out.slots[microbatch]
            if number < 0:
                raise _no_receiver(out, microbatch)
            pending[number] -= 1
            if end - out.lead_ns > ready[number]:
                ready[number] = end - out.lead_ns
                transfer[number] = out.ns

        def advance(stage: int) -> None:
            number, stop, tail, free = following[stage], stops[stage], tails[stage], free_of[stage]
            while number < stop and not pending[number]:
                start = ready[number]
                if start > free:
                    self._waited[stage] += min(start - free, transfer[number])
                else:
                    start = free
                starts[number] = start
                index = pass_of[number]
                duration, offsets = durations[index], None
                if number >= tail:
                    run_of[number] = run = self._run_behind(stage, number, free, start)
                    duration, offsets = run.duration_ns, run.offsets_ns
                for out in outs_of_pass[index]:
                    issued = start + (out[0] if offsets is None else offsets[out.position])
                    if out.target == stage:
                        arrive(out, microbatch_of[number], issued)
                    else:
                        push(events, (issued, out[4] + next(issues), out, microbatch_of[number]))
                free = start + duration
                number += 1
            following[stage], free_of[stage] = number, free

        for stage in range(len(following)):
            advance(stage)
        link_free = [0] * (1 + max((link for outs in outs_of_pass for out in outs for link in out.links), default=-1))
        while events:
            start, _, out, microbatch = pop(events)
            _, _, ns, links, _, target, slots, _, _, _ = out
            for link in links:
                if link_free[link] > start:
                    start = link_free[link]
            end = start + ns
            for link in links:
                link_free[link] = end
            self._transfers.append((out, microbatch, start))
            arrive(out, microbatch, end)
            number = slots[microbatch]
            if following[target] == number and not pending[number]:
                advance(target)
        stuck = [stage for stage, number in enumerate(following) if number < stops[stage]]
        if stuck:
            raise UsageError(
                f"pipeline schedule: the stages {', '.join(map(str, stuck))} wait for each other",
                hint="Check the schedule first.",
            )

    def _run_behind(self, stage: int, number: int, free_ns: int, start_ns: int) -> Run:
        """A slot with reductions of the end of the step behind it."""
        streams, position, index = self._streams[stage], number - self._first[stage], self._pass_of[number]
        self._spans[stage].extend(streams.idle(free_ns, start_ns))
        loose = self._orders[stage].loose.get(position, ())
        if not (loose or streams.carried):
            return self._runs[index]
        given, is_last = self._passes[index], number + 1 == self._first[stage + 1]
        return streams.run(given.main, given.background, loose, start_ns=start_ns, is_last=is_last)


def _no_receiver(out: Out, microbatch: int) -> UsageError:
    return UsageError(
        f"pipeline schedule: no slot of stage {out.target} receives microbatch {microbatch}",
        hint="Check the schedule first.",
    )
