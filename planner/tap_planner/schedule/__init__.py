"""Schedules as data: for now the gradient buckets."""

from tap_planner.schedule.buckets import BUCKET_ELEMENTS, BucketKey, assign_buckets

__all__ = ["BUCKET_ELEMENTS", "BucketKey", "assign_buckets"]
