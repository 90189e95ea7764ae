"""Graph to folded graph: find the repeated blocks."""

from tap_planner.folding.finder import fold
from tap_planner.folding.types import MIN_PERIOD, FoldedGraph, OccurrenceNames, Run

__all__ = ["MIN_PERIOD", "FoldedGraph", "OccurrenceNames", "Run", "fold"]
