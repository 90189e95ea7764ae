"""Sweeps: every combination of a grid of options planned, ranked, and kept on disk as they come."""

from tap_planner.sweep.combinations import Combination, combinations, mesh_sizes
from tap_planner.sweep.grid import Dimension, Grid, default_grid, parse_grid
from tap_planner.sweep.pareto import pareto_front
from tap_planner.sweep.rows import Outcome, RankedRow, Status, rank
from tap_planner.sweep.running import Sweep, SweepProgress, SweepRequest, prepare_sweep
from tap_planner.sweep.workers import Done, Lost, work_through

__all__ = [
    "Combination",
    "Dimension",
    "Done",
    "Grid",
    "Lost",
    "Outcome",
    "RankedRow",
    "Status",
    "Sweep",
    "SweepProgress",
    "SweepRequest",
    "combinations",
    "default_grid",
    "mesh_sizes",
    "pareto_front",
    "parse_grid",
    "prepare_sweep",
    "rank",
    "work_through",
]
