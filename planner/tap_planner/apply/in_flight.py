"""What a stage has of a microbatch that it works on, and what comes of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tap_planner.apply.communicator import Parts
from tap_planner.apply.differentiation import OperatorRecord
from tap_planner.apply.operators import LossRecord, RingRecord
from tap_planner.apply.values import TensorValues

Seeds = list[list[Tensor | None]]
"""Per rank, gradients of an operator's outputs."""


@dataclass(slots=True)
class MicrobatchState:
    """What a stage has of a microbatch in a chunk, from its first turn to its last."""

    microbatch: int
    values: TensorValues
    gradients: dict[str, Parts] = field(default_factory=dict)
    """Of activations."""
    edge_gradients: dict[int, Parts] = field(default_factory=dict)
    """Of what redistributions made."""
    records: dict[int, list[OperatorRecord] | LossRecord | RingRecord] = field(default_factory=dict)
    """Per operator, what its backward needs."""
    seeds: dict[int, Seeds] = field(default_factory=dict)
    """Per operator whose gradients of parameters are still to be made."""
    results: dict[str, Parts] = field(default_factory=dict)
    """Graph outputs and the loss, as forward made them."""

    def clear(self) -> None:
        """Forget everything."""
        self.values.clear()
        for kept in (self.gradients, self.edge_gradients, self.records, self.seeds, self.results):
            kept.clear()


@dataclass(slots=True)
class StepResult:
    """What one step of a stage made, besides the changes to the parameters."""

    outputs: dict[str, list[Parts]] = field(default_factory=dict)
    """Per graph output tensor that the stage makes, per microbatch: local parts."""
    losses: list[Parts] = field(default_factory=list)
    """Per microbatch, where the stage makes the loss: each rank's term of it (not divided by the number of
    microbatches)."""
