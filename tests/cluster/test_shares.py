"""Shares of the peak that matrix products reach, by element type."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tap_planner.cluster import (
    CalibratedDevice,
    Calibration,
    calibrated,
    catalogue_device,
    cluster_from_json,
    cluster_to_json,
    device_names,
    load_cluster,
    parse_cluster,
    slowest_device,
)
from tap_planner.cost import ComputeModel
from tap_planner.errors import ClusterError
from tap_planner.operators import ComputeKind

FLOPS = 2 * 8192**3
V100 = catalogue_device("v100-sxm2-32gb")


def seconds(precision: str) -> float:
    """A product of two matrices of 8192 x 8192 on a V100."""
    model = ComputeModel(V100, precision)
    return model.time_ns(FLOPS, 3 * model.tensor_bytes("float32", 8192**2), ComputeKind.CONTRACTION) / 1e9


def device_of(text: str) -> dict[str, int]:
    """Shares by element type, and of all others, of a device that a file describes."""
    cluster = parse_cluster(f"device: {text}\nnodes: 1\ndevices_per_node: 8\n", file="c.yaml")
    return {"all": cluster.device.matrix_efficiency_permille, **cluster.device.own_efficiency_permille}


def test_v100_has_two() -> None:
    """Published products: 95 of 125 TFLOP/s in float16, 14 of 15.7 in float32, where no matrix units take part."""
    assert FLOPS / seconds("fp16") == pytest.approx(95e12, rel=0.01)
    assert FLOPS / seconds("fp32") == pytest.approx(14e12, rel=0.01)


def test_v100_memory() -> None:
    """Published products of a vector and a number: 784 of 900 GB/s."""
    ns = ComputeModel(V100, "fp32").time_ns(0, 10**9, ComputeKind.MEMORY)
    assert ns == pytest.approx(1e9 / 784, rel=0.01)


@pytest.mark.parametrize("name", device_names())
def test_shares_are_of_peaks(name: str) -> None:
    """An element type with a share of its own has a peak, and no share is above one."""
    device = catalogue_device(name)
    assert set(device.own_efficiency_permille) <= set(device.peak_flops)
    assert all(0 < device.efficiency_permille(dtype) <= 1000 for dtype in device.peak_flops)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("v100-sxm2-32gb", {"all": 795, "float32": 904}),
        ("{like: v100-sxm2-32gb, matrix_efficiency: 0.5}", {"all": 500}),
        ("{like: v100-sxm2-32gb, matrix_efficiency: {float16: 0.7}}", {"all": 795, "float32": 904, "float16": 700}),
        ("{like: v100-sxm2-32gb, matrix_efficiency: {all: 0.6, float16: 0.7}}", {"all": 600, "float16": 700}),
        ("{like: a100-sxm4-80gb, matrix_efficiency: {float32: 0.9}}", {"all": 750, "float32": 900}),
    ],
)
def test_files_give_them(text: str, wanted: dict[str, int]) -> None:
    """A number is for all; of a mapping, ``all`` is that of every element type that it does not name."""
    assert device_of(text) == wanted


@pytest.mark.parametrize(
    ("share", "wanted"),
    [("{float61: 0.5}", "did you mean 'float64'"), ("{float32: 1.5}", "float32"), ("{float32: 0}", "float32")],
)
def test_wrong_shares(share: str, wanted: str) -> None:
    """The error names the place."""
    with pytest.raises(ClusterError, match=f"c.yaml:1: device.matrix_efficiency.*{wanted}"):
        device_of(f"{{like: v100-sxm2-32gb, matrix_efficiency: {share}}}")


def test_plans_hold_them() -> None:
    """The cluster's record for plans is complete, and without such shares has no key for them."""
    cluster = load_cluster("1x8:v100-sxm2-32gb")
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster)))) == cluster
    assert "own_efficiency_permille" not in json.dumps(cluster_to_json(load_cluster("1x8:a100-sxm4-80gb")))


def test_attention_has_its_own() -> None:
    """In a file and in a plan; a calibration, which measures all products together, takes its place."""
    assert V100.efficiency_permille("float32", attention=True) == 904
    cluster = parse_cluster(
        "device: {like: a100-sxm4-80gb, attention_efficiency: 0.6}\nnodes: 1\ndevices_per_node: 8\n", file="c.yaml"
    )
    assert cluster.device.attention_efficiency_permille == 600
    assert cluster_from_json(json.loads(json.dumps(cluster_to_json(cluster)))) == cluster
    assert "attention" not in json.dumps(cluster_to_json(load_cluster("1x8:v100-sxm2-32gb")))
    measured = CalibratedDevice(name=cluster.device.name, peak_flops={"bfloat16": 10**14})
    found = calibrated(cluster, Calibration(device=measured, library="nccl"), "c.yaml").device
    assert found.attention_efficiency_permille is None


def test_attention_of_unlike_devices() -> None:
    """Where it comes least near to the products of its device; without any share of its own it is as they are."""
    a100 = catalogue_device("a100-sxm4-80gb")
    assert slowest_device((V100, V100)).attention_efficiency_permille is None
    both = slowest_device((a100, V100))
    assert both.attention_efficiency_permille == pytest.approx(535 / 750 * both.matrix_efficiency_permille, abs=1)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{like: a100-sxm4-80gb}", 535),
        ("{like: a100-sxm4-80gb, matrix_efficiency: 0.375}", 267),
        ("{like: a100-sxm4-80gb, matrix_efficiency: {float32: 0.9}}", 535),
        ("{like: a100-sxm4-80gb, matrix_efficiency: 0.5, attention_efficiency: 0.4}", 400),
        ("{like: a100-sxm4-80gb, attention_efficiency: 0.4}", 400),
        ("{like: l4, matrix_efficiency: 0.5}", None),
    ],
)
def test_attention_goes_with_products(text: str, wanted: int | None) -> None:
    """A file that says what products reach, and nothing of attention, leaves the relation of the two as it is."""
    cluster = parse_cluster(f"device: {text}\nnodes: 1\ndevices_per_node: 8\n", file="c.yaml")
    assert cluster.device.attention_efficiency_permille == wanted


@pytest.mark.parametrize("name", device_names())
def test_attention_comes_no_nearer_than_products(name: str) -> None:
    """In the catalogue no device's fused attention reaches more than its products do."""
    device = catalogue_device(name)
    assert (device.attention_efficiency_permille or 0) <= device.matrix_efficiency_permille


def test_what_is_measured_takes_their_place() -> None:
    """A calibrated element type has the usual share of the peak that was fitted; others keep theirs."""
    cluster = load_cluster("1x8:v100-sxm2-32gb")
    for dtype, kept in (("float32", {}), ("float16", {"float32": 904})):
        measured = CalibratedDevice(name=V100.name, peak_flops={dtype: 10**13}, matrix_efficiency_permille=1000)
        found = calibrated(cluster, Calibration(device=measured, library="nccl"), "c.yaml").device
        assert (found.efficiency_permille(dtype), found.own_efficiency_permille) == (1000, kept)


def test_unlike_devices() -> None:
    """Equal parts go at the least rate that an element type reaches on any device, whatever share of which peak."""
    other = replace(V100, peak_flops={"float32": 14 * 10**12, "float16": 200 * 10**12}, own_efficiency_permille={})
    both = slowest_device((V100, other))
    for dtype in ("float32", "float16"):
        rates = [V100.matrix_rate(dtype), other.matrix_rate(dtype)]
        assert None not in rates
        assert both.matrix_rate(dtype) == pytest.approx(min(rate for rate in rates if rate is not None), rel=1e-9)
