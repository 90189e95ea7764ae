"""Where the operators of a folded graph are: run, occurrence, class and region of each."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tap_planner.folding import FoldedGraph
from tap_planner.schedule import rerun_operators
from tap_planner.search.configuration import Recompute
from tap_planner.search.terms import RegionPolicy


class Places:
    """Places of the operators, by their index.

    Regions are numbered in graph order: every occurrence of a run is one, and so is what lies between runs.

    Args:
        folded: the graph and its runs.
    """

    def __init__(self, folded: FoldedGraph) -> None:
        count = len(folded.graph.operators)
        self._graph = folded.graph
        self.num_operators = count
        self.run_of = np.full(count, -1)
        """[num_operators] number of the run; -1 outside runs."""
        self.occurrence_of = np.zeros(count, dtype=np.int64)
        """[num_operators] number of the occurrence inside the run; 0 outside runs."""
        self.class_of = np.arange(count)
        """[num_operators] the operator of the run's first occurrence that this one repeats; itself outside runs."""
        self.region_of = np.zeros(count, dtype=np.int64)
        """[num_operators] number of the region."""
        self.run_regions: list[list[int]] = []
        """Per run, the regions of its occurrences."""
        self._locate(folded)

    def _locate(self, folded: FoldedGraph) -> None:
        region, position = 0, 0
        for number, run in enumerate(folded.runs):
            if run.start > position:
                self.region_of[position : run.start] = region
                region += 1
            for occurrence in range(run.count):
                begin = run.start + occurrence * run.period
                span = slice(begin, begin + run.period)
                self.run_of[span] = number
                self.occurrence_of[span] = occurrence
                self.class_of[span] = np.arange(run.start, run.start + run.period)
                self.region_of[span] = region + occurrence
            self.run_regions.append(list(range(region, region + run.count)))
            region += run.count
            position = run.start + run.count * run.period
        self.region_of[position:] = region

    @cached_property
    def num_regions(self) -> int:
        """Number of regions."""
        return int(self.region_of.max(initial=-1)) + 1

    @cached_property
    def region_class(self) -> Mapping[int, int]:
        """Per region of a run, the region of the run's first occurrence."""
        return {region: regions[0] for regions in self.run_regions for region in regions}

    @cached_property
    def last_regions(self) -> frozenset[int]:
        """The last occurrence of every run."""
        return frozenset(regions[-1] for regions in self.run_regions)

    def recomputes(self, region: int) -> bool:
        """Whether a region can recompute: occurrences of runs can, what lies between them cannot."""
        return region in self.region_class

    @cached_property
    def rerun(self) -> np.ndarray:
        """[num_operators] whether an operator runs again under selective recomputation of its region."""
        rerun = np.zeros(self.num_operators, dtype=bool)
        for regions in self.run_regions:
            first = np.flatnonzero(self.region_of == regions[0])
            again = np.array(sorted(rerun_operators(self._graph, tuple(first.tolist()))), dtype=np.int64)
            for occurrence in range(len(regions)):
                rerun[again + occurrence * len(first)] = True
        return rerun

    def policy(self, recompute: Mapping[int, Recompute]) -> RegionPolicy:
        """Regions as they are in the whole graph.

        Args:
            recompute: what the regions choose that do not keep everything.
        """
        return RegionPolicy(modes=recompute, working=self.last_regions)
