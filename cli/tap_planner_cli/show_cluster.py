"""A cluster as it was understood."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from tap_planner_cli.errors import printable
from tap_planner_cli.tables import heading, table
from tap_planner_cli.units import format_bytes, format_count, format_ns

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Device, Level, Pace


def print_cluster(console: Console, cluster: Cluster, findings: Sequence[str]) -> None:
    """Print devices, levels and what looks wrong."""
    console.print(f"{printable(cluster.name)}: {format_count(cluster.num_devices)} devices, {cluster.library}")
    if cluster.node_groups:
        _print_groups(console, cluster)
    else:
        heading(console, f"Device {printable(cluster.device.name)}")
        console.print(table(("", ""), _device_rows(cluster.device, cluster)))
        heading(console, "Levels, inner to outer")
        console.print(_level_table(cluster.levels))
        _print_group_bandwidths(console, cluster.levels)
        _print_paces(console, cluster)
    heading(console, "Findings")
    for finding in findings or ("none",):
        console.print(printable(finding), soft_wrap=True)


def _device_rows(device: Device, cluster: Cluster) -> list[tuple[str, str]]:
    reserved_bytes, buffers_bytes = cluster.reserved_memory_bytes, cluster.collective_buffers_bytes
    reserved = f" ({format_bytes(reserved_bytes)} reserved)" if reserved_bytes else ""
    buffers = (("buffers of a communicator", format_bytes(buffers_bytes)),) if buffers_bytes else ()
    shares = device.own_efficiency_permille.items()
    if device.attention_efficiency_permille is not None:
        attention = f", {_share(device.attention_efficiency_permille)} by fused attention"
    else:
        attention = ""
    own = f" ({', '.join(f'{_share(share)} in {dtype}' for dtype, share in shares)})" if shares else ""
    return [
        ("memory", format_bytes(device.memory_bytes) + reserved),
        *buffers,
        ("memory bandwidth", _rate(device.memory_bandwidth_bytes_per_s, "B/s")),
        ("reached of that", _share(device.memory_efficiency_permille)),
        *((f"peak {dtype}", _rate(peak, "FLOP/s")) for dtype, peak in device.peak_flops.items()),
        ("reached of that", f"{_share(device.matrix_efficiency_permille)} by matrix products{own}{attention}"),
        ("launch", format_ns(device.launch_ns)),
        *((("launch backward", format_ns(device.backward_floor_ns)),) if device.backward_launch_ns is not None else ()),
        ("source", device.source or "-"),
    ]


def _print_paces(console: Console, cluster: Cluster) -> None:
    """What each algorithm reaches of each level's links, where anything is known."""
    from tap_planner.cluster import ALGORITHMS

    levels = [level for level in cluster.levels if level.size > 1 and level.paces]
    if not levels:
        return
    launch = format_ns(cluster.collective_launch_ns)
    heading(console, f"Collectives of {cluster.library}, each call {launch}: share of the links, latency of a step")
    names = [name for name in ALGORITHMS if any(name in dict(level.paces) for level in levels)]
    rows = [(level.name, *(_pace(level, dict(level.paces).get(name)) for name in names)) for level in levels]
    console.print(table(("level", *names), rows, right=tuple(names)))


def _pace(level: Level, pace: Pace | None) -> str:
    return (
        "-" if pace is None else f"{_share(pace.efficiency_permille)} {format_ns(level.latency_ns + pace.latency_ns)}"
    )


def _level_table(levels: Iterable[Level]) -> Table:
    rows = [
        (
            level.name,
            str(level.size),
            level.kind,
            str(level.nics),
            _rate(level.bandwidth_bytes_per_s, "B/s"),
            format_ns(level.latency_ns),
            f"{level.oversubscription_permille / 1000:g}",
        )
        for level in levels
    ]
    columns = ("level", "size", "kind", "links", "bandwidth each", "latency", "oversubscription")
    return table(columns, rows, right=(*columns[3:], "size"))


def _print_group_bandwidths(console: Console, levels: Iterable[Level]) -> None:
    """What a device may send in groups of each size, and what passes the host, where a level says so."""
    for level in levels:
        rows = [*_by_size("rings", level.group_bandwidths), *_by_size("all-to-all", level.exchange_bandwidths)]
        if level.host_bandwidth_bytes_per_s is not None:
            rows.append(("all", "through the host", _rate(level.host_bandwidth_bytes_per_s, "B/s")))
        if rows:
            heading(console, f"Level {printable(level.name)}: bandwidth by group size")
            console.print(table(("devices", "along", "bandwidth"), rows, right=("devices", "bandwidth")))


def _by_size(along: str, bandwidths: Iterable[tuple[int, int]]) -> list[tuple[str, str, str]]:
    return [(str(size), along, _rate(bandwidth, "B/s")) for size, bandwidth in bandwidths]


def _print_groups(console: Console, cluster: Cluster) -> None:
    """Unlike nodes: device and links of every group, then the pace of equal parts."""
    for number, group in enumerate(cluster.node_groups):
        nodes = f"{format_count(group.nodes)} {'node' if group.nodes == 1 else 'nodes'} x {group.devices_per_node}"
        heading(console, f"Node group {printable(group.name)}: {nodes} devices {printable(group.device.name)}")
        console.print(table(("", ""), _device_rows(group.device, cluster)))
        console.print()
        links = [cluster.link(level, number) for level in range(len(cluster.levels))]
        console.print(_level_table(links))
        _print_group_bandwidths(console, links)
    heading(console, "Equal parts on all of them: the pace of the slowest, the memory of the smallest")
    console.print(table(("", ""), _device_rows(cluster.device, cluster)))


def _share(permille: int) -> str:
    return f"{permille / 10:g} %"


def _rate(value: int, unit: str) -> str:
    for prefix, size in (("P", 10**15), ("T", 10**12), ("G", 10**9), ("M", 10**6)):
        if value >= size:
            return f"{value / size:,.4g} {prefix}{unit}"
    return f"{value} {unit}"
