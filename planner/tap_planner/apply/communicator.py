"""Collectives over axes of the mesh, on lists of tensors: one per rank that this process holds.

``LockstepCommunicator`` holds every rank of the mesh, ``ProcessGroupCommunicator`` one of them. Everything above works
on lists and does not know which of the two runs it.

A communicator is that of one pipeline stage, whose ranks are a mesh of their own. Ranks count stage by stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from tap_planner.program import Phase

Coordinates = tuple[int, ...]
"""Where a rank stands on the mesh, one number per axis."""

Axes = tuple[int, ...]
"""Mesh axes, ascending; a collective runs in the groups of ranks that differ only on them, row-major."""

Parts = list[Tensor]
"""One tensor per rank that this process holds."""

FromNeighbours = tuple[list[Tensor | None], list[Tensor | None]]
"""What each rank received from the previous and from the next rank of its group; None where there is none."""


Bundle = tuple[Tensor, ...]
"""Tensors that go together."""


Each = TypeVar("Each")
"""What a rank has to say."""


class Form(NamedTuple):
    """What a tensor is."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Communicator(Protocol):
    """The collectives that a plan may ask for, and what goes between pipeline stages."""

    @property
    def stage(self) -> int:
        """The pipeline stage that the ranks belong to."""
        ...

    @property
    def stages(self) -> Sequence[Communicator]:
        """The communicators of all stages of which this process holds ranks."""
        ...

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        ...

    @property
    def ranks(self) -> tuple[Coordinates, ...]:
        """Coordinates of the ranks of the stage that this process holds."""
        ...

    @property
    def device(self) -> torch.device:
        """Where the tensors of these ranks live."""
        ...

    def all_reduce(self, parts: Sequence[Tensor], axes: Axes, op: str = "sum") -> Parts:
        """Elementwise ``sum`` or ``max`` over each group."""
        ...

    def all_gather(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """The group's equal-sized parts, stacked along a new dim 0 in group order."""
        ...

    def reduce_scatter(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """The sum over the group of slot i of dim 0, on the i-th rank of the group."""
        ...

    def all_to_all(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """Slot i of dim 0 goes to the i-th rank of the group; slot j of the result came from the j-th."""
        ...

    def halo_exchange(self, to_previous: Sequence[Tensor], to_next: Sequence[Tensor], axes: Axes) -> FromNeighbours:
        """Each rank sends a tensor to its previous and one to its next neighbour in the group, which is no ring.

        All ranks of a group bring tensors of the same two shapes, the outer ones too; empty ones are not sent.
        """
        ...

    def ring_exchange(self, parts: Sequence[Bundle], axes: Axes) -> list[Bundle]:
        """One step round the ring: each rank sends its tensors to the next of its group, the last to the first, and has
        those of the previous one instead. All ranks of a group bring tensors of the same shapes, all of one type.
        """
        ...

    def send(self, parts: Sequence[Tensor], stage: int) -> None:
        """Each rank sends a tensor to the rank of another stage at the same coordinates, and does not wait."""
        ...

    def receive(self, forms: Sequence[Form], stage: int) -> Parts:
        """What the ranks of another stage at the same coordinates sent, in the order in which they sent it.

        Args:
            forms: of the tensors, per rank.
            stage: who sent them.
        """
        ...

    def may_receive(self, stage: int) -> bool:
        """Whether ``receive`` has something, or waits until it has: False where the other stage runs in this process
        and has sent nothing more yet."""
        ...

    def finish_sends(self) -> None:
        """Wait until all that was sent has been received."""
        ...

    def collect(self, values: Sequence[Each]) -> list[Each] | None:
        """What all ranks of all stages have to say, in rank order, on the process that holds rank 0; None elsewhere.

        For comparing and reporting only; it belongs to no plan and is never counted.

        Args:
            values: per rank that this process holds, of all stages; they can be sent to other processes.
        """
        ...


def all_coordinates(mesh_shape: Sequence[int]) -> tuple[Coordinates, ...]:
    """Coordinates of all ranks, row-major."""
    return tuple(itertools.product(*(range(size) for size in mesh_shape)))


def group_size(mesh_shape: Sequence[int], axes: Axes) -> int:
    """Number of ranks in a group over ``axes``."""
    size = 1
    for axis in axes:
        size *= mesh_shape[axis]
    return size


def group_index(mesh_shape: Sequence[int], axes: Axes, coordinates: Coordinates) -> int:
    """Position of a rank in its group over ``axes``."""
    index = 0
    for axis in axes:
        index = index * mesh_shape[axis] + coordinates[axis]
    return index


def groups(mesh_shape: Sequence[int], axes: Axes) -> list[list[int]]:
    """Rank numbers of every group over ``axes``, each in group order."""
    found: dict[Coordinates, list[int]] = {}
    for rank, coordinates in enumerate(all_coordinates(mesh_shape)):
        key = tuple(-1 if axis in axes else c for axis, c in enumerate(coordinates))
        found.setdefault(key, []).append(rank)
    return list(found.values())


@dataclass(frozen=True, slots=True)
class Issued:
    """A collective as a rank issued it."""

    phase: Phase
    kind: str
    axes: Axes
    elements: int
    """Logical payload, definitions.md "Comparing execution with the plan"."""
    dtype: str


class RecordingCommunicator:
    """Passes collectives on and keeps, per rank, the sequence of those issued.

    Args:
        inner: who runs the collectives.
    """

    def __init__(self, inner: Communicator) -> None:
        self.inner = inner
        self.phase = Phase.FORWARD
        """Phase that the next collectives belong to; the executor sets it."""
        self.issued: list[list[Issued]] = [[] for _ in inner.ranks]
        """Per rank of this process."""

    @property
    def stage(self) -> int:
        """See ``Communicator.stage``."""
        return self.inner.stage

    @property
    def stages(self) -> Sequence[Communicator]:
        """See ``Communicator.stages``; what goes through those is not kept."""
        return self.inner.stages

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self.inner.mesh_shape

    @property
    def ranks(self) -> tuple[Coordinates, ...]:
        """Coordinates of the ranks held by this process."""
        return self.inner.ranks

    @property
    def device(self) -> torch.device:
        """Where the tensors of these ranks live."""
        return self.inner.device

    def all_reduce(self, parts: Sequence[Tensor], axes: Axes, op: str = "sum") -> Parts:
        """See ``Communicator.all_reduce``."""
        self._record("all_reduce", axes, parts, 1)
        return self.inner.all_reduce(parts, axes, op)

    def all_gather(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_gather``."""
        self._record("all_gather", axes, parts, group_size(self.mesh_shape, axes))
        return self.inner.all_gather(parts, axes)

    def reduce_scatter(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.reduce_scatter``."""
        self._record("reduce_scatter", axes, parts, 1)
        return self.inner.reduce_scatter(parts, axes)

    def all_to_all(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_to_all``."""
        self._record("all_to_all", axes, parts, 1)
        return self.inner.all_to_all(parts, axes)

    def halo_exchange(self, to_previous: Sequence[Tensor], to_next: Sequence[Tensor], axes: Axes) -> FromNeighbours:
        """See ``Communicator.halo_exchange``."""
        sides = list(zip(to_previous, to_next, strict=True))
        if group_size(self.mesh_shape, axes) > 2:
            counts = [before.numel() + after.numel() for before, after in sides]
        else:
            counts = [max(before.numel(), after.numel()) for before, after in sides]
        self._record_counts("halo_exchange", axes, to_previous, counts)
        return self.inner.halo_exchange(to_previous, to_next, axes)

    def ring_exchange(self, parts: Sequence[Bundle], axes: Axes) -> list[Bundle]:
        """See ``Communicator.ring_exchange``."""
        counts = [sum(part.numel() for part in bundle) for bundle in parts]
        self._record_counts("ring_exchange", axes, [bundle[0] for bundle in parts], counts)
        return self.inner.ring_exchange(parts, axes)

    def send(self, parts: Sequence[Tensor], stage: int) -> None:
        """See ``Communicator.send``; not kept by itself (``record``)."""
        self.inner.send(parts, stage)

    def receive(self, forms: Sequence[Form], stage: int) -> Parts:
        """See ``Communicator.receive``."""
        return self.inner.receive(forms, stage)

    def may_receive(self, stage: int) -> bool:
        """See ``Communicator.may_receive``."""
        return self.inner.may_receive(stage)

    def finish_sends(self) -> None:
        """See ``Communicator.finish_sends``."""
        self.inner.finish_sends()

    def collect(self, values: Sequence[Each]) -> list[Each] | None:
        """See ``Communicator.collect``."""
        return self.inner.collect(values)

    def record(self, kind: str, parts: Sequence[Tensor]) -> None:
        """Keep a collective along the pipeline, which is made of sends."""
        self._record(kind, (), parts, 1)

    def _record(self, kind: str, axes: Axes, parts: Sequence[Tensor], factor: int) -> None:
        self._record_counts(kind, axes, parts, [part.numel() * factor for part in parts])

    def _record_counts(self, kind: str, axes: Axes, parts: Sequence[Tensor], counts: Sequence[int]) -> None:
        for sequence, part, count in zip(self.issued, parts, counts, strict=True):
            dtype = str(part.dtype).removeprefix("torch.")
            sequence.append(Issued(self.phase, kind, axes, count, dtype))
