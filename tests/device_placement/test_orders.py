"""Traversal orders against networkx and the published example."""

from __future__ import annotations

from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
from hypothesis import given

from tap_planner.device_placement import MORE_ORDERS, ORDERS, Problem, order_groups, orders, orders_for, upward_rank
from tap_planner.errors import UsageError
from tests.bench.placement_orders import branchy_problem
from tests.device_placement.problems import Traits, chain, graph, heft_example, problems

PREFERRED = ("lexico-topo", "topo", "dfs-preorder", "reversed-topo", "dfs-postorder", "bfs")
LARGER = Traits(max_groups=12)
TOPOLOGICAL = ("topo", "lexico-topo", "random:0", "random:5")


def forward_graph(problem: Problem) -> nx.DiGraph:
    """The forward graph of groups, nodes and edges ascending."""
    found = nx.DiGraph()
    found.add_nodes_from(range(problem.num_groups))
    edges = set()
    for tensor, reader in zip(problem.edge_tensor, problem.edge_consumer, strict=True):
        maker = problem.tensor_producer[tensor]
        a, b = int(problem.group_of[maker]), int(problem.group_of[reader])
        if a < b and not problem.is_backward[maker] and not problem.is_backward[reader]:
            edges.add((a, b))
    found.add_edges_from(sorted(edges))
    return found


def named(problem: Problem) -> Problem:
    """With names that sort otherwise than numbers, some of them equal."""
    return replace(problem, group_names=tuple(f"op{7 * group % 5}" for group in range(problem.num_groups)))


@given(problem=problems(LARGER))
def test_every_order_lists_every_group_once(problem: Problem) -> None:
    """Each order is a permutation of the groups."""
    for name in (*ORDERS, *MORE_ORDERS, "random:1"):
        assert sorted(order_groups(problem, name)) == list(range(problem.num_groups))


@given(problem=problems(LARGER))
def test_topological_orders(problem: Problem) -> None:
    """Those that say so list a group after all that it depends on; reversed-topo after all that depend on it."""
    edges = list(forward_graph(problem).edges)
    for name in TOPOLOGICAL:
        place = {group: position for position, group in enumerate(order_groups(named(problem), name))}
        assert all(place[a] < place[b] for a, b in edges)
    assert order_groups(problem, "reversed-topo") == order_groups(problem, "topo")[::-1]


@given(problem=problems(LARGER))
def test_orders_are_those_of_networkx(problem: Problem) -> None:
    """Kahn's, depth first before and after, breadth first and lexicographic, with ties by number."""
    nodes = forward_graph(problem)
    sources = [group for group in nodes if not nodes.in_degree(group)]
    root = nodes.copy()  # one walk from all sources
    root.add_edges_from((-1, source) for source in sources)
    assert order_groups(problem, "topo") == tuple(nx.topological_sort(nodes))
    assert order_groups(problem, "dfs-preorder") == tuple(nx.dfs_preorder_nodes(root, -1))[1:]
    assert order_groups(problem, "dfs-postorder") == tuple(nx.dfs_postorder_nodes(root, -1))[:-1]
    assert order_groups(problem, "bfs") == tuple(group for _, group in nx.bfs_edges(root, -1))
    names = named(problem).group_names
    expected = nx.lexicographical_topological_sort(nodes, key=lambda group: (names[group], group))
    assert order_groups(named(problem), "lexico-topo") == tuple(expected)
    assert order_groups(problem, "lexico-topo") == tuple(range(problem.num_groups))


def test_orders_of_a_small_graph() -> None:
    """Two branches of unlike length from one source to one end: worked by hand."""
    problem = graph([1] * 6, [(0, 1), (0, 2), (1, 3), (3, 4), (2, 5), (4, 5)], num_devices=1)
    assert order_groups(problem, "topo") == (0, 1, 2, 3, 4, 5)
    assert order_groups(problem, "dfs-preorder") == (0, 1, 3, 4, 5, 2)
    assert order_groups(problem, "dfs-postorder") == (5, 4, 3, 1, 2, 0)
    assert order_groups(problem, "bfs") == (0, 1, 2, 3, 5, 4)


def test_random_orders() -> None:
    """A seed always gives the same order; other seeds give others."""
    problem = graph([1] * 12, [(0, 11)], num_devices=1)
    assert order_groups(problem, "random:3") == order_groups(problem, "random:3")
    assert len({order_groups(problem, f"random:{seed}") for seed in range(10)}) == 10


def test_published_ranks() -> None:
    """Upward ranks and the order of HEFT's own example (Topcuoglu et al. 2002, table 2)."""
    ranks = np.asarray(upward_rank(heft_example())) / 3
    assert ranks.round(3).tolist() == [108, 77, 80, 80, 69, 63.333, 42.667, 35.667, 44.333, 14.667]
    assert [group + 1 for group in order_groups(heft_example(), "upward-rank")] == [1, 3, 4, 2, 5, 6, 9, 7, 8, 10]


def test_deep_graphs() -> None:
    """A chain of 5,000 operators needs no recursion."""
    problem = chain([1] * 5_000, num_devices=1)
    for name in (*ORDERS, *MORE_ORDERS):
        backwards = name in ("reversed-topo", "dfs-postorder")
        assert order_groups(problem, name) == tuple(range(5_000))[:: -1 if backwards else 1]


@pytest.mark.parametrize("name", ["depth", "random", "random:", "random:-1", "random:x"])
def test_unknown_orders(name: str) -> None:
    """An order that there is not is refused by name, with those that there are or the form of a seed."""
    with pytest.raises(UsageError, match="order") as caught:
        order_groups(chain([1], num_devices=1), name)
    assert repr(name) in caught.value.message and caught.value.hint


@given(problem=problems(LARGER))
def test_all_orders_of_small_graphs(problem: Problem) -> None:
    """Small graphs are tried in all orders of the paper, each once."""
    assert sorted(orders_for(problem)) == sorted(ORDERS)


@pytest.mark.parametrize("effort", [0, 20, 100, 200, 10_000])
def test_orders_of_large_graphs(effort: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fewer the larger and the more devices, the most promising first, at least one."""
    monkeypatch.setattr(orders, "_EFFORT", effort)
    found = [
        [orders_for(graph([1] * tasks, [], num_devices=devices)) for devices in (1, 2, 4, 8)]
        for tasks in (1, 2, 5, 10, 20)
    ]
    assert all(names == PREFERRED[: len(names)] and names for row in found for names in row)
    counts = np.asarray([[len(names) for names in row] for row in found])
    assert (np.diff(counts, axis=0) <= 0).all() and (np.diff(counts, axis=1) <= 0).all()


def test_orders_of_ten_thousand_operators() -> None:
    """All six where 10,000 operators are trained on two nodes of four devices."""
    assert orders_for(branchy_problem(10_000, 0)) == PREFERRED
