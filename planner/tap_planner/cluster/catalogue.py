"""The packaged device catalogue: dense peaks, memory and default links, each row with its source.

Latencies are orders of magnitude, not data-sheet figures: NCCL's own tuning model takes 0.6-3.4 us per hop of a
ring over NVLink and 2.7-14 us over the network, depending on protocol (NCCL, src/graph/tuning.cc, hwLat); 3 us and
8 us lie between.
"""

from __future__ import annotations

import csv
import functools
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources

from tap_planner.cluster.document import near_miss
from tap_planner.cluster.types import (
    DEFAULT_MATRIX_EFFICIENCY_PERMILLE,
    DEFAULT_MEMORY_EFFICIENCY_PERMILLE,
    Device,
)
from tap_planner.errors import ClusterError

_PEAK_COLUMNS = {
    "float64": "float64_tflops",
    "float32": "float32_tflops",
    "tensorfloat32": "tensorfloat32_tflops",
    "float16": "float16_tflops",
    "bfloat16": "bfloat16_tflops",
    "float8": "float8_tflops",
    "float4": "float4_tflops",
    "int8": "int8_tops",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    """A device with the links that it usually comes with."""

    device: Device
    vendor: str
    memory_kind: str
    """``HBM3``, ``GDDR6``, ``DDR``, ..."""
    intra_kind: str
    """``switch``, ``ring``, ``mesh`` or ``pcie``."""
    intra_bandwidth_bytes_per_s: int
    """Per device and direction, inside the node."""
    intra_latency_ns: int
    intra_group_bandwidths: tuple[tuple[int, int], ...]
    """Where it depends on how many devices take part, see ``Level.group_bandwidths``."""
    intra_exchange_bandwidths: tuple[tuple[int, int], ...]
    intra_reduces: bool
    """Whether the switch sums what passes."""
    nic_bandwidth_bytes_per_s: int | None
    """Per NIC and direction; None where no usual NIC exists."""
    nic_latency_ns: int
    notes: str

    @property
    def library(self) -> str:
        """The usual communication library."""
        return {"amd": "rccl", "cpu": "gloo"}.get(self.vendor, "nccl")

    def nics_per_node(self, devices_per_node: int) -> int:
        """One NIC per accelerator, one per node for CPUs."""
        return 1 if self.vendor == "cpu" else devices_per_node


@functools.cache
def _entries() -> dict[str, CatalogueEntry]:
    text = resources.files("tap_planner.cluster").joinpath("devices.csv").read_text(encoding="utf-8")
    return {row["name"]: _entry(row) for row in csv.DictReader(text.splitlines())}


def _scaled(text: str, scale: int) -> int:
    return round(Fraction(text) * scale)


def _share(text: str, default: int) -> int:
    return _scaled(text, 1000) if text else default


def _shares(text: str) -> tuple[int, dict[str, int]]:
    """``0.76 float32:0.89`` -> the usual share of the peak, and those of single element types, in permille."""
    usual, *own = text.split() or [""]
    pairs = (pair.split(":") for pair in own)
    return _share(usual, DEFAULT_MATRIX_EFFICIENCY_PERMILLE), {dtype: _scaled(share, 1000) for dtype, share in pairs}


def _by_size(text: str) -> tuple[tuple[int, int], ...]:
    """``2:25 4:100`` -> bytes per second by group size."""
    pairs = (pair.split(":") for pair in text.split())
    return tuple((int(size), _scaled(bandwidth, 10**9)) for size, bandwidth in pairs)


def _entry(row: dict[str, str]) -> CatalogueEntry:
    efficiency, own_efficiency = _shares(row["matrix_efficiency"])
    device = Device(
        name=row["name"],
        memory_bytes=_scaled(row["memory_gib"], 1 << 30),
        memory_bandwidth_bytes_per_s=_scaled(row["memory_bandwidth_gb_per_s"], 10**9),
        peak_flops={dtype: _scaled(row[column], 10**12) for dtype, column in _PEAK_COLUMNS.items() if row[column]},
        launch_ns=_scaled(row["launch_us"], 1000),
        backward_launch_ns=_scaled(row["backward_launch_us"], 1000) if row["backward_launch_us"] else None,
        matrix_efficiency_permille=efficiency,
        own_efficiency_permille=own_efficiency,
        attention_efficiency_permille=_scaled(row["attention_efficiency"], 1000)
        if row["attention_efficiency"]
        else None,
        memory_efficiency_permille=_share(row["memory_efficiency"], DEFAULT_MEMORY_EFFICIENCY_PERMILLE),
        source=row["source"],
    )
    return CatalogueEntry(
        device=device,
        vendor=row["vendor"],
        memory_kind=row["memory_kind"],
        intra_kind=row["intra_kind"],
        intra_bandwidth_bytes_per_s=_scaled(row["intra_gb_per_s"], 10**9),
        intra_latency_ns=_scaled(row["intra_latency_us"], 1000),
        intra_group_bandwidths=_by_size(row["group_gb_per_s"]),
        intra_exchange_bandwidths=_by_size(row["exchange_gb_per_s"]),
        intra_reduces=row["reduces"] == "yes",
        nic_bandwidth_bytes_per_s=_scaled(row["nic_gb_per_s"], 10**9) if row["nic_gb_per_s"] else None,
        nic_latency_ns=_scaled(row["nic_latency_us"], 1000),
        notes=row["notes"],
    )


def device_names() -> tuple[str, ...]:
    """Names of all catalogue entries."""
    return tuple(_entries())


def find_entry(name: str) -> CatalogueEntry | None:
    """The entry called ``name``, or None."""
    return _entries().get(name)


def catalogue_entry(name: str) -> CatalogueEntry:
    """The entry called ``name``.

    Raises:
        ClusterError: if there is none; near misses are suggested.
    """
    entry = find_entry(name)
    if entry is None:
        raise ClusterError(
            f"the device {name!r} is not in the catalogue{near_miss(name, _entries())}",
            hint="Known devices: " + ", ".join(_entries()) + ". Or describe the device in a cluster.yaml.",
        )
    return entry


def catalogue_device(name: str) -> Device:
    """The device called ``name``.

    Raises:
        ClusterError: if there is none; near misses are suggested.
    """
    return catalogue_entry(name).device
