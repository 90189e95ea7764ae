"""Idle devices against what every rank holds, and the kinds of device of a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tap_planner.cluster import cluster_to_json, parse_cluster
from tap_planner.errors import PlanFormatError
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.plan import (
    Decisions,
    IdleDevices,
    IdlePlaces,
    PlanDocument,
    Verdict,
    device_kinds,
    diff_plans,
    from_text,
    idle_devices,
    to_text,
    with_digests,
)
from tap_planner.sharding import REPLICATE, Placements, local_indices
from tests.apply.random_plans import RandomPlan
from tests.graph.models import DATA
from tests.plan.plan_builders import make_decisions, make_document, make_stack

MODEL = DATA / "cases" / "batch_smaller_than_devices" / "model.onnx"


@pytest.fixture(scope="module")
def graph() -> Graph:
    """Two products with a batch of 2."""
    return bind(load_model(MODEL), BindOptions(batch=2))


def shapes_of(graph: Graph) -> dict[str, tuple[int, ...]]:
    """Tensor name to shape."""
    return {name: tensor.type.shape for name, tensor in graph.tensors.items()}


def split_tensors(decisions: Decisions, shapes: dict[str, tuple[int, ...]]) -> list[tuple[tuple[int, ...], Placements]]:
    """Everything that is held, as (shape, placements)."""
    held = [(parameter.shape, parameter.placement) for parameter in decisions.parameters]
    for operator in decisions.operators:
        held.extend((shapes[o.tensor], o.placement) for o in (*operator.inputs, *operator.outputs) if o is not None)
    return held


@pytest.mark.parametrize("mesh", [(8,), (7,), (3,), (2, 4), (4, 2), (5, 3)], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_idle_devices_hold_nothing_of_what_is_split(graph: Graph, mesh: tuple[int, ...], seed: int) -> None:
    """Along an axis, a coordinate is busy if and only if some tensor that is split along it has a part there."""
    decisions = RandomPlan(graph, mesh, seed).build()
    shapes = shapes_of(graph)
    found = {entry.axis: entry.first for entry in idle_devices(decisions, shapes)}
    for axis, size in enumerate(mesh):
        busy = 1
        for shape, placements in split_tensors(decisions, shapes):
            if placements[axis].is_shard:
                for coordinate in range(busy, size):
                    place = tuple(coordinate if a == axis else 0 for a in range(len(mesh)))
                    if all(len(indices) for indices in local_indices(shape, placements, mesh, place)):
                        busy = coordinate + 1
        assert found.get(decisions.axes[axis].name, size) == busy


def test_shards_of_the_optimizer_are_work() -> None:
    """Devices that only hold ZeRO shards of parameters are not idle."""
    graph = bind(load_model(MODEL), BindOptions(batch=2, training=True))
    decisions = replace(RandomPlan(graph, (8,), 0).build(), operators=())
    whole = tuple(replace(p, placement=(REPLICATE,), zero_level=0, zero_axes=()) for p in decisions.parameters)
    (idle,) = idle_devices(replace(decisions, parameters=whole), shapes_of(graph))
    assert (idle.first, idle.end) == (1, 8)
    sharded = tuple(replace(p, zero_level=1, zero_axes=(0,)) for p in whole)
    assert idle_devices(replace(decisions, parameters=sharded), shapes_of(graph)) == ()


@pytest.fixture
def document() -> PlanDocument:
    """A plan of two layers on 2x2."""
    stack = make_stack(2)
    return make_document(make_decisions(stack), stack.reads)


def test_idle_devices_in_the_text(document: PlanDocument) -> None:
    """They are written with their reason, read again, and no part of what the applier obeys."""
    first = document.mesh.axes[0]
    idle = with_digests(replace(document, idle=(IdleDevices(axis=first.name, first=1, end=first.size),)))
    assert from_text(to_text(idle)) == idle
    assert f"nothing is split along {first.name}" in to_text(idle)
    assert idle.num_idle == 2 and document.num_idle == 0
    assert idle.digests is not None and document.digests is not None
    assert idle.digests.decisions == document.digests.decisions and idle.digests.plan != document.digests.plan


def test_device_kinds(document: PlanDocument) -> None:
    """One kind where all nodes are alike; else one per node group, each with what a plan may use of it."""
    (kind,) = device_kinds(document)
    assert kind.num_devices == 4 and kind.group == ""
    text = """\
node_groups:
  - {name: a, nodes: 1, devices_per_node: 2, device: a100-sxm4-80gb}
  - {name: b, nodes: 2, devices_per_node: 1, device: l4}
reserved_memory: 4 GiB
"""
    unlike = replace(document, cluster=cluster_to_json(parse_cluster(text, file="c.yaml")))
    assert [(k.group, k.device, k.num_devices, k.limit_bytes >> 30) for k in device_kinds(unlike)] == [
        ("a", "a100-sxm4-80gb", 2, 76),
        ("b", "l4", 2, 20),
    ]
    limited = replace(unlike, options=replace(unlike.options, max_memory_bytes=30 << 30))
    assert [k.limit_bytes >> 30 for k in device_kinds(limited)] == [30, 20]


def leaves_out(document: PlanDocument, *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> PlanDocument:
    """The same plan on a larger cluster, of which it leaves some places out."""
    places = tuple(IdlePlaces(first=first, last=last) for first, last in boxes)
    return with_digests(replace(document, mesh=replace(document.mesh, idle_devices=places)))


def test_devices_outside_the_mesh(document: PlanDocument) -> None:
    """They are written as boxes, read again, counted, and part of what the applier obeys."""
    fewer = leaves_out(document, ((0, 2), (1, 7)), ((2, 0), (3, 7)))
    assert from_text(to_text(fewer)) == fewer
    assert '"idle_devices": [{"first": [0, 2], "last": [1, 7]}, {"first": [2, 0], "last": [3, 7]}]' in to_text(fewer)
    assert fewer.num_idle == 12 + 16 and fewer.mesh.num_left_out == 28
    assert fewer.digests is not None and document.digests is not None
    assert fewer.digests.decisions != document.digests.decisions
    assert "idle_devices" not in to_text(document)


def test_a_diff_names_devices_outside_the_mesh(document: PlanDocument) -> None:
    """A plan that leaves other devices out is another decision."""
    difference = diff_plans(document, leaves_out(document, ((2, 0), (2, 1))))
    (changed,) = [change for change in difference.mesh if change.name == "idle_devices"]
    assert (changed.old, changed.new) == (None, "2.0 to 2.1")
    assert difference.verdict is Verdict.DECISIONS_CHANGED


@pytest.mark.parametrize("last", ["[0, 1]", "[1]"])
def test_boxes_end_after_they_begin(document: PlanDocument, last: str) -> None:
    """A box that ends before it begins, or in another number of coordinates, is named."""
    text = to_text(leaves_out(document, ((0, 2), (1, 7)))).replace('"last": [1, 7]', f'"last": {last}')
    with pytest.raises(PlanFormatError, match=r"mesh\.idle_devices\[0\]\.last: .*a place from \[0, 2\] on"):
        from_text(text)


def test_kinds_of_the_devices_that_are_used(document: PlanDocument) -> None:
    """A kind that the mesh leaves out limits nothing."""
    text = """\
node_groups:
  - {name: slow, nodes: 1, devices_per_node: 2, device: l4}
  - {name: fast, nodes: 2, devices_per_node: 2, device: a100-sxm4-80gb}
"""
    cluster = cluster_to_json(parse_cluster(text, file="c.yaml"))
    mesh = replace(document.mesh, ranks=((1, 0), (1, 1), (2, 0), (2, 1)))
    (kind,) = device_kinds(replace(document, cluster=cluster, mesh=mesh))
    assert (kind.group, kind.num_devices, kind.memory_bytes >> 30) == ("fast", 4, 80)
