"""What is played, and what a stage did when it was."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tap_planner.errors import UsageError
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.running import Run, Span, Streams
from tap_planner.simulate.sending import Out, StageOrder

Sent = tuple[Out, int, int, int]
"""A transfer that was made: what, of which microbatch, and from when to when."""


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


class Playback:
    """State of slots and stages. Slots of all stages are numbered stage by stage.

    Args:
        passes: what slots may do.
        runs: per pass, when.
        outs: per pass, what it sends.
        orders: per stage.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        runs: Sequence[Run],
        outs: Sequence[tuple[Out, ...]],
        orders: Sequence[StageOrder],
    ) -> None:
        self._passes, self._runs, self._outs, self._orders = passes, runs, outs, orders
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
        self._starts = [0] * len(self._pass_of)
        self._run_of = [self._runs[index] for index in self._pass_of]
        self._waited = [0] * len(orders)
        self._spans: list[list[Span]] = [[] for _ in orders]
        self._transfers: list[Sent] = []
        self._links = 1 + max((link for outs in self._outs for out in outs for link in out.links), default=-1)

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

    def _run_behind(self, stage: int, number: int, free_ns: int, start_ns: int) -> Run:
        """A slot with reductions of the end of the step behind it."""
        streams, position, index = self._streams[stage], number - self._first[stage], self._pass_of[number]
        self._spans[stage].extend(streams.idle(free_ns, start_ns))
        loose = self._orders[stage].loose.get(position, ())
        if not (loose or streams.carried):
            return self._runs[index]
        given, is_last = self._passes[index], number + 1 == self._first[stage + 1]
        return streams.run(given.main, given.background, loose, start_ns=start_ns, is_last=is_last)

    def _check(self) -> None:
        """Whether all slots were played."""
        stuck = [stage for stage, number in enumerate(self._next) if number < self._first[stage + 1]]
        if stuck:
            raise UsageError(
                f"pipeline schedule: the stages {', '.join(map(str, stuck))} wait for each other",
                hint="Check the schedule first.",
            )


def no_receiver(out: Out, microbatch: int) -> UsageError:
    """What is sent has nowhere to go."""
    return UsageError(
        f"pipeline schedule: no slot of stage {out.target} receives microbatch {microbatch}",
        hint="Check the schedule first.",
    )
