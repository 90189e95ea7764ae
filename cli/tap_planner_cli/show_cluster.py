"""A cluster as it was understood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from tap_planner_cli.errors import printable
from tap_planner_cli.show_text import heading, table
from tap_planner_cli.units import format_bytes, format_count, format_ns

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster


def print_cluster(console: Console, cluster: Cluster, findings: Sequence[str]) -> None:
    """Print device, levels and what looks wrong."""
    device = cluster.device
    console.print(f"{printable(cluster.name)}: {format_count(cluster.num_devices)} devices, {cluster.library}")
    heading(console, f"Device {printable(device.name)}")
    reserved = f" ({format_bytes(cluster.reserved_memory_bytes)} reserved)" if cluster.reserved_memory_bytes else ""
    rows = [
        ("memory", format_bytes(device.memory_bytes) + reserved),
        ("memory bandwidth", _rate(device.memory_bandwidth_bytes_per_s, "B/s")),
        *((f"peak {dtype}", _rate(peak, "FLOP/s")) for dtype, peak in device.peak_flops.items()),
        ("launch", format_ns(device.launch_ns)),
        ("source", device.source or "-"),
    ]
    console.print(table(("", ""), rows))
    heading(console, "Levels, inner to outer")
    levels = [
        (
            level.name,
            str(level.size),
            level.kind,
            str(level.nics),
            _rate(level.bandwidth_bytes_per_s, "B/s"),
            format_ns(level.latency_ns),
            f"{level.oversubscription_permille / 1000:g}",
        )
        for level in cluster.levels
    ]
    columns = ("level", "size", "kind", "links", "bandwidth each", "latency", "oversubscription")
    console.print(table(columns, levels, right=(*columns[3:], "size")))
    heading(console, "Findings")
    for finding in findings or ("none",):
        console.print(printable(finding), soft_wrap=True)


def _rate(value: int, unit: str) -> str:
    for prefix, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= size:
            return f"{value / size:,.4g} {prefix}{unit}"
    return f"{value} {unit}"
