"""Cases about clusters: unlike nodes, odd numbers of devices, links between nodes, wrong files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner.cluster import load_cluster, parse_cluster, parse_mesh
from tap_planner.cost import CollectiveModel
from tests.cases.running import Case, Planned, assert_any_plan_runs_as_elsewhere, assert_runs_as_elsewhere, run

BAD = Case("bad_cluster_values")
WRONG_FILES = {
    "alias_bomb": ("alias_bomb.yaml:1: ", "anchors and aliases"),
    "bw_inf": ("bw_inf.yaml:5: intra_node.bandwidth: '.inf'", "finite and greater than zero, with its unit"),
    "bw_nan": ("bw_nan.yaml:5: intra_node.bandwidth: '.nan'", "finite and greater than zero, with its unit"),
    "bw_negative": ("bw_negative.yaml:6: inter_node.bandwidth: '-25 GB/s'", "greater than zero"),
    "bw_no_unit_small": ("bw_no_unit_small.yaml:5: intra_node.bandwidth: '300' has no unit", "300 GB/s"),
    "bw_unknown_unit": ("bw_unknown_unit.yaml:5: intra_node.bandwidth: '300 Gbqs'", "unknown unit 'Gbqs'"),
    "bw_zero": ("bw_zero.yaml:5: intra_node.bandwidth: '0 GB/s'", "greater than zero"),
    "devices_fraction": ("devices_fraction.yaml:4: devices_per_node: '2.5' found", "a whole number from 1"),
    "devices_huge": ("devices_huge.yaml:4: devices_per_node: '1000000000' found", "a whole number from 1"),
    "devices_zero": ("devices_zero.yaml:4: devices_per_node: '0' found", "a whole number from 1"),
    "duplicate_key": ("duplicate_key.yaml:7: nodes: ", "occurs twice, first in line 3"),
    "empty": ("empty.yaml:1: the file is empty", "expected the keys device, nodes and devices_per_node"),
    "latency_negative": ("latency_negative.yaml:5: intra_node.latency: '-1 us'", "greater than zero"),
    "mem_no_unit": ("mem_no_unit.yaml:2: device.memory: '80' has no unit", "80 GiB"),
    "mem_string": ("mem_string.yaml:2: device.memory: 'eighty' is not a number with a unit", "80 GiB"),
    "missing_nodes": ("missing_nodes.yaml:1: the key 'device' is missing", "device, nodes and devices_per_node"),
    "python_tag": ("python_tag.yaml:1: the YAML tag", "is not accepted here, expected plain values"),
    "tab": ("tab.yaml:2: not valid YAML", "Indent with spaces"),
    "unknown_key": ("unknown_key.yaml:7: inter_nodes: unknown key 'inter_nodes'", "did you mean 'inter_node'?"),
    "yaml_octal_sexagesimal": ("yaml_octal_sexagesimal.yaml:5: intra_node.latency: '0:03'", "3 us"),
}


def test_every_wrong_cluster_file_is_tested() -> None:
    """The files of the folder are those of the table."""
    assert {path.stem for path in BAD.folder.glob("*.yaml")} == set(WRONG_FILES)


@pytest.mark.parametrize("name", WRONG_FILES)
def test_wrong_cluster_files_are_refused(name: str, tmp_path: Path) -> None:
    """One line: file and line, key path, the value found, what is wanted."""
    done = BAD.attempt(tmp_path, "--cluster", BAD.folder / f"{name}.yaml")
    done.refused(2, *WRONG_FILES[name])
    run("tap-show", "--cluster", BAD.folder / f"{name}.yaml").refused(2, *WRONG_FILES[name])


@pytest.mark.parametrize(("text", "bytes_per_s"), [("300 Gbps", 37_500_000_000), ("300 GB/s", 300_000_000_000)])
def test_bits_are_not_bytes(text: str, bytes_per_s: int) -> None:
    """300 Gbps are 37.5e9 bytes a second."""
    source = (BAD.folder / "bw_zero.yaml").read_text(encoding="utf-8").replace("0 GB/s", text, 1)
    source = source.replace("380 GB/s", text)
    cluster = parse_cluster(source, file="c.yaml")
    assert cluster.levels[0].bandwidth_bytes_per_s == bytes_per_s


# -- links between nodes -----------------------------------------------------------------------------------------

CROSS = Case("cross_node_group_bandwidth")


def test_an_axis_over_nodes_is_priced_at_the_network(tmp_path: Path) -> None:
    """Of 2 nodes x 8, the outer axis of 2x8 reduces at 25 GB/s shared by 8 groups, the inner one at 300 GB/s."""
    read = load_cluster(CROSS.cluster)
    bare = tuple(replace(level, paces=()) for level in read.levels)
    cluster = replace(read, levels=bare, collective_launch_ns=0)  # the links by themselves, without a library's pace
    model = CollectiveModel(cluster, parse_mesh("dp=2,tp=8", cluster))
    size = 4096 * 16384 * 2
    outer, inner = (model.cost("all_reduce", (axis,), size).ns for axis in (0, 1))
    assert outer == pytest.approx(2 * 10_000 + size * 8 / 25, rel=1e-6)
    assert inner == pytest.approx(2 * 7 * 3_000 + 2 * 7 / 8 * size / 300, rel=1e-6)
    planned = CROSS.plan(tmp_path, "--mesh", "dp=2,tp=8", "--constraint", "a:dp=m", "--zero", "0", mode="train")
    assert [axis.levels for axis in planned.document.mesh.axes] == [("network",), ("node",)]
    reductions = [entry for entry in planned.document.collectives if entry.axes == ("dp",)]
    assert reductions and all(entry.time_ns >= entry.bytes / 25 for entry in reductions)


def test_tensor_splits_stay_inside_a_node(tmp_path: Path) -> None:
    """Cut four ways along its sum, the first product costs a tenth inside a node of what it costs over the nodes."""
    large = ("--batch", "4096", "--mesh", "x=4,y=4")
    inner = CROSS.plan(tmp_path, *large, "--constraint", "a:y=k", "--constraint", "a:x=m", bind=False)
    outer = CROSS.plan(tmp_path, *large, "--constraint", "a:x=k", "--constraint", "a:y=m", bind=False)
    assert [axis.levels for axis in inner.document.mesh.axes] == [("node", "network"), ("node",)]
    costs = [planned.document.predicted.communication_ns for planned in (inner, outer)]
    assert 0 < 10 * costs[0] < costs[1]
    levels = {axis.name: axis.levels for axis in inner.document.mesh.axes}
    assert all("network" not in levels[axis] for entry in inner.document.collectives for axis in entry.axes)


# -- unlike nodes ------------------------------------------------------------------------------------------------

HETERO = Case("hetero_nodes")
SLOW_FLOPS, SLOW_BYTES = 71e12 * 0.65, 0.6e12 * 0.8
"""What the slower device reaches, in FLOP/s and bytes/s."""


def test_unlike_nodes_are_understood() -> None:
    """Both groups with their devices and links are shown, and what equal parts on all of them mean."""
    done = run("tap-show", "--cluster", HETERO.cluster)
    assert done.code == 0
    for words in ("6 devices", "kind-a", "80.00 GiB", "312 TFLOP/s", "kind-b", "24.00 GiB", "71 TFLOP/s", "16 GB/s"):
        assert words in done.out
    assert "run 2.9 x faster on a alone" in " ".join(done.out.split())


def test_equal_parts_are_priced_at_the_slower_device(tmp_path: Path) -> None:
    """The plan's compute time is that of node b for its parts, which a device of node a would do in a third."""
    planned = HETERO.plan(tmp_path, "--mesh", "dp=6")
    assert planned.mesh == {"dp": 6} and len(planned.document.mesh.ranks) == 6
    assert planned.document.mesh.ranks[3:] == ((0, 3), (1, 0), (1, 1))
    columns = math.ceil(32768 / 6)
    strategies = {operator.id: operator.strategy for operator in planned.operators}
    assert strategies == {"a": ("n",), "r": ("d1",), "y": ("k",)}
    products = [2 * 16 * 8192 * columns / SLOW_FLOPS + 2 * (16 * 8192 + 8192 * columns + 16 * columns) / SLOW_BYTES] * 2
    relu = 2 * 2 * 16 * columns / SLOW_BYTES
    expected = (sum(products) + relu) * 1e9
    assert planned.document.predicted.compute_ns == pytest.approx(expected, abs=3)


def test_memory_is_shown_per_kind_of_device(tmp_path: Path) -> None:
    """The plan holds both kinds; tap-plan and tap-show say what share of each memory is used."""
    planned = HETERO.plan(tmp_path)
    groups = planned.document.cluster["node_groups"]
    assert isinstance(groups, list)
    assert [group["device"]["memory_bytes"] for group in groups] == [80 << 30, 24 << 30]
    said = " ".join(planned.done.err.split())
    assert "of kind-a's 80.00 GiB" in said and "of kind-b's 24.00 GiB" in said
    rows = [line.split() for line in planned.tables().splitlines()]
    assert ["a", "4", "kind-a", "80.00", "GiB", "0.2", "%"] in rows
    assert ["b", "2", "kind-b", "24.00", "GiB", "0.7", "%"] in rows


def test_the_smaller_memory_is_the_limit(tmp_path: Path) -> None:
    """A part of 171 MiB does not fit into 100 MiB of node b, however large node a's memory is."""
    small = tmp_path / "small.yaml"
    small.write_text(HETERO.cluster.read_text(encoding="utf-8").replace("memory: 24 GiB", "memory: 100 MiB"))
    HETERO.attempt(tmp_path, "--cluster", small).refused(3, "no plan fits", f"{100 << 20} bytes")
    large = tmp_path / "large.yaml"
    large.write_text(HETERO.cluster.read_text(encoding="utf-8").replace("memory: 24 GiB", "memory: 200 MiB"))
    assert HETERO.attempt(tmp_path, "--cluster", large).code == 0


@pytest.mark.parametrize("mesh", ["dp=6", "dp=2,tp=3", "dp=3,tp=2"])
def test_plans_on_unlike_nodes_run(mesh: str, tmp_path: Path) -> None:
    """A plan for 4 + 2 devices trains on six ranks as one process does, with the collectives that it lists."""
    options = ("--cluster", HETERO.cluster, "--mesh", mesh, "--precision", "fp32", "--constraint", "a:dp=m")
    planned = Case("seven_devices").plan(tmp_path, *options, mode="train")
    verified = planned.apply("--verify")
    assert verified.code == 0, verified.out + verified.err


# -- odd numbers of devices --------------------------------------------------------------------------------------

SEVEN = Case("seven_devices")


def test_seven_devices(tmp_path: Path) -> None:
    """The plan uses all seven by uneven parts, and computes what another runtime did."""
    planned = assert_runs_as_elsewhere(SEVEN, tmp_path)
    assert planned.mesh == {"dp": 7} and not planned.document.idle
    assert_any_plan_runs_as_elsewhere(SEVEN, planned, tmp_path, meshes=((7,),), seeds=6)


def test_devices_without_a_part_are_named(tmp_path: Path) -> None:
    """A batch of 8 over 7 devices is four parts of 2: three devices are idle, and the plan says so and why."""
    planned = SEVEN.plan(tmp_path, *(word for name in ("a:dp=m", "y:dp=m") for word in ("--constraint", name)))
    assert planned.json["idle"] == [
        {"axis": "dp", "first": 4, "end": 7, "reason": "nothing has more than 4 parts along dp"}
    ]
    for said in (planned.done.err, planned.tables()):
        words = " ".join(said.split())  # narrow terminals wrap lines
        assert "3 of 7 devices: nothing has more than 4 parts along dp, which leaves dp 4 to 6 idle" in words
    assert planned.apply("--verify").code == 0


SMALL = Case("batch_smaller_than_devices")


def _assert_batch_is_cut_into_at_most(parts: int, planned: Planned) -> None:
    for operator in planned.decisions.operators[:3]:
        factor = {"MatMul": "m", "Relu": "d0"}[operator.type]
        axes = zip(planned.mesh.values(), operator.strategy, strict=True)
        assert math.prod(size for size, name in axes if name == factor) <= parts


@pytest.mark.parametrize("batch", [1, 2])
def test_batch_smaller_than_the_devices(batch: int, tmp_path: Path) -> None:
    """With a batch of 2, or 1, on 8 devices the batch is cut no further; other dims take the rest, none is idle."""
    planned = SMALL.plan(tmp_path, "--batch", str(batch), bind=False)
    _assert_batch_is_cut_into_at_most(batch, planned)
    assert planned.document.num_idle == 0
    trained = SMALL.plan(tmp_path, "--batch", str(batch), bind=False, mode="train")
    _assert_batch_is_cut_into_at_most(batch, trained)


def test_small_batch_computes_the_same(tmp_path: Path) -> None:
    """The plan, and random ones on 8 devices, compute what another runtime did."""
    planned = assert_runs_as_elsewhere(SMALL, tmp_path)
    assert_any_plan_runs_as_elsewhere(SMALL, planned, tmp_path, meshes=((8,), (2, 4)), seeds=3)


def test_single_device(tmp_path: Path) -> None:
    """One device: everything is whole, nothing is sent, it takes time, and it runs with world size 1."""
    case = Case("single_device")
    planned = assert_runs_as_elsewhere(case, tmp_path)
    decisions = planned.decisions
    assert planned.mesh == {"dp": 1}
    assert not planned.document.collectives and not decisions.redistributions and not planned.document.idle
    assert {str(p) for operator in decisions.operators for output in operator.outputs for p in output.placement} == {
        "R"
    }
    assert planned.document.predicted.step_ns > 0
