"""Programs of pipelines: a stage finds what it reads, holds nothing when it is done, and hears what it waits for."""

from __future__ import annotations

import functools
from collections import Counter, deque
from dataclasses import replace

import pytest

from tap_planner.errors import ApplyError
from tap_planner.graph import cut_in_stages
from tap_planner.plan import Decisions
from tap_planner.program import (
    Compute,
    GatherParameters,
    Part,
    Phase,
    Program,
    Receive,
    Redistribute,
    ReduceGradients,
    Send,
    SumTied,
    collectives,
    cut_as_planned,
    lower,
    lower_plan,
)
from tap_planner.schedule import Slot, Work, make_schedule
from tests.apply.pipelined import Pipelined
from tests.program.test_lower import Rank

GPT2 = Pipelined(mesh=(2, 2))
ORDERS = (
    replace(GPT2, schedule="fill-drain", stages=3, microbatches=2),
    replace(GPT2, schedule="1f1b", stages=4),
    replace(GPT2, schedule="interleaved", chunks=2),
    replace(GPT2, schedule="zb-h1"),
    replace(GPT2, schedule="zbv", microbatches=2),
    replace(GPT2, stages=1),
)
CASES = tuple(
    replace(order, model=model, dims=dims, zero=zero, recompute=recompute)
    for order in ORDERS
    for model, dims in (("gpt2_tiny", {"seq": 8}), ("t5_tiny", {"seq": 8, "dec_seq": 6}))
    for zero, recompute in ((3, "full"), (None, "mixed"))
)
everywhere = pytest.mark.parametrize("case", CASES, ids=str)


@functools.cache
def _program(name: str) -> Program:
    return next(case for case in CASES if str(case) == name).program(3)


def program_of(case: Pipelined) -> Program:
    """A random plan, lowered."""
    return _program(str(case))


@everywhere
def test_stages_find_what_they_read(case: Pipelined) -> None:
    """In the order of the schedule every operand is there; after the last turn nothing of a microbatch is held."""
    program = program_of(case)
    for stage in range(case.stages):
        ranks: dict[tuple[int, int], Rank] = {}
        for turn in program.turns(stage):
            rank = ranks.setdefault((turn.microbatch, turn.chunk), Rank(program))
            for instruction in turn.instructions:
                rank.run(instruction)
            assert not rank.gathered, "between turns no parameter is whole that ZeRO shards"
            assert rank.is_empty or not turn.is_last
        assert len(ranks) == case.microbatches * len(program.chunks) // case.stages
        assert all(rank.is_empty for rank in ranks.values())


@everywhere
def test_sends_match_receives(case: Pipelined) -> None:
    """Stage by stage as far as each comes: whatever is waited for is sent, and all that is sent is taken."""
    program = program_of(case)
    sent: set[tuple[object, ...]] = set()
    streams = [
        deque(
            (instruction, turn.microbatch)
            for turn in program.turns(stage)
            for instruction in turn.instructions
            if isinstance(instruction, Send | Receive)
        )
        for stage in range(case.stages)
    ]
    moved = True
    while moved:
        moved = False
        for stage, stream in enumerate(streams):
            while stream:
                instruction, microbatch = stream[0]
                peer = stage if instruction.peer is None else instruction.peer
                ends = (stage, peer) if isinstance(instruction, Send) else (peer, stage)
                key = (*ends, instruction.phase, instruction.operator, microbatch)
                if isinstance(instruction, Send):
                    assert key not in sent
                    sent.add(key)
                elif key in sent:
                    sent.remove(key)
                else:
                    break
                stream.popleft()
                moved = True
    assert not sent and not any(streams)


@everywhere
def test_the_ends_of_a_transfer_lie_where_it_is_made_and_read(case: Pipelined) -> None:
    """Forward goes from the chunk that makes a tensor to that of the Transfer, gradients go back."""
    program = program_of(case)
    made_in = {name: number for number, c in enumerate(program.chunks) for name in _made(program, c.operators)}
    for number, chunk in enumerate(program.chunks):
        for instruction in (*chunk.forward, *chunk.backward, *chunk.weights):
            if not isinstance(instruction, Send | Receive):
                continue
            operator = program.graph.operators[instruction.operator]
            assert operator.type == "Transfer" and operator.inputs[0] is not None
            source, end = made_in[operator.inputs[0]], program.chunk_of(instruction.operator)
            assert source < end
            leaves = isinstance(instruction, Send) is (instruction.phase is Phase.FORWARD)
            assert number == (source if leaves else end)
            other = program.stage_of(end if leaves else source)
            assert instruction.peer == (None if other == program.stage_of(number) else other)
            assert instruction.phase is not Phase.RECOMPUTE


def _made(program: Program, operators: range) -> list[str]:
    return [name for index in operators for name in program.graph.operators[index].outputs]


@everywhere
def test_every_gradient_is_made_once(case: Pipelined) -> None:
    """A backward in two parts makes what a whole one makes: activations first, parameters later, each once."""
    program = program_of(case)
    made: Counter[tuple[int, int]] = Counter()
    for chunk in program.chunks:
        for instructions, parts in ((chunk.backward, {Part.ALL, Part.INPUTS}), (chunk.weights, {Part.PARAMETERS})):
            for instruction in instructions:
                if isinstance(instruction, Compute) and instruction.phase is Phase.BACKWARD:
                    assert instruction.part in parts
                    assert instruction.operator in chunk.operators
                    made.update((instruction.operator, p) for p in _positions(program, instruction))
        assert not any(isinstance(i, ReduceGradients) for i in chunk.backward if chunk.weights)
    expected = {
        (index, position)
        for index, decision in enumerate(program.decisions.operators)
        for position, operand in enumerate(decision.inputs)
        if operand is not None and operand.gradient is not None and decision.type != "Transfer"
    }
    assert set(made) == expected and set(made.values()) == {1}


def _positions(program: Program, instruction: Compute) -> list[int]:
    tensors = program.graph.tensors
    return [
        position
        for position, operand in enumerate(program.decisions.operators[instruction.operator].inputs)
        if operand is not None
        and operand.gradient is not None
        and (
            instruction.part is Part.ALL
            or (tensors[operand.tensor].read is not None) is (instruction.part is Part.PARAMETERS)
        )
    ]


@everywhere
def test_ties_are_summed_once_a_step_before_they_are_reduced(case: Pipelined) -> None:
    """Each stage that holds a tied parameter sums its gradient with the others first of all."""
    program = program_of(case)
    tied = {p.name for p in program.decisions.parameters if p.trainable and len(program.stages_of(p.name)) > 1}
    for stage, step in enumerate(program.steps):
        names = [instruction.parameter for instruction in step if isinstance(instruction, SumTied)]
        assert set(names) == tied & set(program.parameters[stage])
        assert step[: len(names)] == tuple(map(SumTied, names))
    if case.model == "gpt2_tiny" and case.stages > 1:
        assert case.schedule == "zbv" or tied == {"m.lm_head.weight"}


@everywhere
def test_lists_of_stages_add_up(case: Pipelined) -> None:
    """The plan's list is the sum of its stages'; what goes from stage to stage is listed where it is sent."""
    program = program_of(case)
    total: Counter[object] = Counter()
    for stage in range(case.stages):
        for entry in collectives(program, stage):
            total[replace(entry, count=0)] += entry.count
        sends = [
            i for turn in program.turns(stage) for i in turn.instructions if isinstance(i, Send) and i.peer is not None
        ]
        assert len(sends) == sum(e.count for e in collectives(program, stage) if e.kind == "send_recv")
    assert total == Counter({replace(entry, count=0): entry.count for entry in collectives(program)})


def test_a_transfer_is_listed_with_its_part() -> None:
    """A value of which each rank has a half is sent by halves, and so is its gradient."""
    program = program_of(CASES[0])
    shape = program.decisions.mesh_shape
    for chunk in program.chunks:
        for instruction in chunk.forward:
            if isinstance(instruction, Send) and instruction.peer is not None:
                operand = program.decisions.operators[instruction.operator].inputs[0]
                assert operand is not None
                elements = 1
                for dim, size in enumerate(program.graph.tensors[operand.tensor].type.shape):
                    for axis, placement in enumerate(operand.placement):
                        if placement.is_shard and placement.dim == dim:
                            size = -(-size // shape[axis])
                    elements *= size
                found = [e for e in collectives(program) if e.kind == "send_recv" and e.elements == elements]
                assert any(e.phase is Phase.FORWARD for e in found) and all(e.axes == () for e in found)


def test_parameters_that_later_gradients_read_are_gathered_again() -> None:
    """ZeRO 3 under a split backward: a norm's later part reads its scale, a product's does not."""
    case = replace(GPT2, schedule="zb-h1", zero=3)
    program = case.program(2)
    again = {i.bucket for chunk in program.chunks for i in chunk.weights if isinstance(i, GatherParameters)}
    bucket_of = {p.name: p.bucket for p in program.decisions.parameters if p.zero_level == 3}
    scales = {bucket for name, bucket in bucket_of.items() if "ln_" in name and name.endswith("weight")}
    assert again and again <= scales


# Refused --------------------------------------------------------------------------------------------------------


def decided(case: Pipelined = GPT2) -> Decisions:
    """A random plan of two stages."""
    return case.decisions(3)


def test_the_cut_follows_from_the_plan() -> None:
    """The graph of the model is cut where the plan says; a plan without pipeline leaves it as it is."""
    case, decisions = GPT2, decided()
    graph = case.graph(case.microbatches)
    assert decisions.pipeline is not None
    cut = cut_as_planned(graph, decisions)
    assert [operator.id for operator in cut.operators] == [operator.id for operator in decisions.operators]
    assert cut_as_planned(graph, replace(decisions, pipeline=None)) is graph


def test_another_model_is_refused() -> None:
    """A plan with operators that the model does not have."""
    case = replace(GPT2, model="hm_llama_tiny")
    with pytest.raises(ApplyError, match=r"another model: an order of operators: no operator is called"):
        lower_plan(case.graph(case.microbatches), decided())


def test_a_graph_that_is_not_cut_is_refused() -> None:
    """``lower`` wants the graph in stages."""
    with pytest.raises(ApplyError, match="another model: they differ at"):
        lower(GPT2.graph(GPT2.microbatches), decided())


def test_a_schedule_that_waits_for_ever_is_refused() -> None:
    """The order of every stage must be complete, and possible."""
    decisions = decided()
    assert decisions.pipeline is not None
    schedule = decisions.pipeline.schedule
    backwards = (tuple(sorted(schedule.orders[0], key=lambda slot: slot.work is Work.FORWARD)), *schedule.orders[1:])
    for orders, words in ((backwards, "wait"), ((schedule.orders[0][:-1], schedule.orders[1]), "missing")):
        broken = replace(decisions.pipeline, schedule=replace(schedule, orders=orders))
        with pytest.raises(ApplyError, match=words):
            lower_plan(GPT2.graph(GPT2.microbatches), replace(decisions, pipeline=broken))


def test_other_counts_are_refused() -> None:
    """Chunks and microbatches are those of the schedule."""
    decisions, graph = decided(), GPT2.graph(GPT2.microbatches)
    assert decisions.pipeline is not None
    for schedule, words in (
        (make_schedule("1f1b", 3, 4), "2 chunks, expected 3"),
        (make_schedule("1f1b", 2, 8), "8 microbatches, expected 4"),
    ):
        other = replace(decisions.pipeline, schedule=schedule)
        with pytest.raises(ApplyError, match=words):
            lower_plan(graph, replace(decisions, pipeline=other))


def test_a_region_across_stages_is_refused() -> None:
    """Regions end where stages do."""
    decisions = decided()
    whole = replace(decisions.regions[0], operators=tuple(operator.id for operator in decisions.operators))
    with pytest.raises(ApplyError, match="begins inside a region"):
        lower_plan(GPT2.graph(GPT2.microbatches), replace(decisions, regions=(whole,)))


def test_sharded_gradients_across_chunks_are_refused() -> None:
    """From ZeRO 2 on a parameter has one chunk, and so has a bucket, even where chunks lie on one stage."""
    case = replace(GPT2, stages=1, schedule="interleaved", chunks=2, zero=1)
    decisions, graph = decided(case), case.graph(case.microbatches)
    parameters = tuple(replace(p, zero_level=2 if p.zero_axes else 0) for p in decisions.parameters)
    buckets = tuple(replace(b, zero_level=2 if b.zero_axes else 0) for b in decisions.buckets)
    with pytest.raises(ApplyError, match=r"ZeRO 2 where .* chunks of the pipeline"):
        lower_plan(graph, replace(decisions, parameters=parameters, buckets=buckets))
    untied = tuple(p for p in parameters if p.name != "m.lm_head.weight")
    with pytest.raises(ApplyError, match=r"bucket \d+: ZeRO 2 where its parameters lie in different chunks"):
        lower_plan(graph, replace(decisions, parameters=untied, buckets=buckets))


def test_reads_of_another_stage_need_a_transfer() -> None:
    """An operator that reads what another stage makes is refused, with its name."""
    decisions = decided()
    assert decisions.pipeline is not None
    graph = cut_in_stages(GPT2.graph(GPT2.microbatches), [decisions.operators[0].id])[0]
    ids = {operator.id for operator in graph.operators}
    position = next(i for i, o in enumerate(decisions.operators) if o.id not in ids)
    kept = tuple(o for o in decisions.operators if o.id in ids)
    regions = tuple(replace(r, operators=tuple(n for n in r.operators if n in ids)) for r in decisions.regions)
    pipeline = replace(decisions.pipeline, chunks=(0, position))
    with pytest.raises(ApplyError, match="of another stage without a transfer"):
        lower(graph, replace(decisions, operators=kept, regions=regions, pipeline=pipeline))


def test_turns_without_a_pipeline() -> None:
    """One stage works on one microbatch after the other, forward and back."""
    case = replace(GPT2, stages=1)
    decisions = replace(case.decisions(1), pipeline=None)
    program = lower(case.graph(case.microbatches), decisions)
    turns = list(program.turns(0))
    assert [turn.microbatch for turn in turns] == list(range(case.microbatches))
    assert all(turn.instructions == program.microbatch and turn.is_last for turn in turns)


def test_a_whole_backward_among_split_ones() -> None:
    """An order of one's own may split some backwards and leave others whole: those make both parts at once."""
    case = replace(GPT2, schedule="zb-h1", mesh=(), microbatches=2)
    decisions = decided(case)
    assert decisions.pipeline is not None
    schedule = decisions.pipeline.schedule
    whole = tuple(
        Slot(Work.BACKWARD, slot.microbatch) if slot.work is Work.INPUT_BACKWARD else slot
        for slot in schedule.orders[1]
        if slot.work is not Work.WEIGHT_BACKWARD
    )
    mixed = replace(decisions.pipeline, schedule=replace(schedule, orders=(schedule.orders[0], whole)))
    program = lower_plan(case.graph(case.microbatches), replace(decisions, pipeline=mixed))
    assert {turn.is_last for turn in program.turns(1)} == {True, False}
    assert case.verify(program).passed
    moved = [i for chunk in program.chunks for i in chunk.weights if isinstance(i, Redistribute)]
    assert all(program.graph.tensors[decisions.redistributions[i.redistribution].tensor].read for i in moved)
