"""Attention in a ring as a choice of the search: brute force agrees; long sequences in little memory are split so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import onnx.parser
import pytest

from tap_planner import api
from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind
from tap_planner.plan import Constraint, PlanDocument, PlanOptions, PlanRequest, expand
from tap_planner.program import Phase, collectives, lower
from tap_planner.simulate import price_program
from tests.graph.models import DATA
from tests.search.brute_force import enumerate_all, space_size
from tests.search.building import cluster_of, configuration_of, make_model, program_of, random_assignments, searched
from tests.search.models import model_file
from tests.search.test_exactness import check_with_limit, check_without_limit

pytestmark = pytest.mark.usefixtures("without_buffers")

_ATTENTION = """<ir_version: 10, opset_import: ["" : 23]>
g (float[batch, {length}, {width}] x) => (float[batch, {length}, {width}] y) {{
    q = Mul(x, w)
    y = Attention<q_num_heads = {heads}, kv_num_heads = {heads}, is_causal = 1>(q, {keys}, {keys})
}}
"""


def attention(*, length: int, width: int, heads: int = 1, batch: int = 1, training: bool, keys: str = "q") -> Graph:
    """The input scaled, and a causal attention of that over itself or over the input."""
    model = onnx.parser.parse_model(_ATTENTION.format(length=length, width=width, heads=heads, keys=keys))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(width, np.float32), "w"))
    file = ModelFile(path=model_file(model.graph).path, proto=model, sha256="0" * 64, opset=23)
    options = BindOptions(batch=batch, training=training, ends=not training, loss=LossOptions(kind="mean"))
    return bind(file, options)


@pytest.mark.parametrize(
    ("shape", "training", "keys"), [((2,), True, "q"), ((2, 2), False, "q"), ((2, 2), True, "x"), ((4,), True, "q")]
)
def test_brute_force(shape: tuple[int, ...], training: bool, keys: str) -> None:
    """Objective, memory and bound are those of every assignment priced over its Program, with and without a limit."""
    graph = attention(length=2048, width=4, training=training, keys=keys)
    model = make_model(graph, shape)
    assert space_size(model) < 4000
    assert any(choice.kind == "ring" for found in model.space.operator(1).strategies for choice in found.choices)
    configuration = configuration_of(training=training)
    truth = enumerate_all(model, configuration)
    check_without_limit(model, configuration, truth)
    for share in (0.0, 0.3, 0.8) if training else ():
        check_with_limit(model, configuration, truth, share)


def test_search_and_program_price_rings_alike() -> None:
    """Random assignments: what the tables charge for forward and backward is what the Program's instructions cost, and
    recomputed rings cost their forward again."""
    graph = attention(length=64, width=8, heads=2, batch=2, training=True)
    model = make_model(graph, (2, 4))
    phases: dict[Phase, int] = {}
    for assignment in random_assignments(model, 0, 60, per_class=False):
        program = program_of(model, configuration_of(), assignment)
        price = price_program(program, cluster_of((2, 4)))
        operators = sum(
            int(model.space.operator(index).forward_ns[choice] + model.space.operator(index).backward_ns[choice])
            for index, choice in enumerate(assignment.operators)
        )
        rings = [entry for entry in collectives(program) if entry.kind == "ring_exchange"]
        moved = sum(
            model.space.collectives.cost(entry.kind, entry.axes, 4 * entry.elements).ns * entry.count for entry in rings
        )
        assert operators == price.compute_ns + moved
        for entry in rings:
            phases[entry.phase] = phases.get(entry.phase, 0) + entry.count
    assert phases[Phase.BACKWARD] == 2 * phases[Phase.FORWARD] > 0


def test_keys_and_values_are_passed_on_and_not_gathered() -> None:
    """One head, one long text: in little memory training passes keys round, with room for them it gathers them."""
    graph = attention(length=65536, width=128, training=True)
    model, configuration = make_model(graph, (8,)), configuration_of()
    roomy = searched(model, configuration, None)
    whole = 65536 * 128 * 4
    tight = searched(model, configuration, roomy.memory_bytes - whole // 2)
    chosen = [result.decisions.operators[1].strategy for result in (roomy, tight)]
    assert chosen == [("s",), ("ring",)]
    assert roomy.memory_bytes - tight.memory_bytes == whole  # the gathered copy that is keys and values
    assert roomy.objective_ns < tight.objective_ns
    kinds = {entry.kind for entry in collectives(lower(graph, tight.decisions))}
    assert "ring_exchange" in kinds and "all_gather" not in kinds


def planned(**options: object) -> PlanDocument:
    """A small LLaMA with fused attention, of two key heads: one text of 131072 tokens on eight devices."""
    return api.make_plan(
        PlanRequest(
            model=DATA / "hm_llama_tiny_fused.onnx",
            cluster="1x8:h100-sxm5-80gb",
            options=PlanOptions(batch=1, dims={"seq": 131072}, **options),  # type: ignore[arg-type]
        )
    )


def choices_of_attention(document: PlanDocument) -> set[str]:
    """What attention does on any axis."""
    return {name for d in expand(document).operators if d.type == "Attention" for name in d.strategy}


@pytest.mark.full
def test_a_long_text_in_little_memory_is_trained_in_rings() -> None:
    """The search itself splits the sequence; with 84 MiB per device it takes rings, and pays 4 %."""
    roomy, tight = planned(), planned(max_memory_bytes=84 * 2**20)
    assert "s" in choices_of_attention(roomy) and "ring" not in choices_of_attention(roomy)
    assert "ring" in choices_of_attention(tight)
    assert tight.predicted.total_memory_bytes < 84 * 2**20 < roomy.predicted.total_memory_bytes
    assert roomy.certificate.objective_ns < tight.certificate.objective_ns < 1.05 * roomy.certificate.objective_ns


def test_rules_name_rings() -> None:
    """A rule may ask for rings by name or as a split of the sequence, and forbidding the axis forbids them."""
    rule = Constraint(kind="operator", pattern="Attention", axis="cp")
    named = planned(mesh="cp=8", constraints=(replace(rule, value="ring"),))
    assert choices_of_attention(named) == {"ring"}
    sequence = planned(mesh="cp=8", constraints=(replace(rule, value="sequence"),))
    assert choices_of_attention(sequence) <= {"s", "ring"}
    rings = (replace(rule, value="sequence"), replace(rule, value="s", forbid=True))
    assert choices_of_attention(planned(mesh="cp=8", constraints=rings)) == {"ring"}
    forbidden = planned(mesh="cp=8", constraints=(replace(rule, forbid=True),))
    assert choices_of_attention(forbidden) == {"none"}


@pytest.mark.full
def test_rings_save_memory_that_costs_time() -> None:
    """LLaMA 3 8B, one text of 131072 tokens on 2x8 H100 along one axis, at ZeRO 1 and nothing recomputed: every
    attention runs in a ring; without rings what else fits takes a fifth longer."""

    def plan(*rules: Constraint) -> PlanDocument:
        options = PlanOptions(batch=1, dims={"seq": 131072}, mesh="cp=16", zero=1, recompute="none", constraints=rules)
        model = DATA / "hm_llama3_8b_fused.onnx"
        return api.make_plan(PlanRequest(model=model, cluster="2x8:h100-sxm5-80gb", options=options))

    free = plan()
    without = plan(Constraint(kind="operator", pattern="Attention", axis="cp", value="ring", forbid=True))
    assert choices_of_attention(free) == {"ring"}
    assert "ring" not in choices_of_attention(without)
    assert without.certificate.bound_ns > 1.2 * free.certificate.objective_ns
