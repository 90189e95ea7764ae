"""Sizes that are plain before any table is built, and why an axis is not used."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tap_planner.cluster import load_cluster
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.plan import AxisDecision
from tap_planner.search import find_obstacles
from tap_planner.search.capacity import parameter_demand, sizes_of, tensor_demand, uncountable
from tests.graph.models import DATA

CASES = DATA / "cases"


def bound(path: str, **options: int) -> Graph:
    """A case's graph."""
    batch = options.pop("batch", None)
    return bind(load_model(CASES / path), BindOptions(batch=batch, dims=options))


def test_heads_that_do_not_divide() -> None:
    """28 heads of a Reshape stand in the way of 8 devices; nothing stands in the way of 2, 4 and 7."""
    graph = bound("gqa_heads_28_kv4_tp8/model.onnx", batch=2)
    (found,) = find_obstacles(graph, (AxisDecision(name="tp", size=8, levels=()),))
    assert (found.axis, found.operators, found.type, found.sizes) == ("tp", ("q1", "o2"), "Reshape", (28,))
    assert str(found).startswith("operator 'q1' (Reshape) and 1 more cannot be split along tp: size 28 is no multiple")
    for size in (2, 4, 7):
        assert find_obstacles(graph, (AxisDecision(name="tp", size=size, levels=()),)) == ()


def test_uneven_splits_are_no_obstacle() -> None:
    """A dim by itself may be split unevenly: 256 columns over 7 devices."""
    graph = bound("seven_devices/model.onnx", batch=8)
    assert find_obstacles(graph, (AxisDecision(name="dp", size=7, levels=()),)) == ()


def test_demands_are_exact() -> None:
    """2^62 rows of 4 elements in 2 bytes each over 4 devices; 2^66 elements of a weight likewise."""
    cluster = load_cluster("1x4:a100-sxm4-80gb")
    rows = bound("huge_sizes_small_file/dim_2_62.onnx")
    assert tensor_demand(sizes_of(rows), cluster, "bf16", 1).num_bytes == 2**62 * 4 * 2 // 4
    assert tensor_demand(sizes_of(rows), cluster, "bf16", 128).num_bytes == 2**62 * 4 * 2 // 4 // 128
    weight = bound("huge_sizes_small_file/weight_2_66.onnx")
    assert parameter_demand(sizes_of(weight), cluster, "fp32").num_bytes == 2**66
    assert tensor_demand(sizes_of(weight), cluster, "fp32", 1).num_bytes == 2**33 * 4 // 4


@pytest.mark.parametrize(("name", "what"), [("dim_2_62", "bytes"), ("weight_2_66", "bytes")])
def test_what_tables_cannot_count(name: str, what: str) -> None:
    """Sizes beyond 64 bits are found; those of the largest real models are not."""
    cluster = load_cluster("1x4:a100-sxm4-80gb")
    found = uncountable(sizes_of(bound(f"huge_sizes_small_file/{name}.onnx")), cluster, "bf16")
    assert found is not None and found.what == what and found.value > found.most


def test_large_models_are_countable() -> None:
    """GPT-3 175B with a batch of 1536 can be counted on 128x8 devices, and on one."""
    graph = bind(load_model(DATA / "hm_gpt3_175b.onnx"), BindOptions(batch=1536, dims={"seq": 2048}, training=True))
    for cluster in ("128x8:a100-sxm4-80gb", "1x1:a100-sxm4-80gb"):
        assert uncountable(sizes_of(graph), load_cluster(cluster), "bf16") is None


def test_slow_devices_are_counted_in_time() -> None:
    """What a device at one FLOP/s would take 10^9 years for cannot be counted."""
    cluster = load_cluster("1x1:a100-sxm4-80gb")
    slow = replace(cluster, device=replace(cluster.device, peak_flops={"bfloat16": 1}))
    graph = bound("cross_node_group_bandwidth/model.onnx", batch=16)
    found = uncountable(sizes_of(graph), slow, "bf16")
    assert found is not None and found.what == "ns"
    assert uncountable(sizes_of(graph), cluster, "bf16") is None
