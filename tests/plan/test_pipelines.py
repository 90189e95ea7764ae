"""Plans of pipelines: cut from plans of one stage, written down and read again."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tap_planner.errors import PlanFormatError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.operators import TRANSFER
from tap_planner.plan import (
    Decisions,
    PlanDocument,
    canonical_decisions,
    cut_decisions,
    expand,
    from_text,
    row_major_ranks,
    stage_starts,
    to_text,
    with_digests,
)
from tap_planner.schedule import PipelineSchedule, make_schedule
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model, symbols
from tests.plan.plan_builders import make_document

SCHEDULES = [("fill-drain", 2, 4, 1), ("1f1b", 4, 4, 1), ("interleaved", 2, 4, 2), ("zb-h1", 3, 4, 1), ("zbv", 2, 4, 2)]
MODELS = ("gpt2_tiny", "t5_tiny", "hm_llama_tiny")


@functools.cache
def graph_of(name: str) -> Graph:
    """A model bound for training."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return bind(model, BindOptions(batch=8, dims=dims, training=True, loss=LossOptions(kind="mean")))


def whole_plan(name: str, seed: int, microbatches: int) -> Decisions:
    """A random plan of one stage, on the mesh and in the precision of ``make_document``."""
    plan = RandomPlan(graph_of(name), (2, 2), seed, zero=None, recompute="mixed", microbatches=microbatches).build()
    axes = tuple(replace(axis, name=known) for axis, known in zip(plan.axes, ("dp", "tp"), strict=True))
    return replace(plan, precision="fp32", axes=axes)


def cut(
    name: str, kind: tuple[str, int, int, int], seed: int, scatter: tuple[int, ...] = ()
) -> tuple[Graph, Decisions]:
    """A random plan, cut evenly."""
    graph, schedule = graph_of(name), make_schedule(kind[0], kind[1], kind[2], kind[3] if kind[3] > 1 else None)
    whole = whole_plan(name, seed, kind[2])
    return cut_decisions(graph, whole, starts_of(graph, schedule), schedule, scatter)


def starts_of(graph: Graph, schedule: PipelineSchedule) -> list[str]:
    """Operators that begin chunks of about as many operators each."""
    count = schedule.num_virtual_stages
    return [graph.operators[len(graph.operators) * chunk // count].id for chunk in range(count)]


def reads_of(graph: Graph) -> dict[str, str]:
    """Tensor name to the parameter that it reads."""
    return {name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None}


def document_of(graph: Graph, decisions: Decisions) -> PlanDocument:
    """A document with as many ranks as all stages have."""
    document = make_document(decisions, reads_of(graph))
    mesh = replace(document.mesh, ranks=row_major_ranks((decisions.num_stages, 2, 2)))
    return with_digests(replace(document, mesh=mesh))


@pytest.mark.parametrize("kind", SCHEDULES, ids=lambda kind: kind[0])
@pytest.mark.parametrize("name", MODELS)
def test_what_is_written_is_read_again(name: str, kind: tuple[str, int, int, int]) -> None:
    """Document and text hold all decisions: cuts, schedule, transfers, and what each stage has of the rest."""
    for seed in range(2):
        graph, decisions = cut(name, kind, seed, ((), (1,))[seed])
        document = document_of(graph, decisions)
        assert expand(document) == canonical_decisions(decisions, reads_of(graph))
        assert from_text(to_text(document)) == document
        starts = list(stage_starts(document.pipeline))
        assert decisions.pipeline is not None
        assert starts == starts_of(graph_of(name), decisions.pipeline.schedule)


@pytest.mark.parametrize("name", MODELS)
def test_strategies_stay(name: str) -> None:
    """A cut changes no strategy and no redistribution: without transfers they are those of before."""
    _, decisions = cut(name, SCHEDULES[1], 5)
    whole = whole_plan(name, 5, 4)
    kept = [operator for operator in decisions.operators if operator.type != TRANSFER]
    assert [(o.id, o.strategy, o.outputs) for o in kept] == [(o.id, o.strategy, o.outputs) for o in whole.operators]
    steps = {
        (r.source, r.to, r.gradient, r.forward, r.backward, name) for r in whole.redistributions for name in r.consumers
    }
    assert steps == {
        (r.source, r.to, r.gradient, r.forward, r.backward, name)
        for r in decisions.redistributions
        for name in r.consumers
    }
    assert any(operator.type == TRANSFER for operator in decisions.operators)


def test_unknown_axes_of_transfers_are_refused() -> None:
    """Transfers are shared out along axes of the mesh."""
    document = document_of(*cut("gpt2_tiny", SCHEDULES[1], 0, (0,)))
    assert document.pipeline.scatter == ("dp",)
    damaged = replace(document, pipeline=replace(document.pipeline, scatter=("ep",)))
    with pytest.raises(PlanFormatError, match=r"pipeline.scatter: 'ep', expected one of dp, tp"):
        expand(damaged)


def test_an_order_of_the_users() -> None:
    """A schedule that no name stands for is written out."""
    graph, decisions = cut("gpt2_tiny", SCHEDULES[0], 0)
    assert decisions.pipeline is not None
    schedule = replace(decisions.pipeline.schedule, name="mine")
    decisions = replace(decisions, pipeline=replace(decisions.pipeline, schedule=schedule))
    document = document_of(graph, decisions)
    assert len(document.pipeline.order) >= 2
    assert expand(from_text(to_text(document))) == canonical_decisions(decisions, reads_of(graph))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"first": "nothing"}, "no operator is called 'nothing'"),
        ({"stage": 0}, "expected 1 by the schedule"),
    ],
)
def test_damaged_stages_are_refused(change: dict[str, object], message: str) -> None:
    """Stages that do not fit the operators or the schedule are named."""
    graph, decisions = cut("gpt2_tiny", SCHEDULES[1], 0)
    document = document_of(graph, decisions)
    stages = [replace(stage) for stage in document.pipeline.stages]
    stages[1] = replace(stages[1], **change)  # type: ignore[arg-type]
    damaged = replace(document, pipeline=replace(document.pipeline, stages=tuple(stages)))
    with pytest.raises(PlanFormatError, match=message):
        expand(damaged)
