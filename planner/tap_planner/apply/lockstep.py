"""All ranks of all stages in one process: collectives are sums and copies, in a fixed order."""

from __future__ import annotations

import copy
import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tap_planner.apply.communicator import (
    Axes,
    Bundle,
    Coordinates,
    Each,
    Form,
    FromNeighbours,
    Parts,
    all_coordinates,
    groups,
)


class LockstepCommunicator:
    """Holds every rank of the mesh of every stage; the same inputs give the same bits.

    It is the communicator of the first stage, and has those of the others.

    Args:
        mesh_shape: sizes of the axes (of one stage).
        device: where the tensors live.
        num_stages: stages of the pipeline.
    """

    def __init__(self, mesh_shape: Sequence[int], device: torch.device | str = "cpu", num_stages: int = 1) -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._ranks = all_coordinates(mesh_shape)
        self._device = torch.device(device)
        self._stage = 0
        self._sent: defaultdict[tuple[int, int], deque[Parts]] = defaultdict(deque)
        """By the stages from which and to which."""
        self._num_stages = num_stages

    @property
    def stage(self) -> int:
        """The stage whose collectives it runs."""
        return self._stage

    @property
    def stages(self) -> tuple[LockstepCommunicator, ...]:
        """One for each stage, which send to each other."""
        return tuple(self._of_stage(stage) for stage in range(self._num_stages))

    def _of_stage(self, stage: int) -> LockstepCommunicator:
        other = copy.copy(self)
        other._stage = stage
        return other

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self._mesh_shape

    @property
    def ranks(self) -> tuple[Coordinates, ...]:
        """All coordinates, row-major."""
        return self._ranks

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self._device

    def all_reduce(self, parts: Sequence[Tensor], axes: Axes, op: str = "sum") -> Parts:
        """See ``Communicator.all_reduce``."""
        return self._in_groups(parts, axes, lambda members: [_reduced(members, op)] * len(members))

    def all_gather(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_gather``."""
        return self._in_groups(parts, axes, lambda members: [torch.stack(members)] * len(members))

    def reduce_scatter(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.reduce_scatter``."""
        return self._in_groups(parts, axes, lambda members: list(_reduced(members, "sum").unbind(0)))

    def all_to_all(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_to_all``."""
        return self._in_groups(parts, axes, lambda members: list(torch.stack(members, dim=1).unbind(0)))

    def halo_exchange(self, to_previous: Sequence[Tensor], to_next: Sequence[Tensor], axes: Axes) -> FromNeighbours:
        """See ``Communicator.halo_exchange``."""
        from_previous: list[Tensor | None] = [None] * len(to_previous)
        from_next: list[Tensor | None] = [None] * len(to_next)
        for group in groups(self._mesh_shape, axes):
            for sides in (to_previous, to_next):
                _check_shapes([sides[rank] for rank in group])
            for previous, rank in itertools.pairwise(group):
                from_previous[rank] = to_next[previous]
                from_next[previous] = to_previous[rank]
        return from_previous, from_next

    def ring_exchange(self, parts: Sequence[Bundle], axes: Axes) -> list[Bundle]:
        """See ``Communicator.ring_exchange``."""
        found = list(parts)
        for group in groups(self._mesh_shape, axes):
            for members in zip(*(parts[rank] for rank in group), strict=True):
                _check_shapes(members)
            for previous, rank in zip([group[-1], *group[:-1]], group, strict=True):
                found[rank] = parts[previous]
        return found

    def send(self, parts: Sequence[Tensor], stage: int) -> None:
        """See ``Communicator.send``."""
        self._sent[self._stage, stage].append(list(parts))

    def receive(self, forms: Sequence[Form], stage: int) -> Parts:
        """See ``Communicator.receive``."""
        parts = self._sent[stage, self._stage].popleft()
        found = [(tuple(part.shape), part.dtype) for part in parts]
        if found != list(forms):
            raise AssertionError(f"stage {stage} sent {found}, stage {self._stage} expects {list(forms)}")
        return parts

    def may_receive(self, stage: int) -> bool:
        """See ``Communicator.may_receive``."""
        return bool(self._sent[stage, self._stage])

    def finish_sends(self) -> None:
        """See ``Communicator.finish_sends``; what is sent is there at once."""

    def collect(self, values: Sequence[Each]) -> list[Each] | None:
        """See ``Communicator.collect``."""
        return list(values)

    def _in_groups(self, parts: Sequence[Tensor], axes: Axes, run: Callable[[Parts], Parts]) -> Parts:
        results: list[Tensor | None] = [None] * len(parts)
        for group in groups(self._mesh_shape, axes):
            members = [parts[rank] for rank in group]
            _check_shapes(members)
            for rank, result in zip(group, run(members), strict=True):
                results[rank] = result
        return [result for result in results if result is not None]


def _check_shapes(members: Sequence[Tensor]) -> None:
    if len({member.shape for member in members}) > 1:
        shapes = [tuple(member.shape) for member in members]
        raise AssertionError(f"ranks of one group bring different shapes: {shapes}")


def _reduced(members: Parts, op: str) -> Tensor:
    total = members[0].clone()
    for member in members[1:]:
        total = torch.maximum(total, member) if op == "max" else total + member
    return total
