"""The search's tables charge what the lowered Program does, on real models and random plans."""

from __future__ import annotations

import pytest

from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.simulate import price_program
from tests.graph.models import data_model, symbols
from tests.search.building import cluster_of, configuration_of, make_model, program_of, random_assignments, solver_of
from tests.search.models import decoder

MODELS = ("gpt2_tiny", "bert_tiny", "llama_tiny", "t5_tiny", "gshard_moe_tiny", "hm_mixtral_tiny", "shared_mask")
"""``shared_mask``: three layers that read one mask and give it a gradient, with a tied embedding."""
BATCH = 8


def model_graph(name: str, microbatches: int, *, training: bool = True) -> Graph:
    """A model bound with the batch of one microbatch."""
    shared = name == "shared_mask"
    model = decoder("gpt", layers=3, learned_mask=True, tied=True) if shared else data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq", "past") if dim in symbols(model)}
    loss = LossOptions(kind="mean")
    options = BindOptions(batch=BATCH // microbatches, dims=dims, training=training, ends=not training, loss=loss)
    return bind(model, options)


def check(name: str, shape: tuple[int, ...], zero: int, recompute: str, microbatches: int, count: int) -> None:
    """Random strategies per operator and per class: equal objective and equal memory."""
    graph = model_graph(name, microbatches)
    model = make_model(graph, shape)
    configuration = configuration_of(zero=zero, recompute=recompute, microbatches=microbatches)
    solver = solver_of(model, configuration)
    for per_class in (True, False):
        for assignment in random_assignments(model, zero, count, per_class=per_class):
            price = price_program(program_of(model, configuration, assignment), cluster_of(shape))
            assert solver.price(assignment) == (price.objective_ns, price.memory_bytes)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("zero", "recompute", "microbatches"), [(1, "full", 1), (3, "none", 2)])
def test_tables_charge_the_program(name: str, zero: int, recompute: str, microbatches: int) -> None:
    """On a mesh of 2 x 2 the search's price of random plans is that of their Programs."""
    check(name, (2, 2), zero, recompute, microbatches, 2)


@pytest.mark.full
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("shape", [(2, 2), (2, 4)])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_tables_charge_the_program_everywhere(
    name: str, shape: tuple[int, ...], recompute: str, microbatches: int
) -> None:
    """The same for every ZeRO level, recompute setting and microbatch count, on two meshes."""
    for zero in range(4):
        check(name, shape, zero, recompute, microbatches, 2)


@pytest.mark.parametrize("name", [*MODELS, "llama_decode_tiny"])
def test_tables_charge_the_program_of_inference(name: str) -> None:
    """The same in inference, where nothing is kept for backward, and what goes in, comes out and stays counts."""
    model = make_model(model_graph(name, 1, training=False), (2, 2))
    configuration = configuration_of(training=False)
    solver = solver_of(model, configuration)
    for assignment in random_assignments(model, 0, 2, per_class=False):
        price = price_program(program_of(model, configuration, assignment), cluster_of((2, 2)))
        assert solver.price(assignment) == (price.objective_ns, price.memory_bytes)
        assert price.gradient_ns == price.optimizer_ns == price.activation_bytes == price.gradient_bytes == 0
