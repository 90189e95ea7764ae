"""Memory that communication takes on every device of a mesh."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tap_planner.cluster import Cluster, load_cluster
from tap_planner.cost import num_communicators, workspace_bytes
from tap_planner.graph import Graph
from tests.search.models import bound, decoder

BUFFERS = 1 << 20
BUCKET = 40_000_000


def cluster(buffers: int = BUFFERS) -> Cluster:
    """A cluster whose communicators take so much."""
    return replace(load_cluster("1x8:a100-sxm4-80gb"), collective_buffers_bytes=buffers)


@pytest.fixture(scope="module")
def graph() -> Graph:
    """A small decoder."""
    return bound(decoder("gpt", layers=1), batch=8, dims={"seq": 16})


@pytest.mark.parametrize(
    ("shape", "expected"),
    [((1,), 0), ((1, 1), 0), ((8,), 1), ((1, 8), 1), ((2, 4), 3), ((2, 1, 4), 3), ((2, 2, 2), 4)],
)
def test_communicators(shape: tuple[int, ...], expected: int, graph: Graph) -> None:
    """One for each axis and one of all devices, which on a single axis is the same; each takes its buffers."""
    assert num_communicators(shape) == expected
    assert workspace_bytes(cluster(), shape, graph, "bf16", training=False) == expected * BUFFERS


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp32", 4), ("fp64", 8)])
def test_one_bucket_in_training(precision: str, size: int, graph: Graph) -> None:
    """Of a small model all gradients that there are, frozen parameters left out; of a large one a full bucket."""
    elements = sum(p.type.num_elements for p in graph.parameters if p.trainable)
    assert 0 < elements < BUCKET
    assert workspace_bytes(cluster(), (8,), graph, precision, training=True) == BUFFERS + elements * size
    first, *others = graph.parameters
    frozen = replace(graph, parameters=(replace(first, trainable=False), *others))
    less = elements - first.type.num_elements
    assert workspace_bytes(cluster(), (8,), frozen, precision, training=True) == BUFFERS + less * size
    huge = replace(first, type=replace(first.type, shape=(BUCKET + 1,)))
    large = replace(graph, parameters=(huge, *others))
    assert workspace_bytes(cluster(), (8,), large, precision, training=True) == BUFFERS + BUCKET * size


@pytest.mark.parametrize(("buffers", "shape"), [(0, (2, 4)), (BUFFERS, (1,))])
def test_nothing_where_there_is_nothing(buffers: int, shape: tuple[int, ...], graph: Graph) -> None:
    """No buffers, or nobody to speak to: no bucket either."""
    assert workspace_bytes(cluster(buffers), shape, graph, "bf16", training=True) == 0
