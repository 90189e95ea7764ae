"""A Program: what every rank does in one step, instruction by instruction.

All ranks run the same instructions (SPMD); where a rank stands on the mesh decides which part of each tensor it
holds. ``microbatch`` runs once per microbatch, ``step`` once after all of them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.sharding import Placements


class Phase(enum.Enum):
    """Part of the step that an instruction belongs to, as the plan's list of collectives names it."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator on local parts (its forward), or, in phase BACKWARD, its vector-Jacobian product."""

    phase: Phase
    operator: int
    """Index into ``Graph.operators``."""


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Bring a tensor's value to a destination (forward steps), or in phase BACKWARD the gradient that the
    destination's consumers accumulated to the producer's placement (backward steps)."""

    phase: Phase
    redistribution: int
    """Index into ``Decisions.redistributions``."""


@dataclass(frozen=True, slots=True)
class GatherParameters:
    """All-gather the parameters of a ZeRO-3 bucket over its ZeRO axes, before their first use in the phase."""

    phase: Phase
    bucket: int


@dataclass(frozen=True, slots=True)
class ForgetParameters:
    """Forget the whole parameters of a ZeRO-3 bucket, after its last use in the direction."""

    bucket: int


@dataclass(frozen=True, slots=True)
class ReduceGradients:
    """Reduce the gradients of a bucket: all-reduce over its data axes, or, where ZeRO >= 1, reduce-scatter over its
    ZeRO axes."""

    bucket: int


@dataclass(frozen=True, slots=True)
class ReduceShards:
    """All-reduce a bucket's shards of gradients over the data axes that ZeRO does not shard over (hybrid sharding)."""

    bucket: int


@dataclass(frozen=True, slots=True)
class UpdateParameters:
    """Run the optimizer on what this rank holds of every trainable parameter."""


@dataclass(frozen=True, slots=True)
class GatherUpdated:
    """All-gather the updated parameters of a bucket (ZeRO 1 and 2)."""

    bucket: int


@dataclass(frozen=True, slots=True)
class Release:
    """Forget values that nothing reads any more, or not before they are made again."""

    tensors: tuple[str, ...] = ()
    """Activations, as their producers left them."""
    inputs: tuple[tuple[str, Placements], ...] = ()
    """Graph inputs, in a placement."""
    redistributions: tuple[int, ...] = ()
    """What redistributions made, indices into ``Decisions.redistributions``."""


Instruction = (
    Compute
    | Redistribute
    | GatherParameters
    | ForgetParameters
    | ReduceGradients
    | ReduceShards
    | UpdateParameters
    | GatherUpdated
    | Release
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Collective:
    """One kind of collective of the plan's list: how often it runs per step on the rank at coordinate 0."""

    phase: Phase
    kind: str
    axes: tuple[int, ...]
    elements: int
    """Logical payload of one call, definitions.md "Comparing execution with the plan"."""
    dtype: str
    """Element type of the payload in the graph (floats take the plan's precision)."""
    count: int
    """Calls per step with all microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A plan lowered onto the graph of one microbatch."""

    graph: Graph
    """Bound with the batch of one microbatch."""
    decisions: Decisions
    microbatch: tuple[Instruction, ...]
    step: tuple[Instruction, ...]
    loss_scale_denominator: int
    """The loss of a microbatch is divided by this (microbatches for means, 1 for sums)."""
