"""Which of repeats that are alike run again in a pipeline."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tap_planner import api, rerunning
from tap_planner.plan import RECOMPUTES, Decisions, PlanOptions, PlanRequest, cut_decisions
from tap_planner.program import Program, lower
from tap_planner.rerunning import Reruns
from tap_planner.schedule import (
    PipelineSchedule,
    balanced_cuts,
    fullest_moments,
    make_schedule,
    peak_bytes,
    peak_in_flight,
)
from tap_planner.search import search
from tap_planner.simulate import Durations

DATA = Path(__file__).parent / "data"
CLUSTER = "1x4:a100-sxm4-80gb"
BATCH = 8
MOST_TRIED = 20_000


class Planned:
    """A model of 32 layers, some of which run again, for all stages together; and where it is cut."""

    def __init__(self, schedule: str, share: float) -> None:
        options = PlanOptions(
            batch=BATCH, dims={"seq": 2048}, loss="mean", mesh="pp=4", schedule=schedule, max_memory_bytes="none"
        )
        request = PlanRequest(model=DATA / "hm_llama3_8b.onnx", cluster=CLUSTER, options=options)
        prepared = api.prepare_search(request)
        part = next(part for part in prepared.requests if part.microbatches == BATCH)
        free = search(part)
        result = search(replace(part, limit_bytes=int(free.memory_bytes * share)))
        self.graph, self.cluster = result.folded.graph, prepared.cluster
        self.decisions: Decisions = result.decisions
        assert part.pipeline is not None
        self.schedule: PipelineSchedule = part.pipeline.at(BATCH)
        parts = self.schedule.num_virtual_stages
        self.cuts = [len(self.graph.operators) * number // parts for number in range(parts)]
        starts = [self.graph.operators[cut].id for cut in self.cuts]
        trial = lower(*cut_decisions(self.graph, self.decisions, starts, self.schedule))
        durations = Durations(trial, prepared.cluster)
        self.work_ns = np.array(
            [
                [
                    7 + 3 * RECOMPUTES.index(region.recompute) + place % 5
                    for region in self.decisions.regions
                    for place in range(len(region.operators))
                ]
            ]
        )
        given = (self.graph, self.decisions, trial, durations, self.work_ns, self.schedule)
        self.reruns = Reruns(*given, rooms=durations.room_bytes)


def settings(decisions: Decisions) -> list[str]:
    """How repeats recompute, in order."""
    return [region.recompute for region in decisions.regions if region.run is not None]


@pytest.fixture(scope="module", params=[("1f1b", 0.85), ("zb-h1", 0.85), ("zbv", 0.9)], ids=lambda given: given[0])
def planned(request: pytest.FixtureRequest) -> Planned:
    """Plans of which some repeats run again."""
    return Planned(*request.param)


def test_as_many_run_again_as_before(planned: Planned) -> None:
    """Nothing changes but which repeats have which setting, and work goes with them."""
    before = settings(planned.decisions)
    assert len(set(before)) > 1
    planned.reruns.place(planned.cuts)
    after = planned.reruns.decisions
    assert Counter(settings(after)) == Counter(before)
    assert planned.reruns.work_ns.sum() == planned.work_ns.sum()
    assert planned.reruns.work_ns.shape == planned.work_ns.shape
    assert [o.id for o in after.operators] == [o.id for o in planned.decisions.operators]


def test_placing_again_changes_nothing(planned: Planned) -> None:
    """Between the same cuts the same repeats run again."""
    planned.reruns.place(planned.cuts)
    assert not planned.reruns.place(planned.cuts)


def test_no_other_choice_leaves_the_fullest_stage_less(planned: Planned, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against brute force over how many repeats of each chunk run again: the fullest stage holds least."""
    made: list[rerunning._Stages] = []  # pyright: ignore[reportPrivateUsage]

    class Kept(rerunning._Stages):  # pyright: ignore[reportPrivateUsage]
        """Remembers itself, and what was added."""

        def __init__(self, *given: object) -> None:
            super().__init__(*given)  # type: ignore[arg-type]
            self.added: list[tuple[int, int, int, int]] = []
            made.append(self)

        def add(self, chunk: int, stored: int, held: int, waiting: int) -> None:
            self.added.append((chunk, stored, held, waiting))
            super().add(chunk, stored, held, waiting)

    monkeypatch.setattr(rerunning, "_Stages", Kept)
    planned.reruns.place(planned.cuts)
    (kept,) = made
    saving = [given for given in kept.added if given[2] < 0]  # type: ignore[attr-defined]
    assert len({held for _, _, held, _ in saving}) == 1  # one kind of setting: counts of each chunk say all
    chunks = range(len(planned.cuts))
    (alike,) = planned.reruns._alike  # pyright: ignore[reportPrivateUsage]
    firsts = [planned.reruns._firsts[number] for number in alike]  # pyright: ignore[reportPrivateUsage]
    room = Counter(bisect.bisect_right(planned.cuts, first) - 1 for first in firsts)

    def fullest(counts: Sequence[int]) -> int:
        stages = rerunning._Stages.__mro__[1](  # type: ignore[call-arg]  # pyright: ignore
            planned.schedule, fullest_moments(planned.schedule), len(planned.cuts)
        )
        for chunk, stored, held, waiting in kept.added:  # type: ignore[attr-defined]
            if held >= 0:
                stages.add(chunk, stored, held, waiting)
        for chunk, count in enumerate(counts):
            stages.add(chunk, 0, count * saving[0][2], 0)
        return max(stages.full(chunk) for chunk in chunks)

    chosen = tuple(Counter(chunk for chunk, *_ in saving)[chunk] for chunk in chunks)
    least = fullest(chosen)
    tried = list(_others([room[chunk] for chunk in chunks], chosen))
    assert len(tried) > 1
    assert least <= min(map(fullest, tried))


def test_what_fits_is_what_the_fullest_stage_holds(planned: Planned) -> None:
    """With just the room of the fullest stage every chunk fits where it lies; with one byte less, its own do not."""
    reruns, cuts = planned.reruns, planned.cuts
    reruns.place(cuts)
    places = np.array([*cuts, len(planned.graph.operators)])
    room, stages = max(reruns.held(cuts)), planned.schedule.num_stages

    def lies_well(least: int) -> list[bool]:
        fits = reruns.fitting(cuts, [least] * stages)
        return [bool(fits(chunk, places)[chunk, chunk + 1]) for chunk in range(len(cuts))]

    assert all(lies_well(room))
    assert not all(lies_well(room - 1)) and any(lies_well(room - 1))


def test_cuts_that_fit_hold_less(planned: Planned) -> None:
    """Between cuts that are made for less room the fullest stage holds less, and takes longer or as long."""
    reruns, cuts, parts = planned.reruns, tuple(planned.cuts), len(planned.cuts)
    border, rows = [0] * planned.work_ns.shape[1], [0] * parts
    reruns.place(cuts)
    free = balanced_cuts(reruns.work_ns, border, rows)
    assert free is not None
    room = max(reruns.held(free)) * 97 // 100
    rooms = [room] * planned.schedule.num_stages
    fitting = balanced_cuts(reruns.work_ns, border, rows, None, reruns.fitting(free, rooms))
    if fitting is None:
        assert parts > planned.schedule.num_stages  # the other chunk of a stage stays where it is
        return

    def longest(where: Sequence[int]) -> int:
        ends = [*where[1:], planned.work_ns.shape[1]]
        return max(int(reruns.work_ns[0, a:b].sum()) for a, b in zip(where, ends, strict=True))

    assert longest(fitting) >= longest(free)
    if parts == planned.schedule.num_stages:
        assert max(reruns.held(fitting)) <= room


def _others(room: Sequence[int], chosen: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to place as many in chunks with so much room; where there are too many, those two moves away."""
    if math.prod(count + 1 for count in room) <= MOST_TRIED:
        every = itertools.product(*(range(count + 1) for count in room))
        yield from (counts for counts in every if sum(counts) == sum(chosen))
        return
    moves = list(itertools.permutations(range(len(room)), 2))
    for first, second in itertools.product(moves, moves):
        counts = list(chosen)
        for origin, target in (first, second):
            counts[origin] -= 1
            counts[target] += 1
        if all(0 <= count <= most for count, most in zip(counts, room, strict=True)):
            yield tuple(counts)


@pytest.mark.parametrize("schedule", ["fill-drain", "1f1b", "interleaved", "zb-h1", "zbv"])
def test_fullest_moments(schedule: str) -> None:
    """They are the times of the peaks: what is held then is what is in flight at most."""
    made = make_schedule(schedule, 4, 8, 2 if schedule in ("interleaved", "zbv") else 1)
    peaks = peak_in_flight(made)
    for rank, moments in enumerate(fullest_moments(made)):
        assert max(sum(moment.whole) for moment in moments) == peaks[rank].until_input_backward
        assert max(sum(moment.whole) + sum(moment.waiting) for moment in moments) == peaks[rank].until_weight_backward
    zeros = (0,) * made.num_virtual_stages
    waiting = peak_bytes(made, whole_bytes=zeros, weight_bytes=(1,) * made.num_virtual_stages)
    for rank, moments in enumerate(fullest_moments(made)):
        assert max(sum(moment.waiting) for moment in moments) == waiting[rank]


def test_nothing_runs_again_where_there_is_room(planned: Planned) -> None:
    """With all the room in the world every repeat has the fastest setting that is known; with none, nothing changes."""
    reruns, cuts = planned.reruns, tuple(planned.cuts)
    rows, stages = [0] * len(cuts), planned.schedule.num_stages
    reruns.place(cuts)
    before, work = reruns.settings, reruns.work_ns.sum()
    assert reruns.runs_again
    assert not reruns.relax(cuts, [0] * stages, rows)
    while reruns.relax(cuts, [1 << 60] * stages, rows):
        pass
    assert reruns.work_ns.sum() < work
    assert set(settings(reruns.decisions)) == {"none"} and not reruns.runs_again
    reruns.restore(before)
    assert reruns.settings == before


@pytest.mark.parametrize("share", [0.5, 0.8, 1.0])
def test_no_repeat_that_has_room_runs_again(planned: Planned, share: float) -> None:
    """Stages keep within their rooms, and what still runs again would not fit in another setting that takes less."""
    reruns, cuts = planned.reruns, tuple(planned.cuts)
    rows, stages = [0] * len(cuts), planned.schedule.num_stages
    before = reruns.settings
    reruns.place(cuts)
    held = reruns.held(cuts)
    least, most = min(held), max(held)
    rooms = [int(least + share * (most - least)) + number for number in range(stages)]
    fitting = [number for number in range(stages) if held[number] <= rooms[number]]
    while reruns.relax(cuts, rooms, rows):
        pass
    after, work = reruns.settings, reruns.work_ns.sum()
    now = reruns.held(cuts)
    assert all(now[stage] <= rooms[stage] for stage in fitting)
    assert all(now[stage] == held[stage] for stage in set(range(stages)) - set(fitting))
    for number, setting in enumerate(after):
        for other in {"none", "selective", "full"} - {setting}:
            changed = [*after]
            changed[number] = other
            try:
                reruns.restore(changed)
                is_faster, bytes_then = reruns.work_ns.sum() < work, reruns.held(cuts)
            except KeyError:
                continue  # what it takes is not known: it never had that setting
            assert not is_faster or any(taken > room for taken, room in zip(bytes_then, rooms, strict=True))
    reruns.restore(before)


def test_settings_that_no_repeat_has_are_learnt(planned: Planned) -> None:
    """Of a plan all of whose repeats run again, what they take and hold otherwise is found out; then they need not."""
    graph, whole, schedule = planned.graph, planned.decisions, planned.schedule

    def under(setting: str) -> tuple[Program, Durations, np.ndarray, Decisions]:
        regions = (replace(one, recompute=setting) if one.run is not None else one for one in whole.regions)
        other = replace(whole, regions=tuple(regions))
        starts = [graph.operators[cut].id for cut in planned.cuts]
        trial = lower(*cut_decisions(graph, other, starts, schedule))
        times = {"none": 1, "selective": 2, "full": 3}
        ns = [times[region.recompute] for region in other.regions for _ in region.operators]
        return trial, Durations(trial, planned.cluster), np.array([ns]), other

    trial, durations, work_ns, full = under("full")
    reruns = Reruns(graph, full, trial, durations, work_ns, schedule, rooms=durations.room_bytes)
    rows, rooms = [0] * len(planned.cuts), [1 << 60] * schedule.num_stages
    assert not reruns.relax(planned.cuts, rooms, rows)
    for setting in ("none", "selective"):
        reruns.learn(setting, *under(setting)[:3])
    held = sum(reruns.held(planned.cuts))
    while reruns.relax(planned.cuts, rooms, rows):
        pass
    assert set(settings(reruns.decisions)) == {"none"} and sum(reruns.held(planned.cuts)) > held
    alone = Reruns(graph, *_two(under("none")), schedule, rooms=durations.room_bytes)
    assert reruns.held(planned.cuts) == pytest.approx(alone.held(planned.cuts), rel=0.01)


def _two(made: tuple[Program, Durations, np.ndarray, Decisions]) -> tuple[Decisions, Program, Durations, np.ndarray]:
    trial, durations, work_ns, decisions = made
    return decisions, trial, durations, work_ns
