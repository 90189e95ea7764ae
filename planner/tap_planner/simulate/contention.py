"""Plays slots whose stages use the links of their transfers: of what needs a level of the topology at a stage at the
same time, one moves and the others stand still.

The main stream comes first. Then come transfers: each moves while the main stream of neither of its two stages uses a
level that it needs, and keeps its links from when it starts to when it arrives. Last comes the background of a stage,
while neither its main stream nor a transfer of it uses a level that it needs.

How far a transfer has come by some time depends on the slots that start before. Those are known when all events before
that time are done: where its end lies in a time that is not known yet, it is looked at again when that time has come.
So are slots that wait for background that stands still for transfers (``opening``). Reductions of the end of the step
change no slot, unless it has background of its own behind them, and are played last (``loose``).

A slot that receives something after its start begins so that it need not wait for it (``Out.lead_ns``); what it does
until that has come keeps no transfer.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from tap_planner.simulate.crossing import NEVER, Transfer
from tap_planner.simulate.loose import Loose
from tap_planner.simulate.opening import OpenSlot
from tap_planner.simulate.overlap import Background
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Job, Move, Run, Span
from tap_planner.simulate.sending import Out, StageOrder
from tap_planner.simulate.shortening import ShortPass
from tap_planner.simulate.transfers import Transfers


class Contended(Transfers):
    """Working state of ``play`` where transfers share levels with what their stages do."""

    def __init__(
        self,
        passes: Sequence[Pass],
        runs: Sequence[Run],
        outs: Sequence[tuple[Out, ...]],
        orders: Sequence[StageOrder],
    ) -> None:
        super().__init__(passes, runs, outs, orders)
        self._loose = [Loose() if has_loose else None for has_loose in self._sharing.has_loose]
        """Per stage."""
        self._short: dict[int, ShortPass] = {}
        """By pass, where it was asked for."""

    def run(self) -> None:
        """Until nothing happens any more."""
        for stage in range(len(self._orders)):
            self._advance(stage)
        events = self._events
        while events:
            time, _, what = heapq.heappop(events)
            self._now = max(self._now, time)
            if isinstance(what, int):
                self._go_on(what)
            elif what.start_ns < 0:
                self._issue(what)
            elif not what.has_arrived and self._arrives(what):
                self._leave(what)
        self._check()
        for stage, loose in enumerate(self._loose):
            if loose is not None:
                self._finish(stage, loose)

    # -- slots ------------------------------------------------------------------------------------------------------

    def _advance(self, stage: int) -> None:
        """Play the slots of a stage that have all that they receive."""
        pending, ready, following = self._pending, self._ready, self._next
        number, free, stop, tail = following[stage], self._free[stage], self._first[stage + 1], self._tail[stage]
        begin = number
        while number < stop and not pending[number]:
            start = ready[number] if ready[number] > free else free
            slot = None
            if number >= tail:
                if self._must_wait(stage, number, start):
                    heapq.heappush(self._events, (start, -1 - stage, stage))
                    break
                slot = self._last_slot(stage, number, free, start)
            elif self._sharing.is_soft[self._pass_of[number]]:
                slot = self._opened(number, start)
            if start > free:
                came = self._came[number]
                self._waited[stage] += 0 if came is None else came.moved_ns(came.end_ns - (start - free))
            self._came[number] = None
            self._starts[number] = start
            if self._sharing.counts and number <= tail:
                self._sent[stage] = [sent for sent in self._sent[stage] if not sent.has_arrived or sent.end_ns > start]
            if slot is not None:
                self._open[stage] = slot
                following[stage], self._free[stage] = number + 1, start
                slot.play(self._moves(self._sent[stage]))
                self._crossing.changed(number, slot.whole)
                self._look_again(stage, slot)
                number += 1
                break
            run = self._run_of[number]
            for turn, (out, kept) in enumerate(self._sends[self._pass_of[number]]):
                self._send(number, turn, out, kept, start + run.offsets_ns[out.position])
            free = start + run.duration_ns
            number += 1
            following[stage], self._free[stage] = number, free
        if self._sharing.changes_slots and number > begin:
            self._touch(self._moved(stage))

    def _must_wait(self, stage: int, number: int, start: int) -> bool:
        """Whether what is in the background when a slot starts counts, and is not known yet."""
        loose, given = self._loose[stage], self._passes[self._pass_of[number]]
        return loose is not None and bool(given.background) and loose.is_waiting and start > self._now

    def _last_slot(self, stage: int, number: int, free: int, start: int) -> OpenSlot | None:
        """A slot with reductions of the end of the step behind it; None: transfers do not change it."""
        index, loose = self._pass_of[number], self._loose[stage]
        if loose is None:
            run = self._run_of[number] = self._run_behind(stage, number, free, start)
            self._crossing.changed(number, lambda: run)
            return None
        jobs, given = self._orders[stage].loose.get(number - self._first[stage], ()), self._passes[index]
        if given.background and (jobs or loose.is_waiting):
            carried = loose.take(start, self._moves(self._sent[stage], start))
            return self._opened(number, start, carried, jobs)
        if self._sharing.is_soft[index]:
            return self._opened(number, start)
        behind = sorted((Job(each, bound=False) for each in jobs), key=lambda job: job.start)  # stable: then as listed
        loose.give(start, given, self._runs[index], behind)
        return None

    # -- slots that transfers may change -------------------------------------------------------------------------------

    def _opened(
        self, number: int, start: int, carried: Sequence[Job] = (), loose: Sequence[Background] = ()
    ) -> OpenSlot:
        index = self._pass_of[number]
        if carried or loose:
            short = ShortPass(self._passes[index], loose, (job.levels for job in carried))
        else:
            if index not in self._short:
                self._short[index] = ShortPass(self._passes[index])
            short = self._short[index]
        return OpenSlot(number, start, self._passes[index], self._runs[index], short, carried)

    def _go_on(self, stage: int) -> None:
        """A slot on its way sends something or is over, or one may start."""
        slot = self._open[stage]
        if slot is not None:
            slot.event_ns = None
            while slot.next_ns <= self._now and not slot.has_sent:
                issued = slot.next_ns
                out, kept = self._sends[self._pass_of[slot.number]][slot.sent]
                slot.sent += 1
                self._send(slot.number, slot.sent - 1, out, kept, issued)
            if slot.next_ns > self._now:
                self._look_again(stage, slot)
                return
            self._close(stage, slot)
        self._advance(stage)

    def _look_again(self, stage: int, slot: OpenSlot) -> None:
        time = slot.next_ns
        if slot.event_ns is None or time < slot.event_ns:
            slot.event_ns = time
            heapq.heappush(self._events, (time, -1 - stage, stage))

    def _close(self, stage: int, slot: OpenSlot) -> None:
        self._open[stage] = None
        self._run_of[slot.number] = run = slot.whole()
        self._free[stage] = slot.next_ns
        loose = self._loose[stage]
        if loose is not None and slot.number >= self._tail[stage]:
            loose.give(slot.start_ns, slot.given, run, slot.left)

    def _touch(self, stages: Iterable[int]) -> None:
        """Play slots on their way anew whose stages have transfers that move at other times, and what follows."""
        work = list(stages)
        while work:
            stage = work.pop()
            slot = self._open[stage]
            if slot is not None and slot.play(self._moves(self._sent[stage])):
                self._crossing.changed(slot.number, slot.whole)
                self._look_again(stage, slot)
                work.extend(self._moved(stage))

    def _moved(self, stage: int) -> list[int]:
        """Let transfers of a stage that are on their way move anew; the stages of those that this changes."""
        found: list[int] = []
        for given in self._sent[stage]:
            if given.has_arrived or not given.kept:
                continue
            before = (given.end_ns, given.parts)
            if (self._crossing.move(given), given.parts) != before:
                heapq.heappush(self._events, (given.end_ns, given.number, given))
                found.extend(given.out.route.stages)
        return found

    def _exposed(self, stage: int) -> Mapping[str, int]:
        if not self._sharing.changes_slots:
            return super()._exposed(stage)
        found: Counter[str] = Counter()
        for run in self._run_of[self._first[stage] : self._first[stage + 1]]:
            found.update(run.exposed_ns)
        return found

    # -- the end of the step ----------------------------------------------------------------------------------------

    @staticmethod
    def _moves(transfers: Iterable[Transfer], stop: int = NEVER) -> list[Move]:
        """When transfers move until some time, as far as is known."""
        return [
            (start, min(end, stop), given.out.levels)
            for given in transfers
            for start, end in given.moves
            if start < stop
        ]

    def _finish(self, stage: int, loose: Loose) -> None:
        """Reductions that no slot had to finish: they follow all else, so all else is known."""
        last = self._first[stage + 1] - 1
        begin = self._starts[self._tail[stage]]
        moves = self._moves(given for given in self._sent[stage] if given.end_ns > begin)
        loose.run(moves, self._free[stage])
        exposed = loose.run(moves)
        self._free[stage] = max(self._free[stage], loose.clock_ns)
        run = self._run_of[last]
        self._run_of[last] = replace(
            run,
            duration_ns=self._free[stage] - self._starts[last],
            exposed_ns=Counter(run.exposed_ns) + exposed,
        )
        for span in loose.spans:
            self._show(stage, span)

    def _show(self, stage: int, span: Span) -> None:
        """What is done in the time of a slot belongs to it."""
        number = bisect_left(self._starts, span.end_ns, self._tail[stage], self._first[stage + 1]) - 1
        start, run = self._starts[number], self._run_of[number]
        if number < self._tail[stage] or span.end_ns > start + run.duration_ns:
            self._spans[stage].append(span)
        else:
            shown = Span(span.kind, span.start_ns - start, span.end_ns - start)
            self._run_of[number] = replace(run, spans=(*run.spans, shown))
