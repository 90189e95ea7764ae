"""Processes that measure together: what they agree on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from tap_planner.apply.clock import now_ns, synchronise
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.errors import ApplyError


class Team:
    """The processes of the default group, or this one alone where there is none.

    Args:
        device: where this process computes.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._joined = dist.is_available() and dist.is_initialized()
        self.size = dist.get_world_size() if self._joined else 1
        self.is_first = not self._joined or dist.get_rank() == 0

    def wait_for_all(self) -> None:
        """Until all are here, with nothing left to do on their devices."""
        self.synchronise()
        if self._joined:
            dist.barrier()

    def synchronise(self) -> None:
        """Until this process's device has done all that it was given."""
        synchronise(self.device)

    def now_ns(self) -> int:
        """This process's clock, once its device is idle."""
        return now_ns(self.device)

    def most(self, value: float) -> float:
        """The largest of all processes' values."""
        return self._reduced([value], "max")[0]

    def means(self, values: Sequence[float]) -> list[float]:
        """The means over all processes."""
        return [value / self.size for value in self._reduced(values, "sum")]

    def _reduced(self, values: Sequence[float], how: str) -> list[float]:
        if not self._joined:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        dist.all_reduce(tensor, dist.ReduceOp.MAX if how == "max" else dist.ReduceOp.SUM)
        return tensor.tolist()


def alone(kind: str) -> Team:
    """This process (and those of its group, where it is in one) on a device.

    Args:
        kind: ``cpu`` (one thread) or ``cuda``.

    Raises:
        ApplyError: there is no GPU.
    """
    if kind == "cpu":
        torch.set_num_threads(1)
        return Team(torch.device("cpu"))
    _check_gpu()
    return Team(torch.device("cuda", torch.cuda.current_device()))


@contextmanager
def joined_team(size: int, backend: str) -> Iterator[Team]:
    """The processes of a launcher.

    Args:
        size: how many there are.
        backend: ``gloo`` (CPUs, one thread each) or ``nccl``.

    Raises:
        ApplyError: there is no GPU, or another number of processes.
    """
    if backend == "gloo":
        torch.set_num_threads(1)
    else:
        _check_gpu()
    communicator = ProcessGroupCommunicator((size,), backend)
    try:
        yield Team(communicator.device)
    finally:
        communicator.close()


def _check_gpu() -> None:
    if not torch.cuda.is_available():
        raise ApplyError(
            "the cluster's devices are GPUs, and torch finds none here",
            hint="Run tap-calibrate on a machine of the cluster, with a torch for its GPUs.",
        )
