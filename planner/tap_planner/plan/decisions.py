"""Decisions: everything that the applier obeys, with all names written out.

The plan document (``document.py``) is the folded, reviewable form of this; ``expand`` and ``fold`` go between the two.
Placements are tuples with one entry per mesh axis, in mesh order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from tap_planner.schedule import PipelineSchedule
from tap_planner.sharding import Placements, Step, data_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDecision:
    """One mesh axis, outermost first; ranks are row-major over the axes."""

    name: str
    size: int
    levels: tuple[str, ...]
    """Names of the topology levels that the axis spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandDecision:
    """How an operator reads one operand."""

    tensor: str
    placement: Placements
    gradient: Placements | None
    """Placement in which the operator's backward makes the gradient; None if none is needed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputDecision:
    """What an operator writes."""

    tensor: str
    shape: tuple[int, ...]
    """Global shape (of one microbatch)."""
    placement: Placements


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorDecision:
    """Strategy of an operator and the placements that follow from it."""

    id: str
    name: str
    type: str
    strategy: tuple[str, ...]
    """Per axis: name of a factor (``n``, ``n[3]``), ``ring``, ``none`` or ``partial``."""
    inputs: tuple[OperandDecision | None, ...]
    outputs: tuple[OutputDecision, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionDecision:
    """One (tensor, destination, gradient) decision; it serves all its consumers and is paid once."""

    tensor: str
    """An activation, or a read of a parameter."""
    source: Placements
    """Placement of the producer's output (of the stored parameter, in the read's dims)."""
    to: Placements
    gradient: Placements | None
    """Placement of the gradient that the consumers make; None if the tensor needs none."""
    forward: tuple[Step, ...]
    """Steps from ``source`` to ``to``."""
    backward: tuple[Step, ...]
    """Steps from ``gradient`` to the placement in which the producer wants its gradient."""
    consumers: tuple[str, ...]
    """Operator ids, in graph order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterDecision:
    """Where a stored parameter lives and how its gradient is reduced."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    """Stored dtype in the model file."""
    trainable: bool
    placement: Placements
    gradient: Placements | None
    """Placement of the gradient before its reduction; P(sum) on the data axes. None if not trainable."""
    zero_level: int
    zero_axes: tuple[int, ...]
    """Axes over which ZeRO shards, some or all of the data axes; empty at level 0."""
    bucket: int | None
    """Bucket in which the gradient is reduced; None if it needs no reduction."""

    @property
    def data_axes(self) -> tuple[int, ...]:
        """Axes on which the parameter is R and its gradient P."""
        if self.gradient is None:
            return ()
        return data_axes(self.placement, self.gradient)


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketDecision:
    """Gradients reduced together: the flat concatenation of its parameters' local parts, in ``parameters`` order.

    At ZeRO 3 a bucket is also the group that is gathered together.
    """

    id: int
    axes: tuple[int, ...]
    """Data axes: the gradients are summed over them."""
    dtype: str
    zero_level: int
    zero_axes: tuple[int, ...]
    """Axes over which ZeRO shards; empty at level 0. Over the rest of ``axes`` the shards are replicated."""
    parameters: tuple[str, ...]
    elements: int
    """Local elements on the rank at coordinate 0, padded to a multiple of the shards where ZeRO >= 1."""

    @property
    def rest_axes(self) -> tuple[int, ...]:
        """Axes over which the shards of gradients are summed once a step (hybrid sharding)."""
        return tuple(axis for axis in self.axes if axis not in self.zero_axes) if self.zero_level else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Consecutive operators: one occurrence of a block, or what lies between blocks."""

    operators: tuple[str, ...]
    run: int | None
    """Index of the run of repeats that it belongs to; None outside runs."""
    occurrence: int
    recompute: str
    """``none``, ``selective`` (``schedule.rerun_operators`` run again) or ``full``; outside runs ``none``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossDecision:
    """The loss that the plan trains on."""

    kind: str
    """``mean``, ``sum`` or ``cross-entropy``."""
    output: str
    """ONNX name of the graph output that it reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineDecision:
    """How the model is cut in chunks, and in which order the stages work on them."""

    chunks: tuple[int, ...]
    """Index of the first operator of every chunk (virtual stage), in model order."""
    schedule: PipelineSchedule
    """Its ranks are the stages."""
    scatter_axes: tuple[int, ...] = ()
    """Mesh axes along which ranks that hold the same share out what they send to another stage: each sends a part,
    and the receivers gather (Narayanan et al., SC'21, section 4.1, "scatter/gather")."""

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a chunk."""
        return self.schedule.rank_and_chunk(chunk)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """A whole plan as the applier sees it."""

    mode: str
    """``train`` or ``infer``."""
    precision: str
    optimizer: str
    """``adamw`` or ``sgd``; empty in inference."""
    optimizer_states: str = "fp32"
    """Element type of AdamW's moments: ``fp32`` (float64 at fp64) or ``bf16``."""
    loss: LossDecision | None
    microbatches: int
    axes: tuple[AxisDecision, ...]
    order: tuple[int, ...] = ()
    """Axes as they lie on the devices, outermost first; empty: as listed."""
    operators: tuple[OperatorDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    redistributions: tuple[RedistributionDecision, ...]
    buckets: tuple[BucketDecision, ...]
    regions: tuple[Region, ...]
    """Partition of ``operators``, in order."""
    pipeline: PipelineDecision | None = None
    """None: one stage, which works on one microbatch after the other. ``axes`` are those of one stage; every stage has
    a mesh of that shape, and ranks count stage by stage."""

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline."""
        return 1 if self.pipeline is None else self.pipeline.schedule.num_stages

    @property
    def chunks(self) -> tuple[tuple[int, tuple[OperatorDecision, ...]], ...]:
        """Stage and operators, transfers too, of every chunk of the pipeline; without one all are one, of stage 0."""
        if self.pipeline is None:
            return ((0, self.operators),)
        spans = pairwise((*self.pipeline.chunks, len(self.operators)))
        return tuple(
            (self.pipeline.stage_of(chunk), self.operators[begin:end]) for chunk, (begin, end) in enumerate(spans)
        )

    @property
    def num_ranks(self) -> int:
        """Ranks of all stages."""
        return self.num_stages * math.prod(self.mesh_shape)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the axes (of one stage)."""
        return tuple(axis.size for axis in self.axes)

    def redistribution_of(self) -> Mapping[tuple[str, Placements, Placements | None], int]:
        """Index into ``redistributions`` by (tensor, destination, gradient)."""
        return {(r.tensor, r.to, r.gradient): index for index, r in enumerate(self.redistributions)}
