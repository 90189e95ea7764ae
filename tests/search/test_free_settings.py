"""Recomputation and ZeRO chosen region by region: the search's optimum is that of brute force over all of it."""

from __future__ import annotations

import random
import zlib
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, Phase, assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tap_planner.cost import PriceList
from tap_planner.errors import InfeasibleError
from tap_planner.graph import Graph, Operator
from tap_planner.operators import FactorRule
from tap_planner.program import lower
from tap_planner.search import Configuration, Model, Recompute, StrategyFilter, Weights, least_memory
from tap_planner.sharding import Strategy
from tap_planner.simulate import price_program
from tests.search.brute_force import BruteForce, FreeSpace, TooManyError, space_size
from tests.search.building import (
    cluster_of,
    free_configuration,
    make_model,
    program_of,
    random_assignments,
    searched,
    solver_of,
)
from tests.search.models import Nodes, bound, model_file
from tests.search.small_graphs import repeated_graphs, small_graphs

SCALE = 12
CHECKS = [HealthCheck.filter_too_much, HealthCheck.too_slow, HealthCheck.data_too_large]
PHASES = [Phase.explicit, Phase.reuse, Phase.generate]
"""Without shrinking: an example takes a second."""
SHAPES: list[tuple[int, ...]] = [(2, 2), (4,), (2,)]
NONE, SELECTIVE, FULL = Recompute
RECOMPUTES = [(NONE, SELECTIVE, FULL), (NONE, FULL), (NONE, SELECTIVE), (SELECTIVE, FULL), (FULL,), (SELECTIVE,)]
LEVELS = [(0, 1, 2, 3), (0, 3), (0, 2), (1, 3), (0, 1), (2, 3), (3,)]


class Sparse(StrategyFilter):
    """Leaves every kind of operator a random part of its strategies, and that which splits nothing.

    Args:
        seed: which part.
        keep: the percentage.
    """

    def __init__(self, seed: int, keep: int) -> None:
        super().__init__()
        self.seed, self.keep = seed, keep

    def allows(self, operator: Operator, strategy: Strategy, rule: FactorRule) -> bool:
        """Whether the strategy is left."""
        names = strategy.names(rule)
        if set(names) <= {"none"}:
            return True
        shapes = [output.shape for output in operator.signature.outputs]
        return zlib.crc32(repr((self.seed, operator.type, shapes, names)).encode()) % 100 < self.keep


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """How a graph is searched."""

    shape: tuple[int, ...]
    recomputes: tuple[Recompute, ...]
    levels: tuple[int, ...]
    hybrid: bool
    microbatches: int
    share: float
    """Where the memory limit lies between the least memory and that of the fastest plan."""
    seed: int
    optimizer_states: str = "fp32"


def draws(optimizer_states: str = "fp32") -> st.SearchStrategy[Drawn]:
    """Ways to search, all with the same moments."""
    return st.builds(
        Drawn,
        shape=st.sampled_from(SHAPES),
        recomputes=st.sampled_from(RECOMPUTES),
        levels=st.sampled_from(LEVELS),
        hybrid=st.booleans(),
        microbatches=st.sampled_from([1, 1, 2]),
        share=st.floats(0, 1),
        seed=st.integers(0, 1 << 30),
        optimizer_states=st.just(optimizer_states),
    )


DRAWN = draws()


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One graph on one mesh with what may be chosen."""

    model: Model
    rules: StrategyFilter
    configuration: Configuration
    truth: BruteForce

    def check(self, share: float) -> None:
        """Optimum and bound without a limit, at three limits, and below the least memory."""
        truth = self.truth
        solver = solver_of(self.model, self.configuration)
        fastest = solver.optimum(Weights(1, 0))
        assert (fastest.ns, fastest.bound) == (truth.least_ns, SCALE * truth.least_ns)
        settings = self.configuration.settings
        rooms = [replace(self.configuration, settings=settings.up_to(level)) for level in settings.levels]
        assert min(least_memory(solver_of(self.model, room))[0] for room in rooms) <= truth.least_bytes
        between = truth.least_bytes + int(share * (truth.bytes_of_fastest - truth.least_bytes))
        for limit in dict.fromkeys((None, truth.least_bytes, between, truth.bytes_of_fastest)):
            self._check_limit(limit)
        with pytest.raises(InfeasibleError) as caught:
            searched(self.model, self.configuration, truth.least_bytes - 1, self.rules)
        assert caught.value.least_memory_bytes is not None
        assert caught.value.least_memory_bytes <= truth.least_bytes

    def _check_limit(self, limit: int | None) -> None:
        best = self.truth.least_ns if limit is None else self.truth.least_within(limit)
        result = searched(self.model, self.configuration, limit, self.rules)
        assert (limit, result.objective_ns, result.bound_ns) == (limit, best, best)
        assert limit is None or result.memory_bytes <= limit
        cluster = cluster_of(self.model.space.mesh_shape)
        price = price_program(lower(self.model.graph, result.decisions), cluster, self.model.space.price_list)
        assert (price.objective_ns, price.memory_bytes) == (result.objective_ns, result.memory_bytes)


def case_of(graph: Graph, drawn: Drawn, budget: int, prices: PriceList = PriceList.TIME) -> Case | None:
    """A graph with as many strategies as can be enumerated."""
    training = graph.loss is not None
    configuration = free_configuration(
        drawn.recomputes,
        drawn.levels,
        len(drawn.shape),
        hybrid=drawn.hybrid,
        microbatches=drawn.microbatches if training else 1,
        training=training,
        optimizer_states=drawn.optimizer_states,
    )
    for keep in (100, 60, 40, 25, 15, 8, 4, 2):
        rules = Sparse(drawn.seed, keep)
        model = make_model(graph, drawn.shape, strategy_filter=rules, prices=prices)
        space = FreeSpace(model, configuration, budget)
        if space_size(model) * len(space.recomputes()) > budget:
            continue
        try:
            return Case(model=model, rules=rules, configuration=configuration, truth=space.enumerate())
        except TooManyError:
            continue
    return None


def check(graph: Graph, drawn: Drawn, budget: int) -> None:
    """Everything about one graph."""
    case = case_of(graph, drawn, budget)
    assume(case is not None)
    assert case is not None
    case.check(drawn.share)


# -- graphs ----------------------------------------------------------------------------------------------------


def images(layers: int, *, joined: bool) -> Graph:
    """Repeats of a convolution, a normalisation by a weight and an activation, on small images."""
    graph, name = Nodes(), "x"
    for layer in range(layers):
        weight = graph.weight(f"c{layer}", 2, 2, 3, 3)
        inner = graph.add("Conv", [name, weight], f"conv{layer}", kernel_shape=[3, 3], pads=[1] * 4)
        inner = graph.add("Mul", [inner, graph.weight(f"s{layer}", 2, 1, 1)], f"scaled{layer}")
        inner = graph.add("Relu", [inner], f"relu{layer}")
        name = graph.add("Add", [inner, name], f"sum{layer}") if joined else inner
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 2, 4, 4])]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
    return bound(model_file(helper.make_graph(graph.nodes, "images", inputs, outputs, graph.initializers)), batch=4)


def attentions(layers: int, *, mask: str, training: bool = True) -> Graph:
    """Repeats of attention of one head without a value projection, with a mask that all share: an ``input``, made of
    inputs (``made``), or ``learned``."""
    graph, name = Nodes(), "x"
    if mask == "made":
        graph.add("Relu", ["given"], "mask")
    elif mask == "learned":
        graph.add("Mul", ["given", graph.weight("m", 4)], "mask")
    for layer in range(layers):
        query = graph.add("MatMul", [name, graph.weight(f"q{layer}", 4, 4)], f"query{layer}")
        key = graph.add("Transpose", [name], f"key{layer}", perm=[0, 2, 1])
        scores = graph.add("MatMul", [query, key], f"scores{layer}")
        masked = graph.add("Add", [scores, "given" if mask == "input" else "mask"], f"masked{layer}")
        weights = graph.add("Softmax", [masked], f"weights{layer}", axis=-1)
        name = graph.add("MatMul", [weights, name], f"mixed{layer}")
    inputs = [
        helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 4]),
        helper.make_tensor_value_info("given", TensorProto.FLOAT, [4, 4]),
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)]
    file = model_file(helper.make_graph(graph.nodes, "attentions", inputs, outputs, graph.initializers))
    return bound(file, batch=4, training=training)


GRAPHS = st.one_of(
    st.builds(images, st.integers(2, 3), joined=st.booleans()),
    st.builds(attentions, st.integers(2, 3), mask=st.sampled_from(["input", "made", "learned"])),
    st.builds(attentions, st.just(2), mask=st.sampled_from(["input", "made"]), training=st.just(False)),
)


# -- tests -----------------------------------------------------------------------------------------------------


@given(repeated_graphs(2), DRAWN)
@settings(max_examples=10, suppress_health_check=CHECKS, phases=PHASES)
def test_repeated_blocks(graph: Graph, drawn: Drawn) -> None:
    """A block that repeats, with masks and parameters that all repeats share."""
    check(graph, drawn, 400)


@given(GRAPHS, DRAWN)
@settings(max_examples=10, suppress_health_check=CHECKS, phases=PHASES)
def test_networks(graph: Graph, drawn: Drawn) -> None:
    """Convolutions, attention with a shared mask, inference."""
    check(graph, drawn, 400)


@given(small_graphs(3), DRAWN)
@settings(max_examples=10, suppress_health_check=CHECKS, phases=PHASES)
def test_small_graphs(graph: Graph, drawn: Drawn) -> None:
    """Graphs without repeats: only ZeRO has a choice."""
    check(graph, drawn, 400)


@given(GRAPHS, DRAWN)
@settings(max_examples=10, suppress_health_check=CHECKS, phases=PHASES)
def test_prices_split_in_two(graph: Graph, drawn: Drawn) -> None:
    """Settings of recomputation and of ZeRO do not touch each other's part of the price: brute force relies on it."""
    chance = random.Random(drawn.seed)
    model = make_model(graph, drawn.shape, strategy_filter=Sparse(drawn.seed, 50))
    training = graph.loss is not None
    configuration = free_configuration(drawn.recomputes, drawn.levels, len(drawn.shape), training=training)
    space = FreeSpace(model, configuration, 1 << 20)
    for assignment in random_assignments(model, drawn.seed, 3, per_class=False):
        decisions = program_of(model, configuration, assignment).decisions
        recompute, zero = chance.choice(space.recomputes()), chance.choice(space.zeros(decisions))
        space.check_split(assignment, recompute, zero)


@given(st.one_of(repeated_graphs(2), GRAPHS), draws("bf16"))
@settings(max_examples=6, suppress_health_check=CHECKS, phases=PHASES)
def test_moments_in_bfloat16(graph: Graph, drawn: Drawn) -> None:
    """With smaller moments time, memory and what fits are others, and the optimum is still that of brute force."""
    check(graph, drawn, 400)


@pytest.mark.full
@given(st.one_of(repeated_graphs(3), GRAPHS, small_graphs(4)), draws("bf16"))
@settings(max_examples=60, suppress_health_check=CHECKS, phases=PHASES)
def test_many_with_moments_in_bfloat16(graph: Graph, drawn: Drawn) -> None:
    """The same for many graphs."""
    check(graph, drawn, 800)


@pytest.mark.full
@given(st.one_of(repeated_graphs(3), GRAPHS), DRAWN)
@settings(max_examples=60, suppress_health_check=CHECKS, phases=PHASES)
def test_many_repeated_blocks(graph: Graph, drawn: Drawn) -> None:
    """Two and three repeats, over all settings."""
    check(graph, drawn, 1000)


def test_the_least_memory_is_that_of_the_least_room() -> None:
    """Room for a lower ZeRO level in runs may need less than any plan with room for the highest."""
    drawn = Drawn(
        shape=(2,),
        recomputes=(Recompute.FULL,),
        levels=(2, 3),
        hybrid=False,
        microbatches=2,
        share=0.5,
        seed=3,
    )
    case = case_of(images(3, joined=False), drawn, 1000)
    assert case is not None
    case.check(drawn.share)


@pytest.mark.full
@given(small_graphs(4), DRAWN)
@settings(max_examples=60, suppress_health_check=CHECKS, phases=PHASES)
def test_many_small_graphs(graph: Graph, drawn: Drawn) -> None:
    """Graphs without repeats."""
    check(graph, drawn, 600)
