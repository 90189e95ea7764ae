"""One torch function per ONNX operator, on local parts."""

from tap_planner.apply.operators import (  # noqa: F401  (the modules register their functions)
    attention,
    contraction,
    contrib,
    contrib_attention,
    contrib_contraction,
    contrib_decoding,
    control,
    convolution,
    criteria,
    detection,
    elementwise,
    indexing,
    layout,
    normalization,
    output,
    quantised,
    quantised_linear,
    quantised_packed,
    recurrent,
    reduction,
    resizing,
    sampling,
    selection,
    signals,
    sources,
    spatial,
    state_space,
    transfer,
)
from tap_planner.apply.operators.context import FUNCTIONS, Operands, OperatorContext, torch_dtype
from tap_planner.apply.operators.custom import (
    NO_CUSTOM,
    CustomFunctions,
    check_executable,
    custom_operator,
    failed,
    load_custom_operators,
)
from tap_planner.apply.operators.halo import Borders, borders, exchanges, narrow, widen, with_borders
from tap_planner.apply.operators.loss import LossRecord, run_loss
from tap_planner.apply.operators.ring import RingRecord, ring_axes, run_ring
from tap_planner.apply.operators.running import run_operator

__all__ = [
    "FUNCTIONS",
    "NO_CUSTOM",
    "Borders",
    "CustomFunctions",
    "LossRecord",
    "Operands",
    "OperatorContext",
    "RingRecord",
    "borders",
    "check_executable",
    "custom_operator",
    "exchanges",
    "failed",
    "load_custom_operators",
    "narrow",
    "ring_axes",
    "run_loss",
    "run_operator",
    "run_ring",
    "torch_dtype",
    "widen",
    "with_borders",
]
