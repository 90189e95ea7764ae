"""Canonical forms. Random number operators."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.graph.values import Call, Form

CANONICAL: dict[str, Callable[[Call], Form]] = {}
