"""Transfers, collectives and reductions on the same links: against a simulation nanosecond by nanosecond, and rules
that hold in every step."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tap_planner.schedule import PipelineSchedule, Work, make_schedule
from tap_planner.simulate.contention import Contended
from tap_planner.simulate.loads import level_loads
from tap_planner.simulate.overlap import Background, Busy, Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playback import Played
from tap_planner.simulate.playing import play
from tap_planner.simulate.routes import Route
from tap_planner.simulate.running import Streams
from tap_planner.simulate.sending import StageOrder, outs_of
from tap_planner.simulate.sharing import contends
from tests.schedule.pipelines import KINDS, random_schedule, stage_of
from tests.simulate.ticks import NOTHING, Reference

NODE, NETWORK = frozenset({"node"}), frozenset({"network"})
LEVELS = (NODE, NETWORK, NODE | NETWORK)


class Drawn:
    """Random passes of a schedule: small times, collectives and transfers over any levels.

    Args:
        schedule: its slots.
        seed: what to draw.
        levels: what collectives and reductions use.
        sent: what transfers use.
        leads: whether slots may do something before they receive; then there are no reductions at the end of the step.
    """

    def __init__(
        self,
        schedule: PipelineSchedule,
        seed: int,
        *,
        levels: Sequence[Levels] = LEVELS,
        sent: Sequence[Levels] = LEVELS,
        leads: bool = False,
    ) -> None:
        self._draw, self._schedule = random.Random(seed), schedule
        self._levels, self._leads = levels, leads
        self._density = self._draw.choice((0.0, 0.3, 0.8))
        self._behind = self._draw.choice((0.0, 0.0, 0.5))
        self._stage_of = self._stages()
        self._routes = self._all_routes(sent)
        self._passes: list[Pass] = []
        self._index: dict[tuple[Work, int], int] = {}
        self.orders = [self._order(stage) for stage in range(schedule.num_stages)]
        self.passes = tuple(self._passes)

    def _stages(self) -> Mapping[int, int]:
        chunks = [0] * self._schedule.num_stages
        found: dict[int, int] = {}
        for rank in range(self._schedule.num_stages):
            for own in {slot.chunk for slot in self._schedule.orders[rank]}:
                found[stage_of(self._schedule, rank, own)] = rank
                chunks[rank] += 1
        return found

    def _all_routes(self, sent: Sequence[Levels]) -> list[tuple[Route, Route]]:
        """There and back."""
        count = len(self._stage_of)
        pairs = list(itertools.pairwise(range(count)))
        if self._schedule.reads:
            pairs = [(source, reader) for reader in range(count) for source in self._schedule.reads[reader]]
        routes: list[tuple[Route, Route]] = []
        for operator, pair in enumerate(pairs):
            stages = (self._stage_of[pair[0]], self._stage_of[pair[1]])
            is_local = stages[0] == stages[1]
            ns = 0 if is_local else self._draw.randint(1, 9)
            levels = NOTHING if is_local else self._draw.choice(sent)
            there = Route(
                operator=operator,
                tensor=f"t{operator}",
                forward=True,
                chunks=pair,
                stages=stages,
                num_bytes=ns,
                ns=ns,
                levels=levels,
            )
            back = replace(there, forward=False, chunks=pair[::-1], stages=stages[::-1])
            routes.append((there, back))
        return routes

    def _order(self, stage: int) -> StageOrder:
        slots = self._schedule.orders[stage]
        indices = [self._pass(slot.work, stage_of(self._schedule, stage, slot.chunk)) for slot in slots]
        loose: dict[int, tuple[Background, ...]] = {}
        if not self._leads and self._draw.random() < 0.7:
            for _ in range(self._draw.randint(1, 3)):
                at = self._draw.randrange(len(slots) // 2, len(slots))
                jobs = [self._job(len(self._passes[indices[at]].main), "loose") for _ in range(2)]
                loose[at] = tuple(replace(job, needed=None) for job in jobs)
        return StageOrder(
            passes=tuple(indices),
            microbatches=tuple(slot.microbatch for slot in slots),
            loose=dict(sorted(loose.items())),
        )

    def _pass(self, work: Work, chunk: int) -> int:
        if (work, chunk) not in self._index:
            self._index[work, chunk] = len(self._passes)
            self._passes.append(self._made(work, chunk))
        return self._index[work, chunk]

    def _made(self, work: Work, chunk: int) -> Pass:
        draw = self._draw
        main = [tuple(self._piece() for _ in range(draw.randint(0, 2))) for _ in range(draw.randint(1, 5))]
        back = work in (Work.BACKWARD, Work.INPUT_BACKWARD)
        ways = [] if work is Work.WEIGHT_BACKWARD else [pair[back] for pair in self._routes]
        receives = [(draw.randrange(len(main)) if self._leads else 0, w) for w in ways if w.chunks[1] == chunk]
        sends = [(len(main) + number, w) for number, w in enumerate(w for w in ways if w.chunks[0] == chunk)]
        main.extend(() for _ in sends)
        count = draw.randint(1, 3) if draw.random() < self._behind else 0
        return Pass(
            chunk=chunk,
            works=((work, len(main)),),
            main=tuple(main),
            background=tuple(self._job(len(main), "bound") for _ in range(count)),
            compute_ns=sum(piece.ns for pieces in main for piece in pieces if not piece.levels),
            waited_ns={"blocking": sum(piece.ns for pieces in main for piece in pieces if piece.levels)},
            behind_ns=0,
            sends=tuple(sends),
            receives=tuple(receives),
            gradients={},
            reads={},
            changes=(),
        )

    def _piece(self) -> Busy:
        is_collective = self._draw.random() < self._density
        return Busy(self._draw.randint(0, 6), self._draw.choice(self._levels) if is_collective else NOTHING)

    def _job(self, positions: int, kind: str) -> Background:
        start = self._draw.randint(0, positions)
        first = start if self._leads else max(start, 1)  # before its first position nothing is received
        needed = self._draw.choice((None, self._draw.randint(first, positions)))
        needed = None if needed == positions else needed
        levels = self._draw.choice(self._levels)
        return Background(kind=kind, ns=self._draw.randint(1, 9), levels=levels, start=start, needed=needed)

    @property
    def contends(self) -> bool:
        """Whether anything but transfers uses their levels."""
        runs = [Streams().run(each.main, each.background) for each in self.passes]
        return contends(self.passes, outs_of(self.passes, runs, self.orders), self.orders)


def agrees(played: Sequence[Played], truth: Reference) -> None:
    """Everything that takes time is the same."""
    sent = [(s, e, m, out.route.operator, out.route.forward) for out, m, s, e in played[0].transfers]
    assert sorted(sent) == sorted(truth.transfers())
    for found, stage in zip(played, truth.stages, strict=True):
        assert list(found.starts_ns) == stage.starts
        assert [list(run.offsets_ns) for run in found.runs] == [slot.offsets for slot in stage.slots]
        assert found.free_ns == stage.free
        assert found.waited_ns == stage.waited
        assert {kind: ns for kind, ns in found.exposed_ns.items() if ns} == stage.exposed
        ends = [span.end_ns for span in found.spans if span.kind == "loose"]
        ends += [
            start + span.end_ns
            for start, run in zip(found.starts_ns, found.runs, strict=True)
            for span in run.spans
            if span.kind == "loose"
        ]
        assert sorted(ends) == sorted(time for kind, time in stage.done if kind == "loose")


def whole_backwards(schedule: PipelineSchedule) -> PipelineSchedule:
    """The schedule without backwards in two parts."""
    orders = []
    for order in schedule.orders:
        slots = (replace(slot, work=Work.BACKWARD) if slot.work is Work.INPUT_BACKWARD else slot for slot in order)
        orders.append(tuple(slot for slot in slots if slot.work is not Work.WEIGHT_BACKWARD))
    return replace(schedule, orders=tuple(orders))


def drawn_of(seed: int, *, leads: bool = False) -> Drawn:
    """Of a random order. With ``leads`` all that do the same of a chunk do as much before they receive."""
    schedule = random_schedule(seed, chain=bool(seed % 3))
    return Drawn(whole_backwards(schedule) if leads else schedule, seed, leads=leads)


seeds = st.integers(0, 2**20)


@settings(max_examples=400)
@given(seeds, st.booleans())
def test_every_time_is_that_of_single_nanoseconds(seed: int, leads: bool) -> None:
    """Random passes in random orders: slots, transfers and reductions, to the nanosecond."""
    drawn = drawn_of(seed, leads=leads)
    assume(drawn.contends)
    agrees(play(drawn.passes, drawn.orders), Reference(drawn.passes, drawn.orders))


@given(seeds, st.sampled_from(KINDS), st.integers(2, 4), st.booleans())
def test_apart_from_each_other_nothing_stands_still(
    seed: int, kind: tuple[str, int], stages: int, forced: bool
) -> None:
    """Where no collective uses a level of a transfer, sharing levels changes nothing, whichever way it is played."""
    schedule = make_schedule(kind[0], stages, 2 * stages, kind[1])
    drawn = Drawn(schedule, seed, levels=[NODE], sent=[NETWORK])
    assert not drawn.contends
    played = forced_play(drawn) if forced else play(drawn.passes, drawn.orders)
    assert all(end - start == out.ns for out, _, start, end in played[0].transfers)
    agrees(played, Reference(drawn.passes, drawn.orders))


def forced_play(drawn: Drawn) -> list[Played]:
    """As where levels are shared."""
    runs = [Streams().run(each.main, each.background) for each in drawn.passes]
    outs = outs_of(drawn.passes, runs, drawn.orders)
    playing = Contended(drawn.passes, runs, outs, drawn.orders)
    playing.run()
    return [playing.played(stage) for stage in range(len(drawn.orders))]


@settings(max_examples=200)
@given(seeds, st.booleans())
def test_no_step_is_faster_than_what_its_levels_carry(seed: int, leads: bool) -> None:
    """Collectives of a stage, and its transfers over its busiest link, one after the other."""
    drawn = drawn_of(seed, leads=leads)
    played = play(drawn.passes, drawn.orders)
    ends = [*(found.free_ns for found in played), *(end for *_, end in played[0].transfers)]
    for load in level_loads(drawn.passes, drawn.orders):
        assert all(ns <= max(ends) for ns in load.values())
