"""The time at which a device has done what it was given."""

from __future__ import annotations

import time

import torch


def synchronise(device: torch.device) -> None:
    """Wait until a device has done all that this process gave it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def now_ns(device: torch.device) -> int:
    """This process's clock, once a device is idle."""
    synchronise(device)
    return time.perf_counter_ns()
