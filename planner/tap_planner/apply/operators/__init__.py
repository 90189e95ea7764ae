"""One torch function per ONNX operator, on local parts."""

from tap_planner.apply.operators import (  # noqa: F401  (the modules register their functions)
    attention,
    contraction,
    contrib,
    convolution,
    detection,
    elementwise,
    indexing,
    layout,
    normalization,
    quantised,
    recurrent,
    reduction,
    sampling,
    sources,
)
from tap_planner.apply.operators.context import FUNCTIONS, Operands, OperatorContext, torch_dtype
from tap_planner.apply.operators.loss import LossRecord, run_loss
from tap_planner.apply.operators.running import run_operator

__all__ = ["FUNCTIONS", "LossRecord", "Operands", "OperatorContext", "run_loss", "run_operator", "torch_dtype"]
