"""ONNX file to bound, canonical, immutable graph; and the reader of its weights.

Names of the modules that read ONNX are resolved when they are first used: reading or comparing plans needs no onnx.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from tap_planner.graph.constants import ConstantStore
from tap_planner.graph.options import BindOptions, LossKind, LossOptions
from tap_planner.graph.stages import cut_in_stages, reordered
from tap_planner.graph.types import Body, Graph, Operator, Parameter, ParameterRead, Tensor, TensorKind

if TYPE_CHECKING:
    from tap_planner.graph.assembly import bind
    from tap_planner.graph.bodies import run_body
    from tap_planner.graph.loading import ModelFile, load_model
    from tap_planner.graph.texts import model_of_text
    from tap_planner.graph.training import TRAINABLE_KEY
    from tap_planner.graph.weights import WeightReader

_LAZY = {
    "TRAINABLE_KEY": "training",
    "ModelFile": "loading",
    "WeightReader": "weights",
    "bind": "assembly",
    "load_model": "loading",
    "model_of_text": "texts",
    "run_body": "bodies",
}

__all__ = [
    "TRAINABLE_KEY",
    "BindOptions",
    "Body",
    "ConstantStore",
    "Graph",
    "LossKind",
    "LossOptions",
    "ModelFile",
    "Operator",
    "Parameter",
    "ParameterRead",
    "Tensor",
    "TensorKind",
    "WeightReader",
    "bind",
    "cut_in_stages",
    "load_model",
    "model_of_text",
    "reordered",
    "run_body",
]


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(import_module(f"tap_planner.graph.{_LAZY[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
