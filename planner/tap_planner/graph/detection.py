"""Canonical forms. Sampling of images and boxes: RoiAlign, GridSample, NonMaxSuppression and the like."""

from __future__ import annotations

from collections.abc import Callable

from tap_planner.graph.values import Call, Form

CANONICAL: dict[str, Callable[[Call], Form]] = {}
