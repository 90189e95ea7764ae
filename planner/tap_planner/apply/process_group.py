"""One rank of a mesh per process, over torch.distributed (gloo on CPUs, nccl on GPUs)."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from tap_planner.apply.communicator import Axes, Coordinates, Parts, all_coordinates, group_size, groups
from tap_planner.errors import ApplyError

DEFAULT_TIMEOUT_S = 600
"""A collective that takes longer means that a rank is lost."""


class ProcessGroupCommunicator:
    """Holds one rank. The default process group is initialised from the launcher's environment if nobody did.

    One subgroup per set of axes is made, in the same order on all ranks.

    Args:
        mesh_shape: sizes of the axes; their product is the world size.
        backend: ``gloo`` or ``nccl``; None: nccl where there are GPUs.
        timeout_s: how long a collective may take.

    Raises:
        ApplyError: the world size does not fit the mesh.
    """

    def __init__(
        self, mesh_shape: Sequence[int], backend: str | None = None, timeout_s: int = DEFAULT_TIMEOUT_S
    ) -> None:
        self._mesh_shape = tuple(mesh_shape)
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._device = _device_of(backend)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
        world = dist.get_world_size()
        if world != math.prod(mesh_shape):
            self.close()
            raise ApplyError(
                f"the plan's mesh {'x'.join(map(str, mesh_shape))} needs {math.prod(mesh_shape)} ranks, got {world}",
                hint=f"start tap-apply with {math.prod(mesh_shape)} processes",
            )
        self._rank = dist.get_rank()
        self._coordinates = all_coordinates(mesh_shape)[self._rank]
        self._groups = self._make_groups()

    def _make_groups(self) -> dict[Axes, dist.ProcessGroup]:
        found: dict[Axes, dist.ProcessGroup] = {}
        axes_range = range(len(self._mesh_shape))
        for count in range(1, len(self._mesh_shape) + 1):
            for axes in itertools.combinations(axes_range, count):
                for members in groups(self._mesh_shape, axes):
                    group = dist.new_group(members)
                    if self._rank in members and isinstance(group, dist.ProcessGroup):
                        found[axes] = group
        return found

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self._mesh_shape

    @property
    def ranks(self) -> tuple[Coordinates, ...]:
        """The coordinates of this process."""
        return (self._coordinates,)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._device

    def all_reduce(self, parts: Sequence[Tensor], axes: Axes, op: str = "sum") -> Parts:
        """See ``Communicator.all_reduce``."""
        result = parts[0].clone(memory_format=torch.contiguous_format)
        if result.numel():
            operation = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
            dist.all_reduce(_wire(result), operation, group=self._groups[axes])
        return [result]

    def all_gather(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_gather``."""
        part = parts[0].contiguous()
        result = part.new_empty((group_size(self._mesh_shape, axes), *part.shape))
        if part.numel():
            dist.all_gather(list(_wire(result).unbind(0)), _wire(part), group=self._groups[axes])
        return [result]

    def reduce_scatter(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.reduce_scatter``."""
        part = parts[0].contiguous()
        result = part.new_empty(part.shape[1:])
        if part.numel():
            dist.reduce_scatter(result, list(part.unbind(0)), group=self._groups[axes])
        return [result]

    def all_to_all(self, parts: Sequence[Tensor], axes: Axes) -> Parts:
        """See ``Communicator.all_to_all``."""
        part = parts[0].contiguous()
        result = torch.empty_like(part)
        if part.numel():
            dist.all_to_all_single(_wire(result), _wire(part), group=self._groups[axes])
        return [result]

    def collect(self, parts: Sequence[Tensor]) -> list[Tensor] | None:
        """See ``Communicator.collect``."""
        part = parts[0].detach().cpu()
        if self._rank != 0:
            dist.gather_object(part)
            return None
        gathered = [torch.empty(0)] * dist.get_world_size()
        dist.gather_object(part, gathered)
        return gathered

    def close(self) -> None:
        """Leave the process group if this object joined it."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _device_of(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _wire(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend moves."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
