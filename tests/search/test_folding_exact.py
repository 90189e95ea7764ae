"""The folded optimum is that of unfolded elimination: chains of repeats lose nothing."""

from __future__ import annotations

import functools

import pytest

from tap_planner.graph import Graph
from tap_planner.search import Model, Weights
from tap_planner.search.places import Places
from tests.search.building import configuration_of, make_model, solver_of
from tests.search.models import bound, decoder

SCALE = 12
KINDS = ("gpt", "llama", "shared")
"""``llama`` has grouped-query attention, ``shared`` one mask that all layers give a gradient, and a tied embedding."""


@functools.cache
def graph_of(kind: str, layers: int) -> Graph:
    """A decoder bound for training."""
    if kind == "shared":
        model = decoder("gpt", layers=layers, learned_mask=True, tied=True)
    else:
        model = decoder(kind, layers=layers, kv_heads=2 if kind == "llama" else 4)
    return bound(model, batch=32, dims={"seq": 16})


def unfolded_model(graph: Graph, shape: tuple[int, ...], folded: Model) -> Model:
    """A model whose operators are all variables of their own, in the regions of a folded one."""
    space = make_model(graph, shape, folded=False).space
    places = Places(space.folded)
    places.region_of = folded.places.region_of
    places.run_regions = folded.places.run_regions
    return Model(space, places)


def check(kind: str, layers: int, shape: tuple[int, ...], zero: int, recompute: str) -> None:
    """Both ways give the same proven optimum, and the same price of the folded one's assignment."""
    graph = graph_of(kind, layers)
    configuration = configuration_of(zero=zero, recompute=recompute)
    model = make_model(graph, shape)
    assert [run.count for run in model.runs_in_use] == [layers]
    folded = solver_of(model, configuration).optimum(Weights(1, 0))
    unfolded_solver = solver_of(unfolded_model(graph, shape, model), configuration)
    unfolded = unfolded_solver.optimum(Weights(1, 0))
    assert (folded.bound, unfolded.bound) == (SCALE * folded.ns, SCALE * unfolded.ns)
    assert folded.ns == unfolded.ns
    assert folded.assignment is not None
    assert unfolded_solver.price(folded.assignment) == (folded.ns, folded.num_bytes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layers", "zero", "recompute"), [(2, 0, "none"), (4, 2, "full")])
def test_folding_loses_nothing(kind: str, layers: int, zero: int, recompute: str) -> None:
    """Two and four layers on 2 x 4, with and without recomputation."""
    check(kind, layers, (2, 4), zero, recompute)


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layers", [2, 4, 8])
@pytest.mark.parametrize("shape", [(2, 4), (4, 8)])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("zero", [0, 2])
def test_folding_loses_nothing_anywhere(
    kind: str, layers: int, shape: tuple[int, ...], recompute: str, zero: int
) -> None:
    """Two, four and eight layers on two meshes, under every combination of recomputation and ZeRO 0 and 2."""
    check(kind, layers, shape, zero, recompute)
