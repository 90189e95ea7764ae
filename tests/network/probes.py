"""What ranks are asked to do: run one collective through the communicator of tap-apply."""

from __future__ import annotations

import time
from functools import cache

import torch
import torch.distributed as dist

from tap_planner.apply import ProcessGroupCommunicator
from tap_planner.apply.communicator import group_size

ELEMENT_BYTES = 4


@cache
def communicator(mesh_shape: tuple[int, ...]) -> ProcessGroupCommunicator:
    """This rank's communicator on a mesh."""
    return ProcessGroupCommunicator(mesh_shape, "gloo")


def run_collective(mesh_shape: tuple[int, ...], kind: str, axes: tuple[int, ...], num_bytes: int) -> float:
    """Run a collective; how long it took, in seconds.

    Args:
        mesh_shape: sizes of the axes.
        kind: name of the collective.
        axes: those of its groups.
        num_bytes: logical payload, see ``CollectiveModel``; an even number of elements for each rank of a group.
    """
    ranks, size, elements = communicator(mesh_shape), group_size(mesh_shape, axes), num_bytes // ELEMENT_BYTES
    started = time.perf_counter()
    match kind:
        case "all_reduce":
            ranks.all_reduce([torch.ones(elements)], axes)
        case "all_gather":
            ranks.all_gather([torch.ones(elements // size)], axes)
        case "reduce_scatter":
            ranks.reduce_scatter([torch.ones(size, elements // size)], axes)
        case "all_to_all":
            ranks.all_to_all([torch.ones(size, elements // size)], axes)
        case "halo_exchange":
            rows = elements if size == 2 else elements // 2
            exchange_halos(mesh_shape, axes, rows, rows)
        case "ring_exchange":
            ranks.ring_exchange([(torch.ones(elements // 2), torch.ones(elements // 2))], axes)
        case _:
            raise ValueError(f"the communicator has no {kind}")
    return time.perf_counter() - started


def exchange_halos(mesh_shape: tuple[int, ...], axes: tuple[int, ...], to_previous: int, to_next: int) -> None:
    """Exchange halos of so many elements."""
    communicator(mesh_shape).halo_exchange([torch.ones(to_previous)], [torch.ones(to_next)], axes)


def broadcast(num_bytes: int) -> None:
    """Broadcast from rank 0 to all, by gloo itself: the communicator has no broadcast."""
    dist.broadcast(torch.ones(num_bytes // ELEMENT_BYTES), 0)
