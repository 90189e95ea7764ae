"""Every assignment of a small graph, priced over its lowered Program: no table of the search takes part."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

from tap_planner.cluster import Cluster
from tap_planner.cost import CollectiveModel
from tap_planner.graph import Graph
from tap_planner.search import Assignment, Configuration, Model
from tap_planner.simulate import price_program
from tests.search.building import cluster_of, make_model, program_of, storable_states


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForce:
    """Prices of all assignments."""

    prices: tuple[tuple[int, int], ...]
    """(ns, bytes) of each."""

    @property
    def least_ns(self) -> int:
        """Least objective A without a limit."""
        return min(ns for ns, _ in self.prices)

    @property
    def least_bytes(self) -> int:
        """Least memory of any assignment."""
        return min(num_bytes for _, num_bytes in self.prices)

    @property
    def bytes_of_fastest(self) -> int:
        """Least memory among the fastest assignments."""
        return min(self.prices)[1]

    def least_within(self, limit_bytes: int) -> int | None:
        """Least objective of what fits; None if nothing does."""
        return min((ns for ns, num_bytes in self.prices if num_bytes <= limit_bytes), default=None)


def space_size(model: Model) -> int:
    """Number of assignments."""
    size = 1
    for variable in range(model.num_operators):
        size *= model.domain(variable)
    for states in storable_states(model).values():
        size *= len(states)
    return size


def enumerate_all(model: Model, configuration: Configuration) -> BruteForce:
    """Price every strategy of every operator with every storage of every shared parameter."""
    cluster = cluster_of(model.space.mesh_shape)
    collectives = CollectiveModel(cluster, model.space.mesh)
    # made once: it is slow
    with mock.patch("tap_planner.simulate.additive.CollectiveModel", return_value=collectives):
        return BruteForce(prices=tuple(_prices(model, configuration, cluster)))


def _prices(model: Model, configuration: Configuration, cluster: Cluster) -> Iterator[tuple[int, int]]:
    stored = storable_states(model)
    domains = [range(model.domain(v)) for v in range(model.num_operators)]
    for operators in itertools.product(*domains):
        for states in itertools.product(*stored.values()):
            assignment = Assignment(operators=operators, parameters=dict(zip(stored, states, strict=True)))
            price = price_program(program_of(model, configuration, assignment), cluster)
            yield price.objective_ns, price.memory_bytes


def enumerable_model(graph: Graph, shapes: list[tuple[int, ...]], budget: int) -> Model | None:
    """The model on the first of the meshes whose space is within the budget."""
    for shape in shapes:
        model = make_model(graph, shape)
        if space_size(model) <= budget:
            return model
    return None
