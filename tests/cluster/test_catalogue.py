"""The packaged device catalogue."""

from __future__ import annotations

import pytest

from tap_planner.cluster import catalogue_device, catalogue_entry, device_names
from tap_planner.errors import ClusterError


def test_data_sheet_figures() -> None:
    """The A100's figures are those of NVIDIA's data sheet (dense; HBM in GiB)."""
    device = catalogue_device("a100-sxm4-80gb")
    assert device.peak_flops["bfloat16"] == 312 * 10**12
    assert device.peak_flops["float32"] == 19_500_000_000_000
    assert device.memory_bytes == 80 * 2**30
    assert device.memory_bandwidth_bytes_per_s == 2_039 * 10**9
    assert device.source.startswith("https://")


def test_every_entry_is_complete() -> None:
    """Each device has memory, bandwidth, a peak, links and a source."""
    assert len(device_names()) > 40
    for name in device_names():
        entry = catalogue_entry(name)
        assert entry.device.peak_flops, name
        assert entry.device.source, name
        assert min(entry.device.memory_bytes, entry.device.memory_bandwidth_bytes_per_s) > 0, name
        assert entry.intra_bandwidth_bytes_per_s > 0, name


def test_unknown_device() -> None:
    """A near miss is suggested."""
    with pytest.raises(ClusterError, match="did you mean 'h100-sxm5-80gb'"):
        catalogue_device("h100-smx5-80gb")
