"""A graph with its repeats named."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.graph import Graph

MIN_PERIOD = 3
"""Repeats of fewer operators are not worth a block."""


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
class OccurrenceNames:
    """For each name of the first occurrence the names in all occurrences, in order."""

    operators: Mapping[str, tuple[str, ...]]
    tensors: Mapping[str, tuple[str, ...]]
    parameters: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedGraph:
    """A graph and its runs; they do not overlap and are sorted by start."""

    graph: Graph
    runs: tuple[Run, ...]
    short_runs: tuple[Run, ...] = ()
    """Runs with a period under ``MIN_PERIOD``, reported and not used."""

    def representatives(self) -> tuple[int, ...]:
        """Indices of the operators that are in no second or later occurrence."""
        kept = [True] * len(self.graph.operators)
        for run in self.runs:
            for index in range(run.start + run.period, run.stop):
                kept[index] = False
        return tuple(index for index, keep in enumerate(kept) if keep)

    @property
    def folded_share(self) -> float:
        """Share of the operators that are repeats of others."""
        total = len(self.graph.operators)
        return sum(run.saving for run in self.runs) / total if total else 0.0

    @property
    def short_share(self) -> float:
        """Share of the operators that short runs would save besides."""
        total = len(self.graph.operators)
        return sum(run.saving for run in self.short_runs) / total if total else 0.0

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
