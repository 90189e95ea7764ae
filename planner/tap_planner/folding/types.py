"""A graph with its repeats named."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.operators import OUTPUT

_NOT_OF_THE_MODEL = ("Loss", OUTPUT)

MIN_PERIOD = 3
"""Repeats of fewer operators are not worth a block."""

MIN_STRETCH = 6
"""Shared stretches of fewer operators are not written as blocks of a plan: their names would outweigh them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A chain of equal blocks: operators ``start .. start + period * count``."""

    start: int
    period: int
    count: int

    @property
    def stop(self) -> int:
        """The operator after the last one."""
        return self.start + self.period * self.count

    @property
    def saving(self) -> int:
        """Operators that need not be looked at again."""
        return self.period * (self.count - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBlock:
    """Stretches of operators that are equal up to names but form no chain: from each of ``starts``, ``size`` operators.

    All lie between runs, in the first occurrences of runs, or in the first stretch of a larger block.
    """

    starts: tuple[int, ...]
    """Ascending; the first stands for the others."""
    size: int

    @property
    def saving(self) -> int:
        """Operators that need not be looked at again."""
        return self.size * (len(self.starts) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class OccurrenceNames:
    """For each name of the first occurrence the names in all occurrences, in order."""

    operators: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedGraph:
    """A graph with its runs, which do not overlap and are sorted by start, and its shared blocks."""

    graph: Graph
    runs: tuple[Run, ...]
    shared: tuple[SharedBlock, ...] = ()
    """Sorted by their first start, larger ones before those inside them."""
    short_runs: tuple[Run, ...] = ()
    """Runs with a period under ``MIN_PERIOD``, reported and not used."""

    def representatives(self) -> tuple[int, ...]:
        """Indices of the operators that are in no second or later occurrence of a run or of a shared block."""
        kept = [True] * len(self.graph.operators)
        for run in self.runs:
            kept[run.start + run.period : run.stop] = [False] * run.saving
        for block in self.shared:
            for start in block.starts[1:]:
                kept[start : start + block.size] = [False] * block.size
        return tuple(index for index, keep in enumerate(kept) if keep)

    @property
    def folded_share(self) -> float:
        """Share of the model's operators (the loss and the graph's ends are none of them) that repeat others."""
        kept = set(self.representatives())
        return self._share(index for index in range(len(self.graph.operators)) if index not in kept)

    @property
    def chained_share(self) -> float:
        """Share of the operators that are repeats in runs."""
        return self._share(_repeats(self.runs))

    @property
    def short_share(self) -> float:
        """Share of the operators that short runs would save besides."""
        return self._share(_repeats(self.short_runs))

    def _share(self, indices: Iterable[int]) -> float:
        operators = self.graph.operators
        total = sum(operator.type not in _NOT_OF_THE_MODEL for operator in operators)
        saved = sum(operators[index].type not in _NOT_OF_THE_MODEL for index in indices)
        return saved / total if total else 0.0

    def stretches(self) -> tuple[tuple[int, int], ...]:
        """(start, stop) of the outermost shared stretches between runs, ascending: what a plan writes as blocks."""
        free = [True] * len(self.graph.operators)
        for run in self.runs:
            free[run.start : run.stop] = [False] * (run.stop - run.start)
        found: list[tuple[int, int]] = []
        for block in sorted(self.shared, key=lambda block: -block.size):
            starts = [start for start in block.starts if all(free[start : start + block.size])]
            if block.size < MIN_STRETCH or len(starts) < 2:
                continue
            for start in starts:
                free[start : start + block.size] = [False] * block.size
            found.extend((start, start + block.size) for start in starts)
        return tuple(sorted(found))

    def occurrence_names(self, run: Run) -> OccurrenceNames:
        """How the names of the first occurrence read in each occurrence."""
        operators: dict[str, tuple[str, ...]] = {}
        tensors: dict[str, tuple[str, ...]] = {}
        parameters: dict[str, tuple[str, ...]] = {}
        for offset in range(run.period):
            copies = self.graph.operators[run.start + offset : run.stop : run.period]
            operators[copies[0].id] = tuple(operator.id for operator in copies)
            columns = [*zip(*(operator.inputs for operator in copies), strict=True)]
            columns.extend(zip(*(operator.outputs for operator in copies), strict=True))
            for column in columns:
                names = tuple(name for name in column if name is not None)
                if not names:
                    continue
                tensors.setdefault(names[0], names)
                reads = [self.graph.tensors[name].read for name in names]
                read_names = tuple(read.parameter for read in reads if read is not None)
                if read_names:
                    parameters.setdefault(read_names[0], read_names)
        return OccurrenceNames(operators=operators, tensors=tensors, parameters=parameters)


def _repeats(runs: Iterable[Run]) -> Iterator[int]:
    """Operators of second and later occurrences."""
    for run in runs:
        yield from range(run.start + run.period, run.stop)
