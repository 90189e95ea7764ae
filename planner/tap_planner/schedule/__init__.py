"""Schedules as data: gradient buckets, and what runs again under selective recompute."""

from tap_planner.schedule.buckets import BUCKET_ELEMENTS, BucketKey, assign_buckets
from tap_planner.schedule.recompute import CHEAP_FLOPS, is_cheap, made_gradients, rerun_by_region, rerun_operators

__all__ = [
    "BUCKET_ELEMENTS",
    "CHEAP_FLOPS",
    "BucketKey",
    "assign_buckets",
    "is_cheap",
    "made_gradients",
    "rerun_by_region",
    "rerun_operators",
]
