"""Plan and graph lowered to what each rank does, step by step."""

from tap_planner.program.collectives import (
    collectives,
    instruction_collectives,
    local_factor_sizes,
    local_operands,
    step_payloads,
)
from tap_planner.program.lower import lower
from tap_planner.program.reading import Value, made_gradients, renewed_operands, rerun_of_regions
from tap_planner.program.types import (
    Collective,
    Compute,
    ForgetParameters,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Release,
    UpdateParameters,
)

__all__ = [
    "Collective",
    "Compute",
    "ForgetParameters",
    "GatherParameters",
    "GatherUpdated",
    "Instruction",
    "Phase",
    "Program",
    "Redistribute",
    "ReduceGradients",
    "ReduceShards",
    "Release",
    "UpdateParameters",
    "Value",
    "collectives",
    "instruction_collectives",
    "local_factor_sizes",
    "local_operands",
    "lower",
    "made_gradients",
    "renewed_operands",
    "rerun_of_regions",
    "step_payloads",
]
