"""Findings on a cluster that is readable but implausible: the slips that public tables really have."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cluster.catalogue import catalogue_entry, device_names, find_entry
from tap_planner.cluster.types import Cluster, Device, Level

_GB = 10**9


def lint(cluster: Cluster) -> tuple[str, ...]:
    """What looks wrong, one line a finding; empty when nothing does."""
    findings: list[str] = []
    for number, device in enumerate(cluster.devices):
        label = f"node group {cluster.node_groups[number].name}, " if cluster.node_groups else ""
        inner = cluster.link(0, number)
        outer = [cluster.link(level, number) for level in range(1, len(cluster.levels))]
        findings.extend(label + text for text in (*_lint_links(inner, outer, device), *_lint_device(device)))
    return (*findings, *_lint_groups(cluster))


def _lint_links(inner: Level, outer: Sequence[Level], device: Device) -> list[str]:
    findings: list[str] = []
    for level in outer:
        if level.size > 1 and inner.size > 1 and level.bandwidth_bytes_per_s > inner.bandwidth_bytes_per_s:
            findings.append(
                f"{level.name}: one NIC ({_gb(level.bandwidth_bytes_per_s)}) is faster than a device's link inside the "
                f"node ({_gb(inner.bandwidth_bytes_per_s)}); is Gbit/s meant, or is it the sum over the NICs?"
            )
        if level.size > 1 and level.latency_ns < inner.latency_ns:
            findings.append(f"{level.name}: latency {level.latency_ns} ns is below that of {inner.name}")
    if inner.bandwidth_bytes_per_s > device.memory_bandwidth_bytes_per_s:
        findings.append(f"{inner.name}: the links ({_gb(inner.bandwidth_bytes_per_s)}) are faster than the memory")
    return findings


def _lint_groups(cluster: Cluster) -> list[str]:
    """Groups that slow the others down by more than they add: equal parts go at the pace of the slowest."""
    findings: list[str] = []
    for dtype in ("bfloat16", "float16", "float32"):
        if dtype not in cluster.device.peak_flops:
            continue
        rates = [(group, group.device.matrix_rate(dtype) or 0) for group in cluster.node_groups]
        pace = min((rate for _, rate in rates), default=0)
        kept = [(group, rate) for group, rate in rates if rate > pace]
        alone = min((rate for _, rate in kept), default=0) * sum(group.num_devices for group, _ in kept)
        if alone > pace * cluster.num_devices:
            names = ", ".join(group.name for group, _ in kept)
            findings.append(
                f"node groups: {dtype} matrix products run {alone / (pace * cluster.num_devices):.2g} x faster on "
                f"{names} alone than in equal parts on all {cluster.num_devices} devices; leave the slower nodes out "
                "(--allow-idle), or plan pipeline stages, each at its own pace (--stages auto)?"
            )
            break
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
