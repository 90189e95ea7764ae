"""Schedules as data: pipelines, gradient buckets, and what runs again under selective recompute."""

from tap_planner.schedule.activations import InFlight, Moment, fullest_moments, peak_bytes, peak_in_flight
from tap_planner.schedule.buckets import BUCKET_ELEMENTS, BucketKey, assign_buckets
from tap_planner.schedule.checking import check
from tap_planner.schedule.closed_forms import bubble_ns, in_flight
from tap_planner.schedule.cuts import balanced_cuts
from tap_planner.schedule.dependencies import SlotGraph, slot_graph
from tap_planner.schedule.drawing import picture
from tap_planner.schedule.named import SCHEDULES, make_schedule
from tap_planner.schedule.order_file import parse_order, read_order, to_text
from tap_planner.schedule.orders import fill_drain, interleaved, one_forward_one_backward
from tap_planner.schedule.pipeline import ChunkOrder, PipelineSchedule, Slot, Work
from tap_planner.schedule.recompute import CHEAP_FLOPS, is_cheap, made_gradients, rerun_by_region, rerun_operators
from tap_planner.schedule.timing import Durations, Timing, makespan
from tap_planner.schedule.zero_bubble import zb_h1, zbv

__all__ = [
    "BUCKET_ELEMENTS",
    "CHEAP_FLOPS",
    "SCHEDULES",
    "BucketKey",
    "ChunkOrder",
    "Durations",
    "InFlight",
    "Moment",
    "PipelineSchedule",
    "Slot",
    "SlotGraph",
    "Timing",
    "Work",
    "assign_buckets",
    "balanced_cuts",
    "bubble_ns",
    "check",
    "fill_drain",
    "fullest_moments",
    "in_flight",
    "interleaved",
    "is_cheap",
    "made_gradients",
    "make_schedule",
    "makespan",
    "one_forward_one_backward",
    "parse_order",
    "peak_bytes",
    "peak_in_flight",
    "picture",
    "read_order",
    "rerun_by_region",
    "rerun_operators",
    "slot_graph",
    "to_text",
    "zb_h1",
    "zbv",
]
