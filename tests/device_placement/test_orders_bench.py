"""The benchmark of traversal orders: its generated graphs are what they say, and its statistics have known answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import onnx
import pytest

from tap_planner.cluster import load_cluster
from tap_planner.device_placement import ORDERS
from tap_planner.device_placement.building import problem_of
from tap_planner.graph import Graph
from tests.bench.instances import DATA
from tests.bench.irregular_graphs import mixture, nas_cells, random_wiring, unrolled_lstm
from tests.bench.order_statistics import choices, regrets, wins
from tests.bench.order_tables import Row, tables
from tests.bench.placed_models import MODELS, features
from tests.bench.traversal_orders import EXACT_CLUSTERS, rows_of
from tests.search.models import bound, model_file


def types(graph: Graph) -> Counter[str]:
    """How many operators of each type."""
    return Counter(operator.type for operator in graph.operators)


def test_lstm_by_hand() -> None:
    """A product of the input in every step of every layer, one of the state in all but the first, and the head."""
    counted = types(bound(model_file(unrolled_lstm(layers=2, steps=3, hidden=4).graph), batch=2, training=False))
    assert counted["MatMul"] == 2 * 3 + 2 * 2 + 1
    assert counted["Sigmoid"] == 2 * (3 * 3 - 1) and counted["Tanh"] == 2 * 3 * 2  # a first step forgets nothing


def test_mixture_by_hand() -> None:
    """Experts that know nothing of each other: three products a layer are on the longest way."""
    graph = bound(model_file(mixture(layers=1, experts=4, width=8, deep=16).graph), batch=2, training=False)
    assert types(graph)["MatMul"] == 1 + 2 * 4
    problem = problem_of(graph, load_cluster("1x2:l4"), precision="fp32", training=False).problem
    assert features(problem)["width"] == 4 + 1  # the first products of experts, or their gate


@pytest.mark.parametrize("make", [nas_cells, random_wiring])
def test_a_seed_makes_one_model(make: Callable[[int], onnx.ModelProto]) -> None:
    """The same seed gives the same file, another one another."""
    first, again, other = (make(seed).SerializeToString() for seed in (3, 3, 4))
    assert first == again != other


def test_random_wiring_is_connected() -> None:
    """Every node reads something and is read: no operator's result is lost."""
    graph = bound(model_file(random_wiring(5, stages=2, nodes=9, channels=4, size=8).graph), batch=2, training=False)
    read = {name for operator in graph.operators for name in operator.inputs}
    assert all(set(operator.outputs) & (read | set(graph.outputs)) for operator in graph.operators)


def test_families() -> None:
    """At least twenty models of at least nine families, each once."""
    assert len({placed.name for placed in MODELS}) == len(MODELS) >= 20
    assert len({placed.family for placed in MODELS}) >= 9


def rows_with(*costs: tuple[int, ...]) -> list[Row]:
    """Rows of one family, one model each; the width is what the first order takes."""
    found: list[Row] = []
    for number, cost in enumerate(costs):
        row: Row = {"model": str(number), "mode": "training", "family": "one", "single_ns": 10, "auto_ns": 5}
        row |= dict.fromkeys(("groups", "depth", "branching", "forks", "parallelism", "comm"), 1)
        found.append(row | {"width": cost[0], "orders_ns": dict(zip(ORDERS, cost, strict=True))})
    return found


def test_regrets_and_wins() -> None:
    """Geometric means of what an order takes more than the best; ties are wins of both."""
    rows = rows_with((1, 2, 2, 2, 2, 2), (4, 2, 1, 1, 1, 1))
    lost = regrets(rows, ORDERS)
    assert math.isclose(lost["topo"], 1.0) and math.isclose(lost["reversed-topo"], 1.0)
    assert math.isclose(lost["bfs"], math.sqrt(2) - 1)
    assert [wins(rows, name, ORDERS) for name in ORDERS] == [1, 0, 1, 1, 1, 1]


def test_rules_are_tried_on_models_left_out() -> None:
    """Where the width tells which order is best, one feature finds it; one order for all is wrong half of the time."""
    narrow, wide = (1, 4, 4, 4, 4, 4), (4, 1, 4, 4, 4, 4)
    found = {row["rule"]: row["behind the best"] for row in choices(rows_with(*[narrow] * 4, *[wide] * 4))}
    assert found["by one feature"] == "0.0 %" and found["two orders"] == "0.0 %"
    assert found["the worst order"] == "300.0 %"


def test_a_small_model() -> None:
    """A chain gains nothing: every order ends where one device does, which is proven to be the optimum."""
    (placed,) = (placed for placed in MODELS if placed.name == "light_zfnet512")
    rows = rows_of(placed, EXACT_CLUSTERS[:1], DATA, 0.1)
    for row in rows:
        orders = row["orders_ns"]
        assert isinstance(orders, dict) and set(orders.values()) == {row["single_ns"]}
        assert row["exact"] == "optimum" and row["auto_ns"] == row["bound_ns"] == row["single_ns"]
    assert all(isinstance(lines, list) for lines in tables(rows).values())
