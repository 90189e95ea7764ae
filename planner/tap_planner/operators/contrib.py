"""Fused operators of the com.microsoft domain."""

from __future__ import annotations

from tap_planner.operators.types import OperatorRecord

__all__ = ["RECORDS"]

RECORDS: tuple[OperatorRecord, ...] = ()
"""Records of this family."""
