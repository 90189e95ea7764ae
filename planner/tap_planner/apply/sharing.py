"""What ranks hold alike and send to another stage: each sends an equal share, the receivers put it together again."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import pad

from tap_planner.apply.communicator import Axes, Communicator, Parts, group_index, group_size
from tap_planner.sharding import Placements, local_shape

__all__ = ["gather", "scatter", "share_shape"]


def share_shape(local: tuple[int, ...], mesh_shape: Sequence[int], axes: Axes) -> tuple[int, ...]:
    """Shape of what ``scatter`` makes of a tensor of a shape."""
    return (-(-math.prod(local) // group_size(mesh_shape, axes)),) if axes else local


def scatter(communicator: Communicator, parts: Sequence[Tensor], axes: Axes) -> Parts:
    """Shares of tensors that are alike in every group over ``axes``; without axes the tensors themselves.

    Returns:
        Per rank the elements in row-major order from its place in the group on, as many for each; the last share is
        filled up with zeros.
    """
    if not axes:
        return list(parts)
    mesh_shape = communicator.mesh_shape
    found: Parts = []
    for rank, part in zip(communicator.ranks, parts, strict=True):
        (length,) = share_shape(tuple(part.shape), mesh_shape, axes)
        first = length * group_index(mesh_shape, axes, rank)
        share = part.reshape(-1)[first : first + length]
        found.append(pad(share, (0, length - share.numel())))
    return found


def gather(
    communicator: Communicator, parts: Sequence[Tensor], axes: Axes, shape: tuple[int, ...], placements: Placements
) -> Parts:
    """The tensors of which ``scatter`` made shares; without axes they are the tensors.

    Args:
        communicator: gathers the shares over ``axes``.
        parts: the shares.
        axes: over which they were shared out.
        shape: global shape of the tensor.
        placements: of its parts; replicated on ``axes``.
    """
    if not axes:
        return list(parts)
    whole = communicator.all_gather(parts, axes)
    wanted = [local_shape(shape, placements, communicator.mesh_shape, rank) for rank in communicator.ranks]
    return [
        stacked.reshape(-1)[: math.prod(local)].reshape(local) for stacked, local in zip(whole, wanted, strict=True)
    ]
