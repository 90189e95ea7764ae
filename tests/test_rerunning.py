"""Which of repeats that are alike run again in a pipeline."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tap_planner import api, rerunning
from tap_planner.plan import Decisions, PlanOptions, PlanRequest, cut_decisions
from tap_planner.program import lower
from tap_planner.rerunning import Reruns
from tap_planner.schedule import PipelineSchedule, fullest_moments, make_schedule, peak_bytes, peak_in_flight
from tap_planner.search import search
from tap_planner.simulate import Durations

DATA = Path(__file__).parent / "data"
CLUSTER = str(Path(__file__).parents[1] / "plans" / "demo-cluster.yaml")
BATCH = 8


class Planned:
    """A model of twelve layers, some of which run again, for all stages together; and where it is cut."""

    def __init__(self, schedule: str, share: float) -> None:
        options = PlanOptions(
            batch=BATCH, dims={"seq": 32}, precision="fp32", loss="mean", mesh="pp=4", schedule=schedule, zero=0
        )
        request = PlanRequest(model=DATA / "deep_gpt2_12.onnx", cluster=CLUSTER, options=options)
        prepared = api.prepare_search(request)
        part = next(part for part in prepared.requests if part.microbatches == BATCH)
        free = search(part)
        from dataclasses import replace

        result = search(replace(part, limit_bytes=int(free.memory_bytes * share)))
        self.graph = result.folded.graph
        self.decisions: Decisions = result.decisions
        assert part.pipeline is not None
        self.schedule: PipelineSchedule = part.pipeline.at(BATCH)
        parts = self.schedule.num_virtual_stages
        self.cuts = [len(self.graph.operators) * number // parts for number in range(parts)]
        starts = [self.graph.operators[cut].id for cut in self.cuts]
        trial = lower(*cut_decisions(self.graph, self.decisions, starts, self.schedule))
        durations = Durations(trial, prepared.cluster)
        self.work_ns = [7 + index % 5 for index in range(len(self.graph.operators))]
        self.reruns = Reruns(self.graph, self.decisions, trial, durations, self.work_ns, self.schedule)


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
    assert sum(planned.reruns.work_ns) == sum(planned.work_ns)
    assert len(planned.reruns.work_ns) == len(planned.work_ns)
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
    room = Counter(chunk for chunk, _, held, _ in kept.added if held > 0)  # type: ignore[attr-defined]

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

    chosen = Counter(chunk for chunk, *_ in saving)
    most = [min(room[chunk], 3) for chunk in chunks]
    tried = [counts for counts in _counts(most, len(saving))]
    assert len(tried) > 1
    assert fullest([chosen[chunk] for chunk in chunks]) <= min(map(fullest, tried))


def _counts(most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    for counts in itertools.product(*(range(count + 1) for count in most)):
        if sum(counts) == total:
            yield counts


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
