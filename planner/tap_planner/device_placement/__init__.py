"""Whole operators on devices, by graph traversal order."""

from tap_planner.device_placement.bounds import lower_bound_ns
from tap_planner.device_placement.building import Built, problem_of
from tap_planner.device_placement.contiguous import Contiguous, contiguous
from tap_planner.device_placement.earliest_finish import earliest_finish
from tap_planner.device_placement.exact import ExactResult, ExactStatus, solve_exactly
from tap_planner.device_placement.improvement import Improved, improve
from tap_planner.device_placement.orders import MORE_ORDERS, ORDERS, order_groups, orders_for
from tap_planner.device_placement.placing import PLACERS, Placing, Shortage, Try, place, priority_of
from tap_planner.device_placement.plans import PlacedPlan, placed_plan
from tap_planner.device_placement.priorities import order_priority, rank_priority, upward_rank
from tap_planner.device_placement.problem import Links, Placement, Problem, Shared
from tap_planner.device_placement.sequences import in_order_of_use
from tap_planner.device_placement.timeline import Timeline, makespan_ns, play
from tap_planner.device_placement.topology import DevicePlace

__all__ = [
    "MORE_ORDERS",
    "ORDERS",
    "PLACERS",
    "Built",
    "Contiguous",
    "DevicePlace",
    "ExactResult",
    "ExactStatus",
    "Improved",
    "Links",
    "PlacedPlan",
    "Placement",
    "Placing",
    "Problem",
    "Shared",
    "Shortage",
    "Timeline",
    "Try",
    "contiguous",
    "earliest_finish",
    "improve",
    "in_order_of_use",
    "lower_bound_ns",
    "makespan_ns",
    "order_groups",
    "order_priority",
    "orders_for",
    "place",
    "placed_plan",
    "play",
    "priority_of",
    "problem_of",
    "rank_priority",
    "solve_exactly",
    "upward_rank",
]
