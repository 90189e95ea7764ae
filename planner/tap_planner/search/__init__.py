"""The search: cost tables, elimination, chains of repeats, master, certificate."""

from tap_planner.search.assemble import assemble
from tap_planner.search.constraints import StrategyFilter, StrategyRule
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.model import Configuration, CostedModel, Model
from tap_planner.search.planner import SearchRequest, SearchResult, SearchStatistics, build_model, search
from tap_planner.search.solver import Assignment, Outcome, Solver, Weights

__all__ = [
    "Assignment",
    "Configuration",
    "CostedModel",
    "LimitedSearch",
    "Model",
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
    "least_memory",
    "search",
]
