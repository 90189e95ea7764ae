"""From a whole tensor to a rank's part, and from all ranks' parts back to the whole."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Coordinates, all_coordinates
from tap_planner.sharding import Placements, local_indices


def place(whole: Tensor, placements: Placements, mesh_shape: tuple[int, ...], coordinates: Coordinates) -> Tensor:
    """A rank's part of a tensor; on a P axis coordinate 0 keeps the value and the others hold zeros."""
    if any(p.is_partial and coordinate for p, coordinate in zip(placements, coordinates, strict=True)):
        whole = torch.zeros_like(whole)
    indices = local_indices(tuple(whole.shape), placements, mesh_shape, coordinates)
    for dim, held in enumerate(indices):
        if len(held) == whole.shape[dim]:
            continue
        if len(held) == 0 or held[-1] - held[0] + 1 == len(held):
            whole = whole.narrow(dim, int(held[0]) if len(held) else 0, len(held))
        else:
            whole = whole.index_select(dim, torch.from_numpy(held).to(whole.device))
    return whole


def assemble(
    parts: Sequence[Tensor], shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...]
) -> list[np.ndarray]:
    """Whole values from the parts of all ranks of the mesh: one per replica, which should all be equal.

    Args:
        parts: one per rank, in rank order.
        shape: global shape.
        placements: what the parts are; those of P axes are summed.
        mesh_shape: sizes of the axes.
    """
    replicated = [axis for axis, placement in enumerate(placements) if placement.is_replicate]
    replicas = list(itertools.product(*(range(mesh_shape[axis]) for axis in replicated)))
    dtype = np.float64 if parts[0].is_floating_point() else parts[0].numpy().dtype
    wholes = {replica: np.zeros(shape, dtype) for replica in replicas}
    for coordinates, part in zip(all_coordinates(mesh_shape), parts, strict=True):
        whole = wholes[tuple(coordinates[axis] for axis in replicated)]
        values = part.to(torch.float64).numpy() if part.is_floating_point() else part.numpy()
        where = np.ix_(*local_indices(shape, placements, mesh_shape, coordinates)) if shape else ()
        whole[where] = whole[where] | values if dtype == np.bool_ else whole[where] + values
    return list(wholes.values())
