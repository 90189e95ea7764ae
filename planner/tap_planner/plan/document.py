"""The plan document: ``plan.json`` as typed values.

Decisions are stored once per block and variant. A **block** is a subgraph that occurs once or several times; its id is
the digest of its signature (operator types, wiring, shapes). Occurrences with different decisions are **variants**.
The operators, tensors and parameters of a block carry the names of the variant's first occurrence; ``repeats`` says
what they are called in every occurrence.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from tap_planner.plan.certificate import Certificate, Claim
from tap_planner.plan.decisions import (
    AxisDecision,
    OperatorDecision,
    ParameterDecision,
    RedistributionDecision,
)
from tap_planner.plan.options import PlanOptions
from tap_planner.plan.placement import PlacementSection
from tap_planner.sharding import SENDING_KINDS, sent_bytes

SCHEMA_URI = "https://tap-planner.invalid/schema/plan-1.json"
FORMAT_MAJOR = 1
FORMAT_VERSION = "1.0"
KIND = "tap.plan"

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "workspace")
"""Kinds of a device's memory in training, besides ``unsharded`` where ZeRO makes whole copies for a time; in inference
there are ``parameters``, ``caches``, ``inputs``, ``outputs``, and ``workspace`` where it is more than nothing."""
PHASES = ("forward", "recompute", "backward", "gradient", "optimizer")

BlockKey = tuple[str, int]
"""Block id and variant."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """The program that wrote the plan."""

    name: str = "tap-planner"
    version: str
    ortools: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """The model that was planned."""

    name: str
    """Base name of the file."""
    file_sha256: str
    graph_digest: str
    """Digest of the bound graph without weights."""
    dims: Mapping[str, int]
    """How symbolic dims were bound."""
    batch: int
    """Global batch of one step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleDevices:
    """Devices of a mesh that have nothing to do: those at coordinates ``first`` to ``end`` - 1 of an axis."""

    axis: str
    first: int
    """1: nothing is split along the axis, so that all devices do what the first does."""
    end: int
    """Size of the axis."""

    @property
    def reason(self) -> str:
        """Why."""
        if self.first == 1:
            return f"nothing is split along {self.axis}"
        return f"nothing has more than {self.first} parts along {self.axis}"


@dataclass(frozen=True, slots=True, kw_only=True)
class IdlePlaces:
    """Devices of the cluster outside the mesh: all places from ``first`` to ``last`` in every coordinate."""

    first: tuple[int, ...]
    """Outermost level first, (node, device)."""
    last: tuple[int, ...]
    """Included."""

    @property
    def num_devices(self) -> int:
        """Places in the box."""
        return math.prod(last - first + 1 for first, last in zip(self.first, self.last, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshSection:
    """The devices as a grid."""

    axes: tuple[AxisDecision, ...]
    """In the order in which they split what is split over several of them."""
    order: tuple[int, ...] = ()
    """Axes as they lie on the devices, outermost first; empty: in the same order."""
    ranks: tuple[tuple[int, ...], ...]
    """Where each rank (row-major over the axes) lies in the cluster: outermost level first, (node, device)."""
    idle_devices: tuple[IdlePlaces, ...] = ()
    """Devices of the cluster that the mesh leaves out."""

    @property
    def lying(self) -> tuple[AxisDecision, ...]:
        """The axes as they lie on the devices, outermost first."""
        return tuple(self.axes[axis] for axis in self.order) if self.order else self.axes

    @property
    def num_left_out(self) -> int:
        """Devices of the cluster outside the mesh."""
        return sum(places.num_devices for places in self.idle_devices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The operators from ``first`` to ``last``, without transfers: a pipeline stage, or one of several chunks of it."""

    first: str
    last: str
    stage: int = 0
    """The stage that holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSection:
    """Stages, schedule and microbatches."""

    stages: tuple[Stage, ...]
    """In model order; none for a graph without operators."""
    schedule: str = "none"
    """One of ``SCHEDULES``, or what ``order`` is called; ``none`` where there is one stage."""
    microbatches: int = 1
    order: tuple[str, ...] = ()
    """What stages do in which order, line by line (``schedule.parse_order``), where ``SCHEDULES`` has it not."""
    scatter: tuple[str, ...] = ()
    """Names of the axes along which transfers are shared out, see ``PipelineDecision.scatter_axes``."""

    @property
    def num_stages(self) -> int:
        """Stages, of whatever number of chunks."""
        return 1 + max((stage.stage for stage in self.stages), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockEntry:
    """The operators of one variant of a block."""

    id: str
    variant: int
    operators: tuple[OperatorDecision, ...]

    @property
    def key(self) -> BlockKey:
        """Block id and variant."""
        return self.id, self.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """A parameter of a block; or, with ``block`` None, one that several occurrences read, written out in full."""

    block: str | None
    variant: int
    tensors: tuple[str, ...]
    """Tensors that read the parameter, in order of use (usually the parameter's own name)."""
    decision: ParameterDecision
    """With ``bucket`` None."""
    buckets: tuple[int | None, ...]
    """Bucket in each occurrence of the variant, in the order of ``repeats``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RepeatEntry:
    """Consecutive occurrences of one variant of a block with the same recompute setting."""

    block: str
    variant: int
    run: int | None
    """Number of the run of repeats; None outside runs."""
    count: int
    recompute: str
    names: Mapping[str, tuple[str, ...]]
    """For every operator, tensor and parameter name of the block its name in each occurrence."""
    labels: Mapping[str, tuple[str, ...]]
    """For operators (by id) whose display name is not the block's: the display name in each occurrence."""

    @property
    def key(self) -> BlockKey:
        """Block id and variant."""
        return self.block, self.variant


@dataclass(frozen=True, slots=True, kw_only=True)
class RedistributionEntry:
    """A redistribution of a block; or, with ``block`` None, some whose consumers span several occurrences."""

    block: str | None
    variant: int
    decision: RedistributionDecision
    count: int = 1
    """How many are alike, with ``block`` None."""
    names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """With ``count`` > 1: what tensor and consumers are called in each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketEntry:
    """Buckets ``id``, ``id + step``, ..., which are alike; parameters name the bucket they are in."""

    id: int
    count: int
    step: int
    axes: tuple[int, ...]
    dtype: str
    zero_level: int
    zero_axes: tuple[int, ...]
    elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveEntry:
    """A collective of the step, counted on the rank at coordinate 0 of every axis."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    algorithm: str
    elements: int
    bytes: int
    """Of one call."""
    count: int
    """Calls per step."""
    time_ns: int = 0
    """Predicted time of one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What the plan is expected to cost."""

    step_ns: int
    compute_ns: int
    communication_ns: int
    hidden_ns: int
    """Communication that runs behind compute."""
    memory_bytes: Mapping[str, int]
    """Per device, by kind (``MEMORY_KINDS``); with pipeline stages, of the one that has the least room left."""
    stage_memory_bytes: tuple[int, ...] = ()
    """Per pipeline stage, all memory of one of its devices; empty without stages."""
    tokens: int | None = None
    """New tokens of a step over the whole batch, in inference with caches; None else."""

    @property
    def total_memory_bytes(self) -> int:
        """Memory per device."""
        return sum(self.memory_bytes.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Digests:
    """SHA-256 in hex."""

    decisions: str
    """Over everything that the applier obeys."""
    plan: str
    """Over the canonical text without the digests."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedDecisions:
    """The parts of a document that ``fold_decisions`` makes."""

    parameters: tuple[ParameterEntry, ...]
    blocks: tuple[BlockEntry, ...]
    repeats: tuple[RepeatEntry, ...]
    redistributions: tuple[RedistributionEntry, ...]
    buckets: tuple[BucketEntry, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDocument:
    """A whole plan."""

    format_version: str = FORMAT_VERSION
    producer: Producer
    model: ModelInput
    cluster: Mapping[str, object]
    """``cluster_to_json``: the complete device record and links."""
    options: PlanOptions
    """As given, except that the batch and the loss are the bound ones."""
    mesh: MeshSection
    pipeline: PipelineSection
    folded: FoldedDecisions
    collectives: tuple[CollectiveEntry, ...]
    predicted: Predicted
    certificate: Certificate
    idle: tuple[IdleDevices, ...] = ()
    placement: PlacementSection | None = None
    """Of a device placement; None where operators are split."""
    optimizer_states: str = "fp32"
    """Element type of AdamW's moments."""
    digests: Digests | None = None
    """None until ``with_digests`` has computed them."""

    @property
    def claims(self) -> tuple[Claim, ...]:
        """What is proven, what the objective names first."""
        return self.certificate.claims(self.options.objective)

    @property
    def sent_bytes(self) -> int:
        """What the rank at coordinate 0 sends in a step, each collective of the list at the least that it can do with;
        buckets with their padding, collectives that are not known with all of their payload."""
        sizes = {axis.name: axis.size for axis in self.mesh.axes}
        total = 0
        for entry in self.collectives:
            kind = entry.kind if entry.kind in SENDING_KINDS else "send_recv"
            members = math.prod(sizes[axis] for axis in entry.axes) if entry.axes else 2  # from stage to stage
            total += entry.count * sent_bytes(kind, members, entry.bytes)
        return total

    @property
    def num_idle(self) -> int:
        """Devices that have nothing to do: those outside the mesh, and those of it that repeat others' work."""
        used = {entry.axis: entry.first for entry in self.idle}
        busy = self.pipeline.num_stages * math.prod(used.get(axis.name, axis.size) for axis in self.mesh.axes)
        return len(self.mesh.ranks) - busy + self.mesh.num_left_out

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of the mesh axes, outermost first."""
        return tuple(axis.name for axis in self.mesh.axes)


def row_major_ranks(shape: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Places of the ranks of a cluster in row-major order.

    Args:
        shape: sizes of the topology's levels, outermost first.
    """
    places: list[tuple[int, ...]] = [()]
    for size in shape:
        places = [(*place, index) for place in places for index in range(size)]
    return tuple(places)
