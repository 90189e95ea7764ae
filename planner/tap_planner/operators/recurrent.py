"""Recurrent layers: LSTM, GRU, RNN."""

from __future__ import annotations

from tap_planner.operators.types import OperatorRecord

__all__ = ["RECORDS"]

RECORDS: tuple[OperatorRecord, ...] = ()
"""Records of this family."""
