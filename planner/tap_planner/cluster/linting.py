"""Findings on a cluster that is readable but implausible: the slips that public tables really have."""

from __future__ import annotations

from tap_planner.cluster.catalogue import catalogue_entry, device_names, find_entry
from tap_planner.cluster.types import Cluster, Device

_GB = 10**9


def lint(cluster: Cluster) -> tuple[str, ...]:
    """What looks wrong, one line a finding; empty when nothing does."""
    return (*_lint_links(cluster), *_lint_device(cluster.device))


def _lint_links(cluster: Cluster) -> list[str]:
    findings: list[str] = []
    inner = cluster.levels[0]
    for level in cluster.levels[1:]:
        if level.size > 1 and inner.size > 1 and level.bandwidth_bytes_per_s > inner.bandwidth_bytes_per_s:
            findings.append(
                f"{level.name}: one NIC ({_gb(level.bandwidth_bytes_per_s)}) is faster than a device's link inside the "
                f"node ({_gb(inner.bandwidth_bytes_per_s)}); is Gbit/s meant, or is it the sum over the NICs?"
            )
        if level.size > 1 and level.latency_ns < inner.latency_ns:
            findings.append(f"{level.name}: latency {level.latency_ns} ns is below that of {inner.name}")
    if inner.bandwidth_bytes_per_s > cluster.device.memory_bandwidth_bytes_per_s:
        findings.append(f"{inner.name}: the links ({_gb(inner.bandwidth_bytes_per_s)}) are faster than the memory")
    return findings


def _gb(bytes_per_s: int) -> str:
    return f"{bytes_per_s / _GB:g} GB/s"


def _known(name: str) -> Device | None:
    """The catalogue entry of that name, or the only one that begins with it (``h100-sxm5``)."""
    entry = find_entry(name)
    if entry is not None:
        return entry.device
    near = [known for known in device_names() if known.startswith(name.lower() + "-")]
    return catalogue_entry(near[0]).device if len(near) == 1 else None


def _lint_device(device: Device) -> list[str]:
    findings: list[str] = []
    known = _known(device.name)
    if known is None:
        return findings
    for dtype, peak in device.peak_flops.items():
        usual = known.peak_flops.get(dtype)
        if usual is not None and peak * 10 >= usual * 19:
            findings.append(
                f"{device.name}: {dtype} {peak / 10**12:g} TFLOP/s is {peak / usual:.3g} x the dense figure "
                f"{usual / 10**12:g}; with sparsity?"
            )
    if device.memory_bandwidth_bytes_per_s > 2 * known.memory_bandwidth_bytes_per_s:
        findings.append(
            f"{device.name}: memory bandwidth {_gb(device.memory_bandwidth_bytes_per_s)} is more than twice the "
            f"catalogue's {_gb(known.memory_bandwidth_bytes_per_s)}"
        )
    if device.memory_bytes > 2 * known.memory_bytes:
        findings.append(f"{device.name}: {device.memory_bytes} bytes of memory, the catalogue has {known.memory_bytes}")
    return findings
