"""Plays the slots of all stages in time: a discrete-event simulation.

A stage runs its slots in order, each as soon as the one before has left it and what it receives has come. Sends are
issued at their offsets and do not wait. Each stage has, for each of the two directions along the pipeline, one link out
and one link in; stages that are devices of a cluster have its channels in their place, some of which they share
(``devices.Channels``). A transfer takes all links of its way when what was issued before has left them, keeps them for
its whole time, latency included, and arrives when that is over. So none waits for one that was issued later, and none
for ever. Within a stage nothing is sent. Where transfers use levels of the topology that their stages use too, they
share them (``contention``).

Transfers that are issued at the same time over channels come as the program has them, chunks forward, then back again;
those of one slot tensor by tensor, and each to devices by their ranks. Which stage has which number does not matter.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

from tap_planner.simulate.contention import Contended
from tap_planner.simulate.devices import Channels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playback import Playback, Played, no_receiver
from tap_planner.simulate.running import Streams
from tap_planner.simulate.sending import Out, StageOrder, outs_of
from tap_planner.simulate.sharing import contends


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
    runs = [Streams().run(each.main, each.background) for each in passes]
    outs = outs_of(passes, runs, orders, channels)
    kind = Contended if contends(passes, outs, orders) else _Playing
    playing = kind(passes, runs, outs, orders)
    playing.run()
    return tuple(playing.played(stage) for stage in range(len(orders)))


class _Playing(Playback):
    """Working state of ``play`` where transfers stand still for nothing."""

    def run(self) -> None:
        """Until nothing happens any more."""
        # Local names and functions: looking up attributes would take half of the time.
        pending, ready, starts = self._pending, self._ready, self._starts
        following, free_of, stops, tails = self._next, self._free, self._first[1:], self._tail
        pass_of, microbatch_of, run_of, outs_of_pass = self._pass_of, self._microbatch_of, self._run_of, self._outs
        durations = [run.duration_ns for run in self._runs]
        transfer = [0] * len(pass_of)
        """Per slot the time of the transfer that came last."""
        events: list[tuple[int, int, Out, int]] = []
        issues = itertools.count()
        push, pop = heapq.heappush, heapq.heappop

        def arrive(out: Out, microbatch: int, end: int) -> None:
            number = out.slots[microbatch]
            if number < 0:
                raise no_receiver(out, microbatch)
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
        link_free = [0] * self._links
        while events:
            start, _, out, microbatch = pop(events)
            _, _, ns, links, _, target, slots, _, _, _, _ = out
            for link in links:
                if link_free[link] > start:
                    start = link_free[link]
            end = start + ns
            for link in links:
                link_free[link] = end
            self._transfers.append((out, microbatch, start, end))
            arrive(out, microbatch, end)
            number = slots[microbatch]
            if following[target] == number and not pending[number]:
                advance(target)
        self._check()
