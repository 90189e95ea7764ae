"""ONNX file to bound, canonical, immutable graph; and the reader of its weights."""

from tap_planner.graph.assembly import bind
from tap_planner.graph.constants import ConstantStore
from tap_planner.graph.loading import ModelFile, load_model
from tap_planner.graph.options import BindOptions, LossKind, LossOptions
from tap_planner.graph.types import Graph, Operator, Parameter, ParameterRead, Tensor, TensorKind
from tap_planner.graph.weights import WeightReader

__all__ = [
    "BindOptions",
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
    "load_model",
]
