"""One rank per process, over torch.distributed (gloo on CPUs, nccl on GPUs)."""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
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
    group_index,
    group_size,
    groups,
)
from tap_planner.errors import ApplyError

DEFAULT_TIMEOUT_S = 600
"""A collective that takes longer means that a rank is lost."""
_PATIENCE = timedelta(days=365)
"""How long idle processes wait for the others; they notice at once when one of those dies."""


_TAGS = 1 << 20
"""Of messages between two ranks; far more than are ever under way."""


class _Sending(NamedTuple):
    """A message under way, with what it is read from."""

    work: dist.Work
    tensor: Tensor


class ProcessGroupCommunicator:
    """Holds one rank. The default process group is initialised from the launcher's environment if nobody did.

    One subgroup per stage and set of axes is made, in the same order in all processes. What goes to later stages and
    what goes back has a group each: nccl runs what two ranks exchange in a group one after the other, and a send waits
    for its receive there.

    Args:
        mesh_shape: sizes of the axes (of one stage); their product by the stages is the world size, or less where
            ``members`` are given.
        backend: ``gloo`` or ``nccl``; None: nccl where there are GPUs.
        timeout_s: how long a collective may take.
        members: the process that holds each rank, as the launcher numbers them; all others are idle. None: every
            process, in order. Where they do not ascend, the group that is joined numbers them anew: torch sorts the
            members of its groups, and what is gathered must come in the order of the plan's ranks. In a group that is
            there already ranks lie in the order of its numbers.
        num_stages: stages of the pipeline.

    Raises:
        ApplyError: the world size does not fit the mesh.
    """

    def __init__(
        self,
        mesh_shape: Sequence[int],
        backend: str | None = None,
        timeout_s: int = DEFAULT_TIMEOUT_S,
        members: Sequence[int] | None = None,
        num_stages: int = 1,
    ) -> None:
        self._mesh_shape = tuple(mesh_shape)
        self._num_stages = num_stages
        backend = backend or ("nccl" if torch.cuda.is_available() else "gloo")
        self._backend = backend
        self._device = _device_of(backend)
        self._owns_group = not dist.is_initialized()
        if self._owns_group:
            rank = _renumbered(members or (), int(os.environ.get("RANK", "-1")))
            world = int(os.environ.get("WORLD_SIZE", "-1"))
            dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s), rank=rank, world_size=world)
        world = dist.get_world_size()
        self._members = tuple(range(world) if members is None else sorted(members))
        of_stage = math.prod(mesh_shape)
        if len(self._members) != of_stage * num_stages or max(self._members) >= world:
            self.close()
            stages = f"{num_stages} stages of " if num_stages > 1 else ""
            raise ApplyError(
                f"the plan's {stages}mesh {'x'.join(map(str, mesh_shape))} needs {of_stage * num_stages} ranks, "
                f"got {world}",
                hint=f"start tap-apply with {of_stage * num_stages} processes",
            )
        process = dist.get_rank()
        number = self._members.index(process) if process in self._members else -1
        self._is_idle = number < 0
        self._stage, self._rank = divmod(max(number, 0), of_stage)
        self._coordinates = all_coordinates(mesh_shape)[self._rank]
        self._groups = self._make_groups()
        self._make_pipeline()
        everyone = dist.new_group(backend="gloo", timeout=_PATIENCE) if world > len(self._members) else None
        self._everyone = everyone if isinstance(everyone, dist.ProcessGroup) else None

    def _process(self, stage: int, rank: int) -> int:
        """The process that holds a rank of a stage."""
        return self._members[stage * math.prod(self._mesh_shape) + rank]

    def _make_groups(self) -> dict[Axes, dist.ProcessGroup]:
        found: dict[Axes, dist.ProcessGroup] = {}
        axes_range = range(len(self._mesh_shape))
        for stage in range(self._num_stages):
            for count in range(1, len(self._mesh_shape) + 1):
                for axes in itertools.combinations(axes_range, count):
                    for members in groups(self._mesh_shape, axes):
                        group = _new_group([self._process(stage, rank) for rank in members])
                        if group is not None:
                            found[axes] = group
        return found

    def _make_pipeline(self) -> None:
        """What several stages need: groups of all ranks, one for each direction."""
        everything = self._groups.get(tuple(range(len(self._mesh_shape))))
        made = [_new_group(self._members) for _ in range(2 if self._num_stages > 1 else 0)]
        self._to_later, self._to_earlier = made or (everything, everything)
        self._all = made[0] if made else everything
        self._under_way: list[_Sending] = []
        self._num_sent = Counter[int]()
        """Messages by the stage that they were sent to, and by the one that they came from."""
        self._num_received = Counter[int]()

    @property
    def is_idle(self) -> bool:
        """Whether this process holds no rank of the mesh."""
        return self._is_idle

    def wait_for_all(self) -> None:
        """Where some processes are idle, wait until all processes have come here."""
        if self._everyone is not None:
            dist.barrier(group=self._everyone)

    @property
    def stage(self) -> int:
        """The stage of this process."""
        return self._stage

    @property
    def stages(self) -> tuple[ProcessGroupCommunicator, ...]:
        """This one."""
        return (self,)

    @property
    def mesh_shape(self) -> tuple[int, ...]:
        """Sizes of the mesh axes."""
        return self._mesh_shape

    @property
    def ranks(self) -> tuple[Coordinates, ...]:
        """The coordinates of this process; none where it is idle."""
        return () if self.is_idle else (self._coordinates,)

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
        """See ``Communicator.reduce_scatter``.

        Over gloo it is an all-reduce of which a part is kept: gloo's own moves as many bytes, in several calls whose
        latencies add up (3 times as long for small tensors on 4 processes).
        """
        if self._backend == "gloo":
            (summed,) = self.all_reduce(parts, axes)
            return [summed[group_index(self._mesh_shape, axes, self._coordinates)].clone()]
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

    def halo_exchange(self, to_previous: Sequence[Tensor], to_next: Sequence[Tensor], axes: Axes) -> FromNeighbours:
        """See ``Communicator.halo_exchange``."""
        (group,) = (members for members in groups(self._mesh_shape, axes) if self._rank in members)
        position = group.index(self._rank)
        to_back, to_front = to_previous[0].contiguous(), to_next[0].contiguous()
        operations: list[dist.P2POp] = []

        def swap(peer: int, sent: Tensor, like: Tensor) -> Tensor | None:
            """Sends to a neighbour, and receives what is like what the other neighbour is sent."""
            if not 0 <= peer < len(group):
                return None
            received = torch.empty_like(like)
            for operation, tensor in ((dist.isend, sent), (dist.irecv, received)):
                if tensor.numel():
                    operations.append(
                        dist.P2POp(
                            operation, _wire(tensor), self._process(self._stage, group[peer]), self._groups[axes]
                        )
                    )
            return received

        from_back = swap(position - 1, to_back, to_front)
        from_front = swap(position + 1, to_front, to_back)
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        return [from_back], [from_front]

    def ring_exchange(self, parts: Sequence[Bundle], axes: Axes) -> list[Bundle]:
        """See ``Communicator.ring_exchange``."""
        (group,) = (members for members in groups(self._mesh_shape, axes) if self._rank in members)
        position, (bundle,) = group.index(self._rank), parts
        sent = torch.cat([part.reshape(-1) for part in bundle])
        received = torch.empty_like(sent)
        if sent.numel() and len(group) > 1:
            peers = (group[(position + 1) % len(group)], group[position - 1])
            operations = [
                dist.P2POp(operation, _wire(tensor), self._process(self._stage, peer), self._groups[axes])
                for operation, tensor, peer in zip((dist.isend, dist.irecv), (sent, received), peers, strict=True)
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
        pieces = received.split([part.numel() for part in bundle])
        return [tuple(piece.view(part.shape) for piece, part in zip(pieces, bundle, strict=True))]

    def send(self, parts: Sequence[Tensor], stage: int) -> None:
        """See ``Communicator.send``.

        What is sent is kept until it is received, over gloo, which does not tell, to the end of the step.
        """
        tensor = parts[0].contiguous()
        self._under_way = [sending for sending in self._under_way if not sending.work.is_completed()]
        if tensor.numel():
            tag = self._num_sent[stage] % _TAGS
            self._num_sent[stage] += 1
            group = self._to_later if stage > self._stage else self._to_earlier
            work = dist.isend(_wire(tensor), self._process(stage, self._rank), group, tag)
            assert work is not None
            self._under_way.append(_Sending(work, tensor))

    def receive(self, forms: Sequence[Form], stage: int) -> Parts:
        """See ``Communicator.receive``."""
        shape, dtype = forms[0]
        result = torch.empty(shape, dtype=dtype, device=self._device)
        if result.numel():
            tag = self._num_received[stage] % _TAGS
            self._num_received[stage] += 1
            group = self._to_later if stage < self._stage else self._to_earlier
            work = dist.irecv(_wire(result), self._process(stage, self._rank), group, tag)
            assert work is not None
            work.wait()
        return [result]

    def may_receive(self, stage: int) -> bool:
        """See ``Communicator.may_receive``."""
        return True

    def finish_sends(self) -> None:
        """See ``Communicator.finish_sends``."""
        for sending in self._under_way:
            sending.work.wait()
        self._under_way.clear()

    def collect(self, values: Sequence[Each]) -> list[Each] | None:
        """See ``Communicator.collect``."""
        is_first = self._stage == 0 and self._rank == 0
        gathered: list[Each] | None = [values[0]] * len(self._members) if is_first else None
        dist.gather_object(values[0], gathered, dst=self._members[0], group=self._all)
        return gathered

    def close(self) -> None:
        """Leave the process group if this object joined it."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()


def _renumbered(members: Sequence[int], process: int) -> int:
    """The number that a process of the launcher takes so that those with the plan's ranks ascend."""
    return sorted(members)[members.index(process)] if process in members else process


def _new_group(processes: Sequence[int]) -> dist.ProcessGroup | None:
    """A group of processes, which all call this; None on those outside."""
    group = dist.new_group(list(processes))
    return group if isinstance(group, dist.ProcessGroup) else None


def _device_of(backend: str) -> torch.device:
    if backend != "nccl":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _wire(tensor: Tensor) -> Tensor:
    """The same memory in a type that every backend moves."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor
