"""All ranks of a mesh in one process: collectives are sums and copies, in a fixed order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tap_planner.apply.communicator import Axes, Bundle, Coordinates, FromNeighbours, Parts, all_coordinates, groups


class LockstepCommunicator:
    """Holds every rank of the mesh; the same inputs give the same bits.

    Args:
        mesh_shape: sizes of the axes.
        device: where the tensors live.
    """

    def __init__(self, mesh_shape: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._ranks = all_coordinates(mesh_shape)
        self._device = torch.device(device)

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

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """See ``Communicator.collect``."""
        return [part.detach().cpu() for part in parts]

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
