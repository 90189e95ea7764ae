"""What devices hold beside a plan, by communication library; docs/decisions/memory-reserve.md tells the sources."""

from __future__ import annotations

from collections.abc import Mapping

from tap_planner.cluster.catalogue import CatalogueEntry
from tap_planner.cluster.types import Device

USUAL_COLLECTIVE_BUFFERS_BYTES: Mapping[str, int] = {"nccl": 688 << 20, "rccl": 666 << 20, "gloo": 0}
"""Buffers of one communicator. nccl: measured on A100 over NVLink for groups of more than two (NVIDIA/nccl issue 964);
24 channels of three receiving buffers of 9.2 MiB make 662 MiB. rccl: 0.65 GiB, measured for each communicator after the
first (Lumi-supercomputer/LUMI-AI-Guide issue 111). gloo runs on the host."""
CONTEXT_BYTES = 512 << 20
"""The driver's context with the kernels in use: about 300 MB since CUDA 11.7 loads kernels when they are first needed
(pytorch/pytorch issue 107667), about 0.35 GiB with ROCm (of the 1 GiB that the first communicator above adds)."""
RESERVED_SHARE = 32
"""One part in so many of the memory: of 80 GiB the driver offers 79.18, and of 77 GiB in use the caching allocator left
1.83 without an owner (vllm-project/compressed-tensors pull request 587); together 3.3 %."""


def is_catalogued(device: Device, known: CatalogueEntry | None) -> bool:
    """Whether a device has the memory of the catalogue: what others hold back is for their description to say.

    Args:
        device: the device.
        known: its catalogue entry, or that which it is described to be like.
    """
    return known is not None and device.memory_bytes == known.device.memory_bytes


def usual_reserve(library: str, memory_bytes: int) -> int:
    """Bytes of a device that plans may not use, where nothing is said; CPUs (gloo) hold nothing back.

    Args:
        library: ``nccl``, ``rccl`` or ``gloo``.
        memory_bytes: all memory of the device.
    """
    return 0 if library == "gloo" else CONTEXT_BYTES + memory_bytes // RESERVED_SHARE
