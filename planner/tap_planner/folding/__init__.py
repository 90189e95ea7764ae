"""Graph to folded graph: find the repeated blocks."""

from tap_planner.folding.finder import fold
from tap_planner.folding.types import MIN_PERIOD, FoldedGraph, OccurrenceNames, Run, SharedBlock

__all__ = ["MIN_PERIOD", "FoldedGraph", "OccurrenceNames", "Run", "SharedBlock", "fold"]
