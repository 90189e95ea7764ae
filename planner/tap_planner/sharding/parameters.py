"""Placements of stored parameters and of the tensors that read them."""

from __future__ import annotations

from tap_planner.graph import ParameterRead
from tap_planner.sharding.placement import Placement, Placements, shard


def stored_placements(read: ParameterRead, placements: Placements) -> Placements:
    """Placements of a read tensor in the dims of the stored parameter."""
    return tuple(shard(_stored_dim(read, p.dim), p.blocks) if p.is_shard else p for p in placements)


def _stored_dim(read: ParameterRead, dim: int) -> int:
    stored = read.dims[dim]
    assert stored is not None, "a dim of size 1 cannot be split"
    return stored


def read_placements(read: ParameterRead, placements: Placements) -> Placements | None:
    """Placements of a stored parameter in the dims of a read; None where the read drops the dim."""
    result: list[Placement] = []
    for p in placements:
        if p.is_shard:
            if p.dim not in read.dims:
                return None
            p = shard(read.dims.index(p.dim), p.blocks)
        result.append(p)
    return tuple(result)


def data_axes(placement: Placements, gradient: Placements) -> tuple[int, ...]:
    """Axes on which a parameter is R and its gradient P: over them gradients are reduced, and ZeRO shards."""
    return tuple(
        axis
        for axis, (stored, made) in enumerate(zip(placement, gradient, strict=True))
        if stored.is_replicate and made.is_partial
    )
