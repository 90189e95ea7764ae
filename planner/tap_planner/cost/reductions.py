"""Which collectives a trainable parameter needs in a step: gradient reductions and ZeRO gathers.

Hybrid sharding ("HSDP": Zhao et al., "PyTorch FSDP", VLDB 2023, section 3.2.2) shards over some of the data axes and
replicates over the rest: gradients are reduce-scattered over the former, and what a rank then holds is summed over the
latter once a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReductionCall:
    """A collective of a parameter; in a bucket it is part of a larger one."""

    kind: str
    axes: tuple[int, ...]
    elements: int
    """Local elements of the parameter in the logical payload of one call."""
    count: int
    """Calls per step."""


def shard_elements(local_elements: int, zero_axes: Sequence[int], mesh_shape: Sequence[int]) -> int:
    """Elements of the largest of the shards that ZeRO makes of a local part."""
    return -(-local_elements // math.prod(mesh_shape[axis] for axis in zero_axes))


def reduction_calls(
    local_elements: int,
    *,
    zero_level: int,
    data_axes: tuple[int, ...],
    zero_axes: tuple[int, ...],
    mesh_shape: Sequence[int],
    microbatches: int,
) -> tuple[ReductionCall, ...]:
    """The collectives of one parameter in a step.

    ZeRO 0 and 1 reduce gradients once a step, 2 and 3 once a microbatch; 1 and 2 gather the updated parameter, 3
    gathers it in the forward and the backward of each microbatch.

    Args:
        local_elements: of the parameter, after tensor sharding.
        zero_level: 0 to 3.
        data_axes: axes over which gradients are summed; none: no collectives.
        zero_axes: axes over which ZeRO shards, some or all of ``data_axes``; not used at level 0.
        mesh_shape: sizes of the mesh axes.
        microbatches: of a step.
    """
    if not data_axes:
        return ()

    def call(kind: str, axes: tuple[int, ...], count: int, elements: int = local_elements) -> ReductionCall:
        return ReductionCall(kind=kind, axes=axes, elements=elements, count=count)

    if zero_level == 0:
        return (call("all_reduce", data_axes, 1),)
    calls = [call("reduce_scatter", zero_axes, microbatches if zero_level >= 2 else 1)]
    rest = tuple(axis for axis in data_axes if axis not in zero_axes)
    if rest:
        calls.append(call("all_reduce", rest, 1, shard_elements(local_elements, zero_axes, mesh_shape)))
    calls.append(call("all_gather", zero_axes, 2 * microbatches if zero_level == 3 else 1))
    return tuple(calls)
