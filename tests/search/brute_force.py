"""Every assignment of a small graph, priced over its lowered Program: no table of the search takes part."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar
from unittest import mock

from tap_planner.cluster import Cluster
from tap_planner.cost import CollectiveModel
from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.program import Program
from tap_planner.search import Assignment, Configuration, Model
from tap_planner.simulate import Price, price_program
from tests.search.building import cluster_of, decisions_of, make_model, program_of, storable_states

Priced = TypeVar("Priced")
"""What a program costs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BruteForce:
    """Prices of all assignments."""

    prices: tuple[tuple[int, int], ...]
    """(ns, bytes) of each; bytes sent take the place of ns where the model counts them."""

    @property
    def least_ns(self) -> int:
        """Least objective A without a limit."""
        return min(ns for ns, _ in self.prices)

    @property
    def least_bytes(self) -> int:
        """Least memory of any assignment."""
        return min(num_bytes for _, num_bytes in self.prices)

    @property
    def least_ns_of_smallest(self) -> int:
        """Least objective among those that need the least memory."""
        return min(ns for ns, num_bytes in self.prices if num_bytes == self.least_bytes)

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
    prices = all_prices(model, configuration)
    return BruteForce(prices=tuple((price.objective_ns, price.memory_bytes) for price in prices))


def all_prices(model: Model, configuration: Configuration) -> tuple[Price, ...]:
    """The prices of all assignments."""
    return priced_all(model, configuration, lambda program, cluster: _price(program, cluster, model))


def _price(program: Program, cluster: Cluster, model: Model) -> Price:
    return price_program(program, cluster, model.space.price_list)


def priced_all(
    model: Model, configuration: Configuration, price: Callable[[Program, Cluster], Priced]
) -> tuple[Priced, ...]:
    """What the programs of all assignments cost, by a measure of one's own."""
    cluster = cluster_of(model.space.mesh_shape)
    collectives = CollectiveModel(cluster, model.space.mesh)
    # made once: it is slow
    with mock.patch("tap_planner.cost.prices.CollectiveModel", return_value=collectives):
        return tuple(price(program, cluster) for program in _programs(model, configuration))


def _programs(model: Model, configuration: Configuration) -> Iterator[Program]:
    stored = storable_states(model)
    domains = [range(model.domain(v)) for v in range(model.num_operators)]
    for operators in itertools.product(*domains):
        for states in itertools.product(*stored.values()):
            assignment = Assignment(operators=operators, parameters=dict(zip(stored, states, strict=True)))
            yield program_of(model, configuration, assignment)


class TooManyError(Exception):
    """More plans than may be priced."""


@dataclass(frozen=True, slots=True)
class FreeSpace:
    """Every plan in which regions and ZeRO groups choose their settings by themselves.

    Of a plan's price, compute, communication and activations depend on strategies and recomputation only; gradients,
    optimizer, stored parameters and their whole copies depend on the parameters' storage and ZeRO only. So the two are
    enumerated apart and added (``check_split`` prices plans whole to see that it is so).

    Args:
        model: the graph on its mesh.
        configuration: what may be chosen.
        budget: plans that may be priced.
    """

    model: Model
    configuration: Configuration
    budget: int

    def enumerate(self) -> BruteForce:
        """The undominated prices.

        Raises:
            TooManyError: there are too many.
        """
        cluster = cluster_of(self.model.space.mesh_shape)
        collectives = CollectiveModel(cluster, self.model.space.mesh)
        with mock.patch("tap_planner.cost.prices.CollectiveModel", return_value=collectives):
            return BruteForce(prices=tuple(self._all()))

    def recomputes(self) -> list[dict[int, int]]:
        """Every choice of how regions recompute: those of runs may, others keep everything."""
        regions = sorted({int(region) for region in self.model.region_of[self.model.run_of >= 0]})
        if not self.configuration.training:
            return [{}]
        options = range(len(self.configuration.settings.recomputes))
        return [dict(zip(regions, c, strict=True)) for c in itertools.product(options, repeat=len(regions))]

    def zeros(self, decisions: Decisions) -> list[dict[tuple[int, int], int]]:
        """Every choice of ZeRO settings, for the parameters of a plan: one for those that one region reads first (or
        that several read) and that have the same data axes."""
        if not self.configuration.training:
            return [{}]
        groups = dict.fromkeys(
            (self._group(parameter.name), sum(1 << axis for axis in parameter.data_axes))
            for parameter in decisions.parameters
            if parameter.trainable and parameter.data_axes
        )
        options = [self._settings_of(mask) for _, mask in groups]
        if math.prod(len(places) for places in options) > self.budget:
            raise TooManyError
        return [dict(zip(groups, c, strict=True)) for c in itertools.product(*options)]

    def _settings_of(self, mask: int) -> list[int]:
        """Settings that do what they say where the data axes are these: a level shards over some of them."""
        settings = list(enumerate(self.configuration.settings.zeros))
        sharding = [
            place
            for place, zero in settings
            if zero.level == 0 or zero.axes is None or any(mask >> axis & 1 for axis in zero.axes)
        ]
        return sharding or [place for place, _ in settings]

    def _group(self, parameter: str) -> int:
        space = self.model.space
        readers = [index for name in space.index.parameter_reads[parameter] for index, _ in space.index.consumers[name]]
        variable = self.model.shared_parameters.get(parameter, readers[0])
        group = self.model.zero_group(variable)
        regions = {int(self.model.region_of[index]) for index in readers}
        assert ({group} == regions) == (len(regions) == 1)
        return group

    def price(self, assignment: Assignment) -> Price:
        """One plan, priced over its Program."""
        program = program_of(self.model, self.configuration, assignment)
        return price_program(program, cluster_of(self.model.space.mesh_shape), self.model.space.price_list)

    def assignments(self) -> Iterator[Assignment]:
        """Every strategy of every operator with every storage of every shared parameter."""
        stored = storable_states(self.model)
        for operators in itertools.product(*(range(self.model.domain(v)) for v in range(self.model.num_operators))):
            for states in itertools.product(*stored.values()):
                yield Assignment(operators=operators, parameters=dict(zip(stored, states, strict=True)))

    def _all(self) -> list[tuple[int, int]]:
        known: dict[object, list[tuple[int, int]]] = {}
        front: list[tuple[int, int]] = []
        recomputes, priced = self.recomputes(), 0
        for assignment in self.assignments():
            decisions = decisions_of(self.model, self.configuration, assignment)
            key = tuple((p.name, p.placement, p.gradient) for p in decisions.parameters)
            if key not in known:
                choices = self.zeros(decisions)
                known[key] = _front(_stored(self.price(replace(assignment, zero=zero))) for zero in choices)
                priced += len(choices)
            ran = _front(_run(self.price(replace(assignment, recompute=recompute))) for recompute in recomputes)
            priced += len(recomputes)
            if priced > self.budget:
                raise TooManyError
            front.extend((a + c, b + d) for a, b in ran for c, d in known[key])
            if len(front) > 10_000:
                front = _front(front)
        return _front(front)

    def check_split(self, assignment: Assignment, recompute: dict[int, int], zero: dict[tuple[int, int], int]) -> None:
        """The price of a plan is the sum of its two parts, each with the other's settings left alone."""
        whole = self.price(replace(assignment, recompute=recompute, zero=zero))
        ran = _run(self.price(replace(assignment, recompute=recompute)))
        stored = _stored(self.price(replace(assignment, zero=zero)))
        assert (whole.objective_ns, whole.memory_bytes) == (ran[0] + stored[0], ran[1] + stored[1])


def _run(price: Price) -> tuple[int, int]:
    """(ns, bytes) of what runs, and of what it keeps."""
    kept = price.activation_bytes + price.cache_bytes + price.input_bytes + price.output_bytes
    return price.compute_ns + price.communication_ns, kept


def _stored(price: Price) -> tuple[int, int]:
    """(ns, bytes) of what is stored, and of keeping it up to date; with what communication takes."""
    memory = price.parameter_bytes + price.gradient_bytes + price.optimizer_bytes + price.unsharded_bytes
    memory += price.workspace_bytes
    return price.gradient_ns + price.optimizer_ns, memory


def _front(prices: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The pairs that no other pair dominates."""
    found: list[tuple[int, int]] = []
    for ns, num_bytes in sorted(prices):
        if not found or num_bytes < found[-1][1]:
            found.append((ns, num_bytes))
    return found


def enumerable_model(graph: Graph, shapes: list[tuple[int, ...]], budget: int) -> Model | None:
    """The model on the first of the meshes whose space is within the budget."""
    for shape in shapes:
        model = make_model(graph, shape)
        if space_size(model) <= budget:
            return model
    return None
