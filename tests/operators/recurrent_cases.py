"""Cases of the family `recurrent`, and their independent references."""

from __future__ import annotations

from tap_planner.operators import OperatorSignature

CASES: tuple[OperatorSignature, ...] = ()
