"""Prices of plans whose regions and groups are treated differently, against closed forms."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import replace

import pytest

from tap_planner.cluster import Cluster, load_cluster, parse_mesh
from tap_planner.cost import CollectiveModel, ComputeModel
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.plan import Decisions, ParameterDecision
from tap_planner.program import Compute, Instruction, Phase, Program, instruction_collectives, lower
from tap_planner.schedule import BUCKET_ELEMENTS, rerun_operators
from tap_planner.sharding import local_shape
from tap_planner.simulate import Price, price_program
from tap_planner.simulate.holding import held_for_backward, working_regions
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model, symbols

MODELS = ("gpt2_tiny", "llama_tiny", "t5_tiny", "gshard_moe_tiny")
MESHES: dict[tuple[int, ...], tuple[str, str]] = {(2, 2): ("2x2", "a=2,b=2"), (2, 4): ("2x4", "a=2,b=4")}
MICROBATCHES = 3
everywhere = pytest.mark.parametrize(("name", "shape"), [(name, shape) for name in MODELS for shape in MESHES])


@functools.cache
def graph_of(name: str) -> Graph:
    """A model bound with the batch of one microbatch."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return bind(model, BindOptions(batch=8, dims=dims, training=True, loss=LossOptions(kind="mean")))


def plan(name: str, shape: tuple[int, ...], seed: int, *, recompute: str = "mixed") -> Decisions:
    """A random plan of three microbatches whose groups have settings of their own."""
    building = RandomPlan(graph_of(name), shape, seed, zero=None, recompute=recompute, microbatches=MICROBATCHES)
    return building.build()


def cluster_of(shape: tuple[int, ...]) -> Cluster:
    """A100s for a mesh."""
    return load_cluster(f"{MESHES[shape][0]}:a100-sxm4-80gb")


def priced(name: str, shape: tuple[int, ...], decisions: Decisions) -> Price:
    """What a plan costs."""
    return price_program(lower(graph_of(name), decisions), cluster_of(shape))


def local(parameter: ParameterDecision, shape: tuple[int, ...]) -> int:
    """Elements on the rank at coordinate 0."""
    return math.prod(local_shape(parameter.shape, parameter.placement, shape))


@everywhere
def test_gradients_of_hybrid_groups(name: str, shape: tuple[int, ...]) -> None:
    """Reductions and gathers are the sums, over all parameters, of what each level sends over each set of axes."""
    cluster = cluster_of(shape)
    model = CollectiveModel(cluster, parse_mesh(MESHES[shape][1], cluster))
    for seed in range(4):
        decisions = plan(name, shape, seed)
        expected = 0
        for p in decisions.parameters:
            data = [axis for axis, g in enumerate(p.gradient or ()) if g.is_partial and p.placement[axis].is_replicate]
            over, rest = p.zero_axes, tuple(axis for axis in data if axis not in p.zero_axes)
            size, m = local(p, shape), MICROBATCHES
            shard = -(-size // math.prod(shape[axis] for axis in over))
            if not data:
                continue
            if p.zero_level == 0:
                expected += model.rate_ns("all_reduce", tuple(data), 8 * size)
                continue
            scatter, gather = (
                model.rate_ns("reduce_scatter", over, 8 * size),
                model.rate_ns("all_gather", over, 8 * size),
            )
            expected += scatter * (1 if p.zero_level == 1 else m) + gather * (2 * m if p.zero_level == 3 else 1)
            expected += model.rate_ns("all_reduce", rest, 8 * shard) if rest else 0
        assert priced(name, shape, decisions).gradient_ns == expected


@everywhere
def test_memory_of_hybrid_groups(name: str, shape: tuple[int, ...]) -> None:
    """What a level shards is divided by the ranks of its ZeRO axes alone; in float64 8 + 8 + 16 bytes an element."""
    for seed in range(4):
        decisions = plan(name, shape, seed)
        stored = gradients = states = 0
        for p in decisions.parameters:
            size = local(p, shape)
            shard = -(-size // math.prod(shape[axis] for axis in p.zero_axes))
            if not p.trainable:
                bits = {"int64": 64}.get(p.dtype, 64)
                stored += size * bits // 8
                continue
            stored += 8 * (shard if p.zero_level == 3 else size)
            gradients += 8 * (shard if p.zero_level >= 2 else size)
            states += 16 * (shard if p.zero_level >= 1 else size)
        price = priced(name, shape, decisions)
        assert (price.parameter_bytes, price.gradient_bytes, price.optimizer_bytes) == (stored, gradients, states)


def first_region(name: str, decisions: Decisions, parameter: str) -> int | None:
    """The first region that reads a parameter."""
    for number, region in enumerate(decisions.regions):
        for operator in decisions.operators:
            if operator.id in region.operators:
                for operand in operator.inputs:
                    read = None if operand is None else graph_of(name).tensors[operand.tensor].read
                    if read is not None and read.parameter == parameter:
                        return number
    return None


@pytest.mark.parametrize("name", MODELS[:2])
def test_unsharded_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for whole copies counts for the last occurrence of a run, at the run's highest level, and outside runs for
    what is larger than a bucket."""
    found = 0
    for large in (BUCKET_ELEMENTS, 100):
        monkeypatch.setattr("tap_planner.simulate.additive.BUCKET_ELEMENTS", large)
        for seed in range(6):
            decisions = plan(name, (2, 2), seed)
            occurrences = [r.occurrence for r in decisions.regions if r.run == 0]
            placed = [(first_region(name, decisions, p.name) or 0, p.zero_level) for p in decisions.parameters]
            highest = max(level for number, level in placed if decisions.regions[number].run == 0)
            expected = 0
            for p in decisions.parameters:
                number = first_region(name, decisions, p.name)
                assert number is not None
                region, size = decisions.regions[number], local(p, (2, 2))
                if region.occurrence == max(occurrences) if region.run == 0 else size > large:
                    level = highest if region.run == 0 and p.data_axes else p.zero_level
                    expected += size * {2: 8, 3: 16}.get(level, 0)
            price = priced(name, (2, 2), decisions)
            assert price.unsharded_bytes == expected
            parts = price.parameter_bytes + price.gradient_bytes + price.optimizer_bytes + price.activation_bytes
            assert price.memory_bytes == parts + expected + price.workspace_bytes
            found += expected > 0
    assert found > 2


def without_recompute(decisions: Decisions) -> Decisions:
    """The same plan, keeping everything."""
    return replace(decisions, regions=tuple(replace(region, recompute="none") for region in decisions.regions))


def only(program: Program, instructions: Iterable[Instruction]) -> Program:
    """A Program that does this for a microbatch, and nothing else."""
    chunk = replace(program.chunks[0], forward=tuple(instructions), backward=(), weights=())
    return replace(program, chunks=(chunk,), steps=((),))


def forward_ns(program: Program, shape: tuple[int, ...], operators: list[int]) -> int:
    """Forward time of some operators in a microbatch."""
    alone = only(program, (Compute(Phase.FORWARD, index) for index in operators))
    return price_program(alone, cluster_of(shape)).compute_ns // MICROBATCHES


def collective_ns(program: Program, shape: tuple[int, ...], phase: Phase) -> int:
    """Time of all collectives of a phase."""
    cluster = cluster_of(shape)
    model = CollectiveModel(cluster, parse_mesh(MESHES[shape][1], cluster))
    compute = ComputeModel(cluster.device, "fp64")
    total = 0
    for instruction in program.microbatch:
        for found, kind, axes, elements, dtype in instruction_collectives(program, instruction):
            if found is phase:
                total += model.cost(kind, axes, compute.tensor_bytes(dtype, elements)).ns
    return total


def repeated_edges(name: str, decisions: Decisions) -> set[int]:
    """Redistributions that selective regions make again, from the definition."""
    graph = graph_of(name)
    index_of = {operator.id: index for index, operator in enumerate(graph.operators)}
    again: set[int] = set()
    for region in decisions.regions:
        if region.recompute == "selective":
            again |= rerun_operators(graph, [index_of[op] for op in region.operators])
    made = {output for index in again for output in graph.operators[index].outputs}
    edges: set[int] = set()
    for edge, redistribution in enumerate(decisions.redistributions):
        for consumer in redistribution.consumers if redistribution.tensor in made else ():
            index = index_of[consumer]
            decision = decisions.operators[index]
            needed = [operand is not None and operand.gradient is not None for operand in decision.inputs]
            kept, _ = kept_for_backward(record_of(graph.operators[index].signature), needed)
            for position, operand in enumerate(decision.inputs):
                key = None if operand is None else (operand.tensor, operand.placement, operand.gradient)
                wanted = (redistribution.tensor, redistribution.to, redistribution.gradient)
                if key == wanted and (index in again or position in kept):
                    edges.add(edge)
    return edges


@pytest.mark.parametrize("name", MODELS)
def test_selective_recompute_repeats_what_the_cut_says(name: str) -> None:
    """Compute grows by the forward of what runs again, communication by the redistributions of what it makes."""
    shape, repeated = (2, 2), 0
    for seed in range(3):
        decisions = plan(name, shape, seed, recompute="selective")
        graph = graph_of(name)
        index_of = {operator.id: index for index, operator in enumerate(graph.operators)}
        again = [
            index
            for region in decisions.regions
            if region.recompute == "selective"
            for index in sorted(rerun_operators(graph, [index_of[op] for op in region.operators]))
        ]
        price, plain = (priced(name, shape, each) for each in (decisions, without_recompute(decisions)))
        program = lower(graph, decisions)
        assert price.compute_ns - plain.compute_ns == MICROBATCHES * forward_ns(program, shape, again)
        inside = sum(
            collective_ns(only(program, [Compute(Phase.RECOMPUTE, index)]), shape, Phase.RECOMPUTE) for index in again
        )
        edges = repeated_edges(name, decisions)
        repeated += len(edges)
        moved = only(program, (i for i in program.microbatch if getattr(i, "redistribution", None) in edges))
        expected = MICROBATCHES * (inside + collective_ns(moved, shape, Phase.FORWARD))
        assert price.communication_ns - plain.communication_ns == expected
    assert repeated > 0


def held_bytes(name: str, decisions: Decisions) -> int:
    """Bytes held when forward ends, on one device, floats in two bytes as the cut counts them."""
    types = [
        graph_of(name).tensors[tensor].type
        for tensor, _ in held_for_backward(lower(graph_of(name), decisions), with_working=False)
    ]
    return sum(type.num_elements * (2 if type.is_float else {"int64": 8, "bool": 1}[type.dtype]) for type in types)


@pytest.mark.parametrize("name", MODELS)
def test_selective_recompute_holds_less(name: str) -> None:
    """On one device, where parts are whole as in the cut, selective recompute holds less."""
    for seed in range(4):
        decisions = plan(name, (1, 1), seed, recompute="selective")
        assert held_bytes(name, decisions) < held_bytes(name, without_recompute(decisions))


def test_the_last_occurrence_is_the_working_one() -> None:
    """Whatever its setting; all that its backward reads counts, whatever the settings of the others."""
    decisions = plan("gpt2_tiny", (2, 2), 0)
    occurrences = {number: region.occurrence for number, region in enumerate(decisions.regions) if region.run == 0}
    last = max(occurrences, key=lambda number: occurrences[number])
    assert working_regions(decisions) == {last}
    prices = []
    for setting in ("none", "selective", "full"):
        regions = tuple(
            replace(region, recompute=setting if number == last else "none")
            for number, region in enumerate(decisions.regions)
        )
        prices.append(priced("gpt2_tiny", (2, 2), replace(decisions, regions=regions)).activation_bytes)
    assert prices[0] <= min(prices[1:])
