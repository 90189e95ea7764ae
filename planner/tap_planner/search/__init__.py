"""The search: cost tables, elimination, chains of repeats, master, certificate."""

from tap_planner.search.assemble import assemble
from tap_planner.search.capacity import least_ns
from tap_planner.search.changes import OldPlan
from tap_planner.search.choices import Assignment, Choices, fold_assignment
from tap_planner.search.configuration import Configuration, Pipeline, Recompute, Settings, ZeroSetting, zero_settings
from tap_planner.search.constraints import NoStrategyError, SpaceRules, StrategyFilter
from tap_planner.search.costing import CostedModel
from tap_planner.search.enumeration import SearchSpace, counts_to_try, split_leaves, split_ns
from tap_planner.search.feasibility import first_conflict
from tap_planner.search.fewer import (
    FewerDevices,
    NotOnAllError,
    fewer_devices,
    requests_by_room,
    search_by_room,
    useful_meshes,
)
from tap_planner.search.graphs import MicrobatchGraphs
from tap_planner.search.keeping import models_kept
from tap_planner.search.limited import LimitedSearch, least_memory
from tap_planner.search.matching import Names
from tap_planner.search.merging import search_parts
from tap_planner.search.model import Model, build_model
from tap_planner.search.near import stay_near
from tap_planner.search.obstacles import Obstacle, find_obstacles
from tap_planner.search.planner import search
from tap_planner.search.proof import Leaf, Proof, ProofKind, mesh_label
from tap_planner.search.request import NothingFasterError, SearchRequest, SearchResult, SearchStatistics, Smallest
from tap_planner.search.resolving import keep_demands, merge_rules, resolve
from tap_planner.search.roles import ROLES, Roles
from tap_planner.search.rooms import stage_rooms
from tap_planner.search.shares import Shares
from tap_planner.search.smallest import search_smallest, smallest
from tap_planner.search.solver import Solver
from tap_planner.search.targets import TARGETS, Target, Variant, target_rules
from tap_planner.search.verify import LeafFinding, verify_in_memory, verify_leaves, verify_memory
from tap_planner.search.weighting import Outcome, Weights

__all__ = [
    "ROLES",
    "TARGETS",
    "Assignment",
    "Choices",
    "Configuration",
    "CostedModel",
    "FewerDevices",
    "Leaf",
    "LeafFinding",
    "LimitedSearch",
    "MicrobatchGraphs",
    "Model",
    "Names",
    "NoStrategyError",
    "NotOnAllError",
    "NothingFasterError",
    "Obstacle",
    "OldPlan",
    "Outcome",
    "Pipeline",
    "Proof",
    "ProofKind",
    "Recompute",
    "Roles",
    "SearchRequest",
    "SearchResult",
    "SearchSpace",
    "SearchStatistics",
    "Settings",
    "Shares",
    "Smallest",
    "Solver",
    "SpaceRules",
    "StrategyFilter",
    "Target",
    "Variant",
    "Weights",
    "ZeroSetting",
    "assemble",
    "build_model",
    "counts_to_try",
    "fewer_devices",
    "find_obstacles",
    "first_conflict",
    "fold_assignment",
    "keep_demands",
    "least_memory",
    "least_ns",
    "merge_rules",
    "mesh_label",
    "models_kept",
    "requests_by_room",
    "resolve",
    "search",
    "search_by_room",
    "search_parts",
    "search_smallest",
    "smallest",
    "split_leaves",
    "split_ns",
    "stage_rooms",
    "stay_near",
    "target_rules",
    "useful_meshes",
    "verify_in_memory",
    "verify_leaves",
    "verify_memory",
    "zero_settings",
]
