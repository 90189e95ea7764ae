"""Plan and graph lowered to what each rank does, step by step."""

from tap_planner.program.collectives import (
    collectives,
    instruction_collectives,
    local_factor_sizes,
    step_payloads,
)
from tap_planner.program.lower import lower
from tap_planner.program.types import (
    Collective,
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
    Release,
    UpdateParameters,
)

__all__ = [
    "Collective",
    "Compute",
    "GatherParameters",
    "GatherUpdated",
    "Instruction",
    "Phase",
    "Program",
    "Redistribute",
    "ReduceGradients",
    "Release",
    "UpdateParameters",
    "collectives",
    "instruction_collectives",
    "local_factor_sizes",
    "lower",
    "step_payloads",
]
