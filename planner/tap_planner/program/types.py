"""A Program: what every rank does in one step, instruction by instruction.

The ranks of a stage run the same instructions (SPMD); where a rank stands on the mesh decides which part of each tensor
it holds. A stage works on the chunks of the model that it holds, forward and backward, microbatch by microbatch in the
order of the schedule, and ends the step with instructions that run once. Without a pipeline there is one stage with one
chunk.
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Iterator
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.schedule import Work
from tap_planner.sharding import Placements


class Phase(enum.Enum):
    """Part of the step that an instruction belongs to, as the plan's list of collectives names it."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"
    GRADIENT = "gradient"
    OPTIMIZER = "optimizer"


class Part(enum.Enum):
    """Which gradients a backward makes."""

    ALL = "all"
    INPUTS = "inputs"
    """Of activations alone: what the stage before waits for."""
    PARAMETERS = "parameters"
    """Of parameters alone, later; until then the gradients of the outputs are held."""


@dataclass(frozen=True, slots=True)
class Compute:
    """Run an operator on local parts (its forward), or, in phase BACKWARD, its vector-Jacobian product."""

    phase: Phase
    operator: int
    """Index into ``Graph.operators``."""
    part: Part = Part.ALL


@dataclass(frozen=True, slots=True)
class Redistribute:
    """Bring a tensor's value to a destination (forward steps), or in phase BACKWARD the gradient that the
    destination's consumers accumulated to the producer's placement (backward steps)."""

    phase: Phase
    redistribution: int
    """Index into ``Decisions.redistributions``."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send to another stage: forward, from the stage that makes a tensor, what a ``Transfer`` reads; in phase BACKWARD,
    from the stage that has the ``Transfer``, its gradient. Every rank sends its part to the rank of the other stage at
    the same coordinates, and does not wait; of what ranks hold alike perhaps only a share (``scattered_axes``)."""

    phase: Phase
    operator: int
    """The ``Transfer``, index into ``Graph.operators``."""
    peer: int | None
    """The stage that it is sent to; None where that is this one, and nothing is sent."""


@dataclass(frozen=True, slots=True)
class Receive:
    """The other side of a ``Send``: waits for what is sent, and gathers it where it was shared out."""

    phase: Phase
    operator: int
    peer: int | None
    """The stage that it is sent from; None where that is this one."""


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
class SumTied:
    """Sum the gradient of a parameter over the stages that read it; each holds a copy."""

    parameter: str


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
    | Send
    | Receive
    | GatherParameters
    | ForgetParameters
    | SumTied
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
    """Empty where it goes along the pipeline: from stage to stage (``send_recv``, listed for the stage that sends), or
    over the stages that hold a tied parameter."""
    elements: int
    """Logical payload of one call, definitions.md "Comparing execution with the plan"."""
    dtype: str
    """Element type of the payload in the graph (floats take the plan's precision)."""
    count: int
    """Calls per step with all microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """What a stage does with one microbatch in one chunk (virtual stage) of the model."""

    operators: range
    """Indices into ``Graph.operators``."""
    forward: tuple[Instruction, ...]
    backward: tuple[Instruction, ...]
    """Empty in inference; without gradients of parameters where the schedule makes them later."""
    weights: tuple[Instruction, ...] = ()
    """Gradients of parameters, where the schedule makes them later."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What a stage does in one go: one slot of its order, or without a pipeline all work on a microbatch."""

    microbatch: int
    chunk: int
    """Index into ``Program.chunks``."""
    instructions: tuple[Instruction, ...]
    is_last: bool
    """Whether the stage is done with the microbatch in this chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A plan lowered onto the graph of one microbatch."""

    graph: Graph
    """Bound with the batch of one microbatch, and cut in stages."""
    decisions: Decisions
    chunks: tuple[Chunk, ...]
    """In model order."""
    steps: tuple[tuple[Instruction, ...], ...]
    """Per stage, what it does once, after all microbatches."""
    parameters: tuple[tuple[str, ...], ...]
    """Per stage, the names of the parameters that it holds: those that its operators read."""
    loss_scale_denominator: int
    """The loss of a microbatch is divided by this (microbatches for means, 1 for sums)."""

    @property
    def microbatch(self) -> tuple[Instruction, ...]:
        """All that is done for one microbatch, of all stages: chunk after chunk forward, then back."""
        forward = (instruction for chunk in self.chunks for instruction in chunk.forward)
        backward = (part for chunk in reversed(self.chunks) for part in (*chunk.backward, *chunk.weights))
        return (*forward, *backward)

    @property
    def step(self) -> tuple[Instruction, ...]:
        """All that is done once, of all stages."""
        return tuple(instruction for step in self.steps for instruction in step)

    def turns(self, stage: int) -> Iterator[Turn]:
        """What a stage does before the end of the step, in order."""
        pipeline = self.decisions.pipeline
        if pipeline is None:
            for microbatch in range(self.decisions.microbatches):
                yield Turn(microbatch=microbatch, chunk=0, instructions=self.microbatch, is_last=True)
            return
        for slot in pipeline.schedule.orders[stage]:
            number = pipeline.schedule.virtual_stage(stage, slot.chunk)
            chunk = self.chunks[number]
            match slot.work:
                case Work.FORWARD:
                    instructions = chunk.forward
                case Work.BACKWARD:
                    instructions = (*chunk.backward, *chunk.weights)
                case Work.INPUT_BACKWARD:
                    instructions = chunk.backward
                case Work.WEIGHT_BACKWARD:
                    instructions = chunk.weights
            yield Turn(
                microbatch=slot.microbatch,
                chunk=number,
                instructions=instructions,
                is_last=slot.work in (Work.BACKWARD, Work.WEIGHT_BACKWARD),
            )

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a chunk."""
        pipeline = self.decisions.pipeline
        return 0 if pipeline is None else pipeline.stage_of(chunk)

    def stages_of(self, parameter: str) -> tuple[int, ...]:
        """The stages that hold a parameter, in order."""
        return tuple(stage for stage, names in enumerate(self.parameters) if parameter in names)

    def chunk_of(self, operator: int) -> int:
        """The chunk that an operator lies in."""
        return bisect.bisect_right([chunk.operators.start for chunk in self.chunks], operator) - 1
