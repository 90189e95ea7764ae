"""Which of repeats that are alike run again: those in the stages of a pipeline that hold most, no more than must."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tap_planner.schedule import fullest_moments

if TYPE_CHECKING:
    from tap_planner.graph import Graph
    from tap_planner.plan import Decisions
    from tap_planner.program import Program
    from tap_planner.schedule import Moment, PipelineSchedule
    from tap_planner.simulate import Durations

__all__ = ["Reruns"]


class Reruns:
    """How repeats recompute, and what depends on it.

    Of repeats that are alike any may run again, as long as there are as many of each setting: all that the plan of one
    stage costs is the same. A pipeline holds most in its first stages, or, where gradients of parameters wait, in its
    last ones.

    Args:
        graph: the model of one microbatch.
        whole: the plan for all stages together.
        trial: the same, cut somehow.
        durations: of the trial.
        work_ns: [kinds of stages, operators] what each operator takes.
        schedule: the order of the stages.
        rooms: per stage, the memory of its devices; only the differences count.
    """

    def __init__(
        self,
        graph: Graph,
        whole: Decisions,
        trial: Program,
        durations: Durations,
        work_ns: np.ndarray,
        schedule: PipelineSchedule,
        rooms: Sequence[int],
    ) -> None:
        self._whole = whole
        self._schedule = schedule
        self._rooms = tuple(rooms)
        self._moments = fullest_moments(schedule)
        place = {given.id: index for index, given in enumerate(graph.operators)}
        self._firsts = [place[region.operators[0]] for region in whole.regions]
        self._alike = _alike(whole)
        self._settings = [region.recompute for region in whole.regions]
        self._num_operators = len(graph.operators)
        self._spans = list(map(slice, self._firsts, [*self._firsts[1:], self._num_operators]))
        memory = _memory(whole, trial, durations)
        self._stored = memory.stored
        self._held, self._waiting = ([row[span] for span in self._spans] for row in (memory.held, memory.waiting))
        """Per template, [operators]."""
        self._work = [work_ns[:, span] for span in self._spans]
        self._templates = {
            (group, setting): next(number for number in numbers if self._settings[number] == setting)
            for group, numbers in enumerate(self._alike)
            for setting in {self._settings[number] for number in numbers}
        }
        """By group of repeats and setting, a repeat that has it."""

    def learn(self, setting: str, trial: Program, durations: Durations, work_ns: np.ndarray) -> None:
        """Find out about a setting that repeats may have, where none of their kind has it.

        Args:
            setting: how all repeats recompute in this trial.
            trial: the plan with that, cut as the first trial.
            durations: of it.
            work_ns: as of the first trial.
        """
        memory = _memory(self._whole, trial, durations)
        for group, numbers in enumerate(self._alike):
            if (group, setting) not in self._templates:
                span = self._spans[numbers[0]]
                self._templates[group, setting] = len(self._held)
                self._held.append(memory.held[span])
                self._waiting.append(memory.waiting[span])
                self._work.append(work_ns[:, span])

    @property
    def settings(self) -> tuple[str, ...]:
        """Per region how it recomputes."""
        return tuple(self._settings)

    def restore(self, settings: Sequence[str]) -> None:
        """Go back to some settings of the regions."""
        self._settings = list(settings)

    @property
    def runs_again(self) -> bool:
        """Whether any repeat runs again."""
        return any(self._settings[number] != "none" for numbers in self._alike for number in numbers)

    def relax(self, cuts: Sequence[int], rooms: Sequence[int], rows: Sequence[int]) -> bool:
        """Let repeats run again no more than their stages need: what saves most time for a byte first, one setting for
        each repeat; returns whether anything has changed.

        Args:
            cuts: first operator of every chunk.
            rooms: bytes per stage.
            rows: per chunk the kind of its stage.
        """
        chunk_of, stages = self._chunk_of(cuts), self._stages(cuts, self._settings)
        offers: list[tuple[float, int, int, str]] = []
        for group, numbers in enumerate(self._alike):
            settings = [setting for known, setting in self._templates if known == group]
            for number in numbers:
                row = rows[int(chunk_of[number])]
                now = self._templates[group, self._settings[number]]
                for setting in settings:
                    then = self._templates[group, setting]
                    saved = int(self._work[now][row].sum() - self._work[then][row].sum())
                    more = max(int(self._held[then].sum() - self._held[now].sum()), 1)
                    if saved > 0:
                        offers.append((-saved / more, number, group, setting))
        placed, taken = list(self._settings), set[int]()
        for _, number, group, setting in sorted(offers):
            if number in taken:
                continue
            chunk = int(chunk_of[number])
            now, then = self._templates[group, placed[number]], self._templates[group, setting]
            more = [int(row[then].sum() - row[now].sum()) for row in (self._held, self._waiting)]
            stages.add(chunk, 0, *more)
            if stages.full(chunk) <= rooms[self._schedule.rank_and_chunk(chunk)[0]]:
                placed[number] = setting
                taken.add(number)
            else:
                stages.add(chunk, 0, -more[0], -more[1])
        changed, self._settings = placed != self._settings, placed
        return changed

    @property
    def decisions(self) -> Decisions:
        """The plan for all stages together, with what was placed last."""
        regions = zip(self._whole.regions, self._settings, strict=True)
        return replace(self._whole, regions=tuple(replace(region, recompute=setting) for region, setting in regions))

    @property
    def work_ns(self) -> np.ndarray:
        """[kinds of stages, operators] what each takes with what was placed last."""
        return np.concatenate([self._work[template] for template in self._template_of(self._settings)], axis=1)

    def place(self, cuts: Sequence[int]) -> bool:
        """Place the settings where the stages between cuts need them; returns whether anything has changed.

        One after the other, what saves most first, each setting goes to the stage that has the least room then.

        Args:
            cuts: first operator of every chunk.
        """
        chunk_of = self._chunk_of(cuts)
        placed = list(self._settings)
        free: dict[tuple[int, int], list[int]] = {}
        tokens: list[tuple[int, int, str]] = []
        for group, numbers in enumerate(self._alike):
            settings = [self._settings[number] for number in numbers]
            held = {setting: int(self._held[self._templates[group, setting]].sum()) for setting in settings}
            most = max(held, key=lambda setting: (held[setting], setting))
            tokens += ((held[most] - held[setting], group, setting) for setting in settings if setting != most)
            for number in numbers:
                placed[number] = most
                free.setdefault((group, int(chunk_of[number])), []).append(number)
        stages = self._stages(cuts, placed)
        for saved, group, setting in sorted(tokens, key=lambda token: (-token[0], token[1], token[2])):
            chunk = max(
                (c for g, c in free if g == group and free[g, c]), key=lambda c: (stages.full(c) - self._room(c), -c)
            )
            placed[free[group, chunk].pop(0)] = setting
            stages.add(chunk, 0, -saved, 0)
        changed, self._settings = placed != self._settings, placed
        return changed

    def _room(self, chunk: int) -> int:
        """Memory of the devices of a chunk's stage."""
        return self._rooms[self._schedule.rank_and_chunk(chunk)[0]]

    def held(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """Per stage about the bytes that it holds when they are most, without buffers."""
        stages = self._stages(cuts, self._settings)
        of_stage = {self._schedule.rank_and_chunk(chunk)[0]: stages.full(chunk) for chunk in range(len(cuts))}
        return tuple(of_stage[stage] for stage in range(self._schedule.num_stages))

    def fitting(self, cuts: Sequence[int], rooms: Sequence[int]) -> Callable[[int, np.ndarray], np.ndarray]:
        """Between which places a chunk may lie so that its stage holds no more than its room, as far as that can be
        told: with the other chunks of the stage as they are (see ``schedule.balanced_cuts``).

        Args:
            cuts: first operator of every chunk.
            rooms: bytes per stage.
        """
        sums = self._sums(self._settings)
        of_chunk = np.diff(sums[:, [*cuts, self._num_operators]], axis=1)

        def fits(part: int, places: np.ndarray) -> np.ndarray:
            rank, local = self._schedule.rank_and_chunk(part)
            room = rooms[rank]
            others = [
                (chunk, place)
                for chunk in range(len(cuts))
                if chunk != part
                for stage, place in (self._schedule.rank_and_chunk(chunk),)
                if stage == rank
            ]
            most: dict[tuple[int, int, int], int] = {}
            for moment in self._moments[rank]:
                factors = (1, moment.whole[local], moment.waiting[local])
                rest = sum(
                    int(np.array([1, moment.whole[place], moment.waiting[place]]) @ of_chunk[:, chunk])
                    for chunk, place in others
                )
                most[factors] = max(most.get(factors, rest), rest)
            fit = np.full((len(places), len(places)), room >= 0)
            for factors, rest in most.items():
                before = np.array(factors) @ sums[:, places]
                fit &= before[None, :] <= (before + (room - rest))[:, None]
            return fit

        return fits

    def _stages(self, cuts: Sequence[int], settings: Sequence[str]) -> _Stages:
        """What stages between cuts hold with some settings of the regions."""
        stages = _Stages(self._schedule, self._moments, len(cuts))
        of_chunk = np.diff(self._sums(settings)[:, [*cuts, self._num_operators]], axis=1)
        for chunk, rows in enumerate(of_chunk.T.tolist()):
            stages.add(chunk, *rows)
        return stages

    def _sums(self, settings: Sequence[str]) -> np.ndarray:
        """[3, operators + 1] what all operators before each store, hold, and hold waiting, with some settings."""
        templates = self._template_of(settings)
        held, waiting = (np.concatenate([row[t] for t in templates]) for row in (self._held, self._waiting))
        rows = np.zeros((3, self._num_operators + 1), dtype=np.int64)
        np.cumsum([self._stored, held, waiting], axis=1, out=rows[:, 1:])
        return rows

    def _chunk_of(self, cuts: Sequence[int]) -> np.ndarray:
        """[regions] the chunk of each: that of its first operator."""
        return np.searchsorted(np.asarray(cuts), self._firsts, side="right") - 1

    def _template_of(self, settings: Sequence[str]) -> list[int]:
        """Per region one that is alike and had its setting when times and bytes were found out; itself where all of its
        kind have the one setting that they had then."""
        found = list(range(len(settings)))
        for group, numbers in enumerate(self._alike):
            if len({self._whole.regions[number].recompute for number in numbers} | {settings[n] for n in numbers}) > 1:
                for number in numbers:
                    found[number] = self._templates[group, settings[number]]
        return found


class _Stages:
    """About what stages hold at their fullest moments."""

    def __init__(self, schedule: PipelineSchedule, moments: Sequence[tuple[Moment, ...]], num_chunks: int) -> None:
        self._places = [schedule.rank_and_chunk(chunk) for chunk in range(num_chunks)]
        self._moments = moments
        self._stored = [0] * schedule.num_stages
        self._held = [[0] * schedule.num_chunks for _ in range(schedule.num_stages)]
        self._waiting = [[0] * schedule.num_chunks for _ in range(schedule.num_stages)]

    def add(self, chunk: int, stored: int, held: int, waiting: int) -> None:
        """A chunk holds so many bytes more: always, of a microbatch, and of one that waits."""
        rank, local = self._places[chunk]
        self._stored[rank] += stored
        self._held[rank][local] += held
        self._waiting[rank][local] += waiting

    def full(self, chunk: int) -> int:
        """Bytes of the chunk's stage."""
        rank, _ = self._places[chunk]
        held, waiting = self._held[rank], self._waiting[rank]
        return self._stored[rank] + max(
            sum(map(operator.mul, moment.whole, held)) + sum(map(operator.mul, moment.waiting, waiting))
            for moment in self._moments[rank]
        )


def _alike(whole: Decisions) -> list[list[int]]:
    """Repeats in groups that differ in nothing but how they recompute."""
    strategies = {decision.id: decision.strategy for decision in whole.operators}
    groups: dict[tuple[int, tuple[tuple[str, ...], ...]], list[int]] = {}
    for number, region in enumerate(whole.regions):
        if region.run is not None:
            key = (region.run, tuple(strategies[name] for name in region.operators))
            groups.setdefault(key, []).append(number)
    return list(groups.values())


class _Memory(NamedTuple):
    """[operators] what each holds: what its stage stores for it, of a microbatch, and of one that waits for the
    backward of parameters."""

    stored: np.ndarray
    held: np.ndarray
    waiting: np.ndarray


def _memory(whole: Decisions, trial: Program, durations: Durations) -> _Memory:
    """What operators of a plan hold, in a trial."""
    from tap_planner.simulate import held_by, stored_memory, waiting_by

    place = {decision.id: number for number, decision in enumerate(whole.operators)}
    parts: list[int] = []
    for decision in reversed(trial.decisions.operators):  # a transfer is of what follows it
        parts.append(place.get(decision.id, parts[-1] if parts else len(whole.operators) - 1))
    parts.reverse()
    size = durations.tensor_bytes
    held = [sum(size(*entry) for entry in part) for part in held_by(trial, parts, with_working=False)]
    waiting = [sum(size(*entry) for _, entry in part) for part in waiting_by(trial, parts)]
    first: dict[str, int] = {}
    for index, given in enumerate(trial.graph.operators):
        for name in given.inputs:
            read = None if name is None else trial.graph.tensors[name].read
            if read is not None:
                first.setdefault(read.parameter, parts[index])
    stored = np.zeros(len(whole.operators), dtype=np.int64)
    for parameter in trial.decisions.parameters:
        if parameter.name in first:
            stored[first[parameter.name]] += sum(stored_memory(trial.decisions, parameter))
    return _Memory(stored, np.array(held, dtype=np.int64), np.array(waiting, dtype=np.int64))
