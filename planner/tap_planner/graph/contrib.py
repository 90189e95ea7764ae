"""Canonical forms. Fused operators of the com.microsoft domain."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.graph.values import Call, Form

CANONICAL: dict[str, Callable[[Call], Form]] = {}
