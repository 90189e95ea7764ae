"""Certificates of plans whose decisions are false.

The false plans here are priced as they are and claim no more than that: only their decisions give them away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from tap_planner import api
from tap_planner.cluster import cluster_from_json
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.legality import unfounded
from tap_planner.plan import (
    BlockEntry,
    OperandDecision,
    OperatorDecision,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    RedistributionDecision,
    RedistributionEntry,
    expand,
    from_text,
    parse_rule,
    to_text,
    with_digests,
)
from tap_planner.program import lower
from tap_planner.requests import prepare
from tap_planner.sharding import PARTIAL, REPLICATE, Step
from tap_planner.simulate import price_program
from tests.apply.random_plans import RandomPlan
from tests.graph.models import DATA, data_model

MODEL = DATA / "hm_gpt_tiny.onnx"
CLUSTER = str(DATA / "clusters" / "quick-2x2.yaml")
GPT = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, mesh="dp=2,tp=2", recompute="none", max_memory_bytes="none")
RULES = tuple(parse_rule(text, origin="--fix") for text in ("*c_fc*: tp=column", "*mlp.c_proj*: tp=row"))
SPLIT = replace(GPT, precision="fp32", zero=1, constraints=RULES)
Tamper = Callable[[PlanDocument], PlanDocument]


@cache
def planned(name: str) -> PlanDocument:
    """A plan, as read from its text."""
    options = {"free": replace(GPT, zero=0), "zero": SPLIT}[name]
    made = api.make_plan(PlanRequest(model=MODEL, cluster=CLUSTER, options=options))
    return from_text(to_text(made))


def repriced(document: PlanDocument) -> PlanDocument:
    """The plan with the figures that its own program has: nothing about them is false."""
    decisions = expand(document)
    cluster = cluster_from_json(document.cluster)
    graph = prepare(MODEL, cluster, document.options).graphs(decisions.microbatches)
    price = price_program(lower(graph, decisions), cluster)
    certificate = document.certificate
    bound = min(certificate.bound_ns, price.objective_ns)
    gap = price.objective_ns - bound
    assert certificate.lagrangian_bound_ns is not None
    kinds = {
        "parameters": price.parameter_bytes,
        "gradients": price.gradient_bytes,
        "optimizer": price.optimizer_bytes,
        "activations": price.activation_bytes,
        "unsharded": price.unsharded_bytes,
    }
    return with_digests(
        replace(
            document,
            predicted=replace(document.predicted, memory_bytes=kinds),
            certificate=replace(
                certificate,
                objective_ns=price.objective_ns,
                bound_ns=bound,
                lagrangian_bound_ns=min(certificate.lagrangian_bound_ns, price.objective_ns),
                gap_basis_points=-(-gap * 10_000 // bound),
                status="feasible" if gap else "optimal",
            ),
        )
    )


def folded(document: PlanDocument, **changes: Any) -> PlanDocument:
    """A change of the folded decisions."""
    return replace(document, folded=replace(document.folded, **changes))


def edges(document: PlanDocument, change: Callable[[RedistributionDecision], RedistributionDecision | None]) -> Any:
    """A change of the first redistribution that ``change`` does not leave as it is (None)."""
    entries: list[RedistributionEntry] = list(document.folded.redistributions)
    for number, entry in enumerate(entries):
        made = change(entry.decision)
        if made is not None:
            entries[number] = replace(entry, decision=made)
            return folded(document, redistributions=tuple(entries))
    raise AssertionError("no redistribution to change")


def operators(document: PlanDocument, change: Callable[[OperatorDecision], OperatorDecision | None]) -> PlanDocument:
    """A change of the first operator that ``change`` does not leave as it is (None)."""
    blocks: list[BlockEntry] = list(document.folded.blocks)
    for number, block in enumerate(blocks):
        for place, operator in enumerate(block.operators):
            made = change(operator)
            if made is not None:
                listed = (*block.operators[:place], made, *block.operators[place + 1 :])
                blocks[number] = replace(block, operators=listed)
                return folded(document, blocks=tuple(blocks))
    raise AssertionError("no operator to change")


def parameters(document: PlanDocument, select: Callable[[Any], bool], **changes: Any) -> PlanDocument:
    """A change of the first parameter that is selected."""
    entries = list(document.folded.parameters)
    number = next(number for number, entry in enumerate(entries) if select(entry.decision))
    entries[number] = replace(entries[number], decision=replace(entries[number].decision, **changes))
    return folded(document, parameters=tuple(entries))


# -- decisions that are false ------------------------------------------------------------------------------------


def without_backward(document: PlanDocument) -> PlanDocument:
    """The gradient is not brought back: the collective is saved."""
    return edges(document, lambda edge: replace(edge, backward=()) if edge.backward else None)


def half_the_backward(document: PlanDocument) -> PlanDocument:
    """The gradient is summed where it should be summed and cut."""

    def change(edge: RedistributionDecision) -> RedistributionDecision | None:
        if not edge.backward or edge.backward[-1].kind not in ("all_reduce", "reduce_scatter", "all_gather"):
            return None
        last = edge.backward[-1]
        other = Step(kind="keep_first", axis=last.axis, source=REPLICATE, target=PARTIAL)
        return replace(edge, backward=(*edge.backward, other) if last.target.is_replicate else edge.backward[:-1])

    return edges(document, change)


def free_steps(document: PlanDocument) -> PlanDocument:
    """A collective that is called by the name of a local step, which costs nothing."""

    def change(edge: RedistributionDecision) -> RedistributionDecision | None:
        steps = tuple(replace(step, kind="slice") for step in edge.backward)
        return replace(edge, backward=steps) if any(not step.is_local for step in edge.backward) else None

    return edges(document, change)


def free_steps_forward(document: PlanDocument) -> PlanDocument:
    """The same in forward."""

    def change(edge: RedistributionDecision) -> RedistributionDecision | None:
        steps = tuple(replace(step, kind="slice") for step in edge.forward)
        return replace(edge, forward=steps) if any(not step.is_local for step in edge.forward) else None

    return edges(document, change)


def other_consumers(document: PlanDocument) -> PlanDocument:
    """An operator that does not read so is listed."""

    def change(edge: RedistributionDecision) -> RedistributionDecision | None:
        return replace(edge, consumers=edge.consumers[:-1]) if len(edge.consumers) > 1 else None

    return edges(document, change)


def without_gradients(document: PlanDocument) -> PlanDocument:
    """An operand's gradient is not made: its backward is saved."""

    def change(operator: OperatorDecision) -> OperatorDecision | None:
        if operator.type != "Gelu" and operator.type != "Softmax":
            return None
        inputs = tuple(None if o is None else replace(o, gradient=None) for o in operator.inputs)
        return replace(operator, inputs=inputs) if inputs != operator.inputs else None

    return operators(document, change)


def other_gradients(document: PlanDocument) -> PlanDocument:
    """A gradient that is a sum still to be done is said to be whole."""

    def change(operator: OperatorDecision) -> OperatorDecision | None:
        inputs: list[OperandDecision | None] = list(operator.inputs)
        for place, operand in enumerate(inputs):
            if operand is not None and operand.gradient is not None and PARTIAL in operand.gradient:
                whole = tuple(REPLICATE if p.is_partial else p for p in operand.gradient)
                inputs[place] = replace(operand, gradient=whole)
                return replace(operator, inputs=tuple(inputs))
        return None

    return operators(document, change)


def untrained(document: PlanDocument) -> PlanDocument:
    """A parameter that is not trained needs no gradient and no states."""
    return parameters(document, lambda p: p.trainable, trainable=False, gradient=None, zero_level=0, zero_axes=())


def no_sum(document: PlanDocument) -> PlanDocument:
    """A gradient that is whole needs no reduction."""

    def partial(p: Any) -> bool:
        return p.gradient is not None and PARTIAL in p.gradient and not p.zero_level

    found = next(entry.decision for entry in document.folded.parameters if partial(entry.decision))
    whole = tuple(REPLICATE if g.is_partial else g for g in found.gradient or ())
    return parameters(document, partial, gradient=whole)


def unreduced(document: PlanDocument) -> PlanDocument:
    """Parameters are in no bucket, and there are no buckets."""
    entries = tuple(replace(entry, buckets=(None,) * len(entry.buckets)) for entry in document.folded.parameters)
    return folded(document, parameters=entries, buckets=())


def other_level(document: PlanDocument) -> PlanDocument:
    """One level for all was asked for, and some parameters have another."""
    entries = tuple(
        replace(entry, decision=replace(entry.decision, zero_level=0, zero_axes=()))
        for entry in document.folded.parameters
    )
    buckets = tuple(replace(bucket, zero_level=0, zero_axes=()) for bucket in document.folded.buckets)
    return folded(document, parameters=entries, buckets=buckets)


def no_repeats(document: PlanDocument) -> PlanDocument:
    """Layers are no occurrences of a run: no working set."""
    return folded(document, repeats=tuple(replace(entry, run=None) for entry in document.folded.repeats))


@pytest.mark.parametrize(
    ("plan", "tamper", "message"),
    [
        ("zero", without_backward, "the backward steps of"),
        ("zero", half_the_backward, "the backward steps of"),
        ("zero", free_steps, "the backward steps of"),
        ("zero", free_steps_forward, "do not lead to their destination"),
        ("zero", other_consumers, "is not read so by the operators that are listed"),
        ("zero", without_gradients, "the gradients of its operands are not those of strategy"),
        ("zero", other_gradients, "the gradients of its operands are not those of strategy"),
        ("zero", untrained, "the model says otherwise"),
        ("free", no_sum, "nothing brings the gradient of"),
        ("free", unreduced, "its gradient belongs to"),
        ("zero", other_level, "is no setting of the space"),
        ("zero", no_repeats, "they are not the repeats of the model"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_false_decisions_are_found(plan: str, tamper: Tamper, message: str) -> None:
    """Each is found, as a finding about decisions."""
    document = planned(plan)
    assert repriced(document).certificate == document.certificate
    report = api.verify_certificate(repriced(tamper(document)), MODEL)
    assert any(message in finding for finding in report.findings), report.findings


def test_true_decisions_pass() -> None:
    """What the tests above change holds as it is."""
    for name in ("free", "zero"):
        assert api.verify_certificate(planned(name), MODEL).findings == ()


MODELS = ("gpt2_tiny", "llama_tiny", "t5_tiny", "resnet_small", "hm_mixtral_tiny", "llama_decode_tiny")


def graph_of(name: str) -> Graph:
    """A small model, to train or to decode."""
    training = "decode" not in name
    dims = {"t5_tiny": {"seq": 8, "dec_seq": 6}, "llama_decode_tiny": {"past": 5}, "resnet_small": {}}
    options = BindOptions(
        batch=4,
        dims=dims.get(name, {"seq": 8}),
        training=training,
        ends=not training,
        loss=LossOptions(kind="mean"),
    )
    return bind(data_model(name), options)


@pytest.mark.parametrize("name", MODELS)
def test_any_strategies_make_a_legal_plan(name: str) -> None:
    """Random strategies and storage, with what follows from them, made without the search: nothing is wrong with them.

    Their steps are shortest ones, not cheapest, and their buckets small, which other plans may not have.
    """
    graph = graph_of(name)
    for seed, shape in ((0, (2, 2)), (1, (2, 4)), (2, (4,))):
        decisions = RandomPlan(graph, shape, seed, zero=None).build()
        assert [finding for finding in unfounded(graph, decisions) if "bucket" not in finding] == []


@pytest.mark.parametrize("name", MODELS)
def test_no_step_may_be_missing(name: str) -> None:
    """A redistribution without its last step in either direction is found, and so is none where there should be one."""
    graph = graph_of(name)
    decisions = RandomPlan(graph, (2, 2), 7, zero=None).build()
    number_of_edges = len(decisions.redistributions)
    assert number_of_edges > 4
    for number in range(0, number_of_edges, 1 + number_of_edges // 6):
        edge = decisions.redistributions[number]
        others = (decisions.redistributions[:number], decisions.redistributions[number + 1 :])
        changed = [replace(edge, forward=edge.forward[:-1])] if edge.forward else []
        changed += [replace(edge, backward=edge.backward[:-1])] if edge.backward else []
        for made in ((), *((one,) for one in changed)):
            false = replace(decisions, redistributions=(*others[0], *made, *others[1]))
            findings = [finding for finding in unfounded(graph, false) if finding.startswith("redistributions")]
            assert len(findings) == 1 and edge.tensor in findings[0]
