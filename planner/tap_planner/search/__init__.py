"""The search: cost tables, elimination, chains of repeats, master, certificate."""

from tap_planner.search.assemble import assemble
from tap_planner.search.configuration import Configuration
from tap_planner.search.constraints import StrategyFilter, StrategyRule
from tap_planner.search.costing import CostedModel
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.model import Model, build_model
from tap_planner.search.obstacles import Obstacle, find_obstacles
from tap_planner.search.planner import search
from tap_planner.search.request import SearchRequest, SearchResult, SearchStatistics
from tap_planner.search.solver import Solver
from tap_planner.search.weighting import Assignment, Outcome, Weights

__all__ = [
    "Assignment",
    "Configuration",
    "CostedModel",
    "LimitedSearch",
    "Model",
    "Obstacle",
    "Outcome",
    "SearchRequest",
    "SearchResult",
    "SearchStatistics",
    "Solver",
    "StrategyFilter",
    "StrategyRule",
    "Weights",
    "assemble",
    "build_model",
    "find_obstacles",
    "least_memory",
    "search",
]
