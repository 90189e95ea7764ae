"""A torch module to an ONNX file that is fit for planning and training.

Nothing here imports torch before it is used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tap_planner.capture.exporting import INLINE_LIMIT_BYTES, CapturedGraph, export_graph

if TYPE_CHECKING:
    from tap_planner.capture.standins import parameters_on_meta

__all__ = ["INLINE_LIMIT_BYTES", "CapturedGraph", "export_graph", "parameters_on_meta"]


def __getattr__(name: str) -> object:
    if name == "parameters_on_meta":
        return import_module("tap_planner.capture.standins").parameters_on_meta
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
