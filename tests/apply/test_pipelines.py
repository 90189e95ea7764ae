"""Plans with a pipeline: stages work as their schedule says, and what they make is what a single process makes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from tap_planner.apply import (
    ApplyJob,
    LockstepCommunicator,
    ParameterStore,
    RandomWeights,
    apply_job,
    synthetic_inputs,
    verify_program,
)
from tap_planner.apply.communicator import Form
from tap_planner.apply.executor import run_stages
from tap_planner.apply.in_flight import MicrobatchState
from tap_planner.apply.values import TensorValues
from tap_planner.apply.workers import make_workers
from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, Graph, bind
from tap_planner.plan import Decisions
from tap_planner.program import (
    Compute,
    Part,
    Phase,
    Program,
    Send,
    collectives,
    lower_plan,
    scattered_axes,
    sent_elements,
    transferred,
)
from tap_planner.schedule import make_schedule, peak_in_flight
from tests.apply.pipelined import Pipelined, drawn
from tests.apply.random_plans import RandomPlan, cut_at_random
from tests.apply.sequence_plans import SequencePlan
from tests.apply.spatial_models import SpatialPlan, spatial_graph
from tests.graph.models import data_model
from tests.schedule.pipelines import random_schedule

T5 = Pipelined(model="t5_tiny", dims={"seq": 8, "dec_seq": 6})
"""All decoder blocks read the encoder's output: it goes to several stages."""
UNET = Pipelined(model="unet_tiny", dims={}, mesh=())
"""Every level down is read by a level up, stages later."""
SCHEDULES = (
    Pipelined(schedule="fill-drain", microbatches=2),
    Pipelined(schedule="1f1b", stages=3),
    Pipelined(schedule="interleaved", chunks=2),
    Pipelined(schedule="zb-h1", stages=3),
    Pipelined(schedule="zbv", microbatches=2),
)
by_schedule = pytest.mark.parametrize("case", SCHEDULES, ids=str)


def check(case: Pipelined, seed: int) -> None:
    """A random plan verifies: outputs, gradients, updated parameters, and each stage's list of collectives."""
    report = case.verify(case.program(seed))
    assert report.passed, f"{case}, seed {seed}:\n" + "\n".join(report.lines())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@by_schedule
def test_schedules_verify(case: Pipelined, zero: int) -> None:
    """GPT-2, whose embedding is tied to its head, in every order of work and with ZeRO at every level."""
    check(replace(case, zero=zero), seed=zero)


@pytest.mark.parametrize("recompute", ["full", "selective", "mixed"])
@by_schedule
def test_recomputation_verifies(case: Pipelined, recompute: str) -> None:
    """What runs again before a backward reads what other stages sent in forward, with levels of ZeRO mixed."""
    check(replace(case, recompute=recompute, zero=None, mesh=(2, 2)), seed=7)


@pytest.mark.parametrize(
    "case",
    [
        replace(T5, schedule="interleaved", chunks=2, zero=None, recompute="mixed"),
        replace(T5, schedule="zbv", microbatches=2),
        replace(UNET, stages=4),
        Pipelined(model="hm_llama_tiny", loss="cross-entropy", schedule="zb-h1", stages=4, mesh=()),
    ],
    ids=str,
)
def test_models_verify(case: Pipelined) -> None:
    """Tensors that several stages read, long skips, one rank a stage."""
    check(case, seed=3)


PLACED = tuple(seed for seed in range(400) if len(set(random_schedule(seed, chain=True).places)) > 1)
"""Seeds of orders whose chunks lie anywhere, on several stages."""


@pytest.mark.parametrize("seed", PLACED[:6])
def test_chunks_anywhere_verify(seed: int) -> None:
    """Chunks on any stage, on some more than on others, neighbours on one stage or far apart; embeddings tied."""
    check(drawn(seed, Pipelined(zero=(0, 1)[seed % 2], recompute=("none", "mixed")[seed // 2 % 2])), seed)


@pytest.mark.full
@pytest.mark.parametrize("model", [T5, UNET, Pipelined()], ids=str)
@pytest.mark.parametrize("seed", PLACED[6:18])
def test_many_chunks_anywhere_verify(seed: int, model: Pipelined) -> None:
    """The same with tensors that several stages read, and long skips."""
    check(drawn(seed, model), seed)


@pytest.mark.parametrize(
    "case",
    [
        Pipelined(stages=1, microbatches=2),
        Pipelined(stages=1, schedule="interleaved", chunks=3, microbatches=2),
        Pipelined(stages=1, schedule="zbv", microbatches=2, zero=3),
    ],
    ids=str,
)
def test_one_stage_sends_nothing(case: Pipelined) -> None:
    """What goes from chunk to chunk of one stage is handed over; nothing is sent or summed along the pipeline."""
    check(case, seed=2)
    assert all(entry.axes for entry in collectives(case.program(2)))


@pytest.mark.parametrize("shared", [((3,), (0,)), ((2, 2), (1,)), ((2, 2), (0, 1))], ids=str)
@by_schedule
def test_shared_out_transfers_verify(case: Pipelined, shared: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Ranks that hold the same each send a part, of any length; what is split or still to be summed goes as it is."""
    mesh, axes = shared
    case = replace(case, mesh=mesh, zero=None, recompute="mixed")
    check(replace(case, scatter=axes), seed=sum(mesh))


@pytest.mark.parametrize("model", [T5, replace(UNET, mesh=(2,))], ids=lambda case: case.model)
def test_shared_out_transfers_of_several_values_verify(model: Pipelined) -> None:
    """Each tensor between two stages is shared out by itself."""
    check(replace(model, stages=3, scatter=(0,)), seed=4)


def test_shares_are_sent_and_gathered() -> None:
    """Of what ranks hold alike, in value or in gradient, each sends its share, and just that is gathered."""
    sent: Counter[tuple[Phase, bool]] = Counter()
    for seed in range(6):
        case = Pipelined(mesh=(3,), microbatches=2)
        whole, shared = case.program(seed), replace(case, scatter=(0,)).program(seed)
        for one, other in zip(_transfers(whole), _transfers(shared), strict=True):
            transfer, axes = other
            elements = sent_elements(whole, *one[0])
            assert sent_elements(shared, *transfer) == (-(-elements // 3) if axes else elements)
            assert not one[1] and (bool(axes) == transferred(shared, *transfer)[1][0].is_replicate)
            sent[transfer[0], bool(axes)] += 1
        gathered = {(e.phase, e.elements) for e in collectives(shared) if e.kind == "all_gather"}
        assert {(t[0], 3 * sent_elements(shared, *t)) for t, axes in _transfers(shared) if axes} <= gathered
    assert all(sent[phase, axes] for phase in (Phase.FORWARD, Phase.BACKWARD) for axes in (False, True))


def _transfers(program: Program) -> list[tuple[tuple[Phase, int], tuple[int, ...]]]:
    """What is sent to other stages, with the axes along which it is shared out."""
    sends = (i for i in program.microbatch if isinstance(i, Send) and i.peer is not None)
    return [((i.phase, i.operator), scattered_axes(program, i.phase, i.operator)) for i in sends]


@pytest.mark.full
@pytest.mark.parametrize(
    "model",
    [
        replace(T5, loss="sum"),
        replace(UNET, zero=None),
        Pipelined(loss="cross-entropy"),
        Pipelined(model="hm_llama_tiny"),
        Pipelined(model="gshard_moe_tiny", dims={}, microbatches=2),
        Pipelined(model="resnet_small", dims={}),
    ],
    ids=lambda case: case.model,
)
@pytest.mark.parametrize(
    "order",
    [
        *SCHEDULES,
        Pipelined(stages=4, microbatches=8),
        Pipelined(schedule="interleaved", chunks=3, microbatches=2),
        Pipelined(schedule="interleaved", stages=4, chunks=2, microbatches=8),
        Pipelined(schedule="zb-h1", stages=4, microbatches=2),
        Pipelined(schedule="zbv", stages=3, microbatches=8),
    ],
    ids=lambda case: f"{case.schedule}-{case.stages}-{case.chunks}-{case.microbatches}",
)
def test_many_pipelines_verify(model: Pipelined, order: Pipelined) -> None:
    """Every model under every schedule, on one, two and four ranks a stage, with settings that differ."""
    case = replace(
        model, schedule=order.schedule, stages=order.stages, chunks=order.chunks, microbatches=order.microbatches
    )
    settings = (((2,), None, "mixed"), ((2, 2), 3, "selective"), ((), 0, "full"), ((4,), 2, "none"), ((1,), 1, "mixed"))
    for seed, (mesh, zero, recompute) in enumerate(settings):
        if case.model != "unet_tiny" or seed in (0, 2):
            check(replace(case, mesh=mesh, zero=zero if mesh else 0, recompute=recompute), seed)


def test_some_plans_send_sum_and_split() -> None:
    """What verifies above is no special case: values and gradients are sent, ties summed, backwards split in two."""
    kinds: Counter[tuple[str, str]] = Counter()
    parts: Counter[Part] = Counter()
    for case in SCHEDULES:
        program = case.program(1)
        kinds.update((entry.phase.value, entry.kind) for entry in collectives(program) if not entry.axes)
        parts.update(i.part for i in program.microbatch if isinstance(i, Compute) and i.phase is Phase.BACKWARD)
    assert set(kinds) == {("forward", "send_recv"), ("backward", "send_recv"), ("gradient", "all_reduce")}
    assert all(parts[part] > 10 for part in Part)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_backwards_in_two_parts_exchange_once(recompute: str) -> None:
    """Space split over devices: rows of a convolution's gradient are exchanged with its inputs' part alone."""
    schedule, found = make_schedule("zb-h1", 2, 1), Counter[Phase]()
    for seed in range(6):
        graph = spatial_graph(seed, (16, 8))
        cut, pipeline = cut_at_random(graph, schedule, seed)
        decisions = SpatialPlan(cut, (2,), seed, recompute=recompute, pipeline=pipeline).build()
        assert verified(graph, decisions)
        for entry in collectives(lower_plan(graph, decisions)):
            found[entry.phase] += entry.count * (entry.kind == "halo_exchange")
    assert found[Phase.FORWARD] > found[Phase.BACKWARD] > 0


def test_rings_verify() -> None:
    """Attention in a ring inside stages, backward in two parts."""
    options = BindOptions(batch=2, dims={"seq": 8}, training=True)
    graph = bind(data_model("llama_tiny_op23"), options)
    cut, pipeline = cut_at_random(graph, make_schedule("zbv", 2, 1), 5)
    for seed in range(3):
        plan = SequencePlan(cut, (2,), seed, length=8, attention="ring", zero=3)
        plan.pipeline = pipeline
        decisions = plan.build()
        assert verified(graph, decisions)
        assert any(entry.kind == "ring_exchange" for entry in collectives(lower_plan(graph, decisions)))


def verified(graph: Graph, decisions: Decisions) -> bool:
    """Verify a plan of one microbatch."""
    communicator = LockstepCommunicator(decisions.mesh_shape, num_stages=decisions.num_stages)
    program = lower_plan(graph, decisions)
    report = verify_program(program, communicator, RandomWeights(graph), synthetic_inputs(graph), reference_graph=graph)
    assert report is not None and report.passed, "\n".join(report.lines() if report else ())
    return True


@pytest.mark.parametrize("seed", range(3))
def test_inference_verifies(seed: int) -> None:
    """Stages of a decoder's step, with caches that lie wherever they do: there is nothing to do backward."""
    graph, part = (
        bind(data_model("llama_decode_tiny"), BindOptions(batch=batch, dims={"past": 7}, ends=True)) for batch in (4, 2)
    )
    cut, pipeline = cut_at_random(part, make_schedule("interleaved", 2, 2, 2), seed)
    program = lower_plan(part, RandomPlan(cut, (2,), seed, microbatches=2, pipeline=pipeline).build())
    report = verify_program(
        program,
        LockstepCommunicator((2,), num_stages=2),
        RandomWeights(graph),
        synthetic_inputs(graph),
        reference_graph=graph,
    )
    assert report is not None and report.passed, "\n".join(report.lines() if report else ())


# What stages hold -----------------------------------------------------------------------------------------------


def test_stages_hold_what_they_read() -> None:
    """Every stage stores the parameters that its operators read, a tied one in each; together they store all."""
    case = SCHEDULES[1]
    program = case.program(1)
    weights = RandomWeights(program.graph)
    held = [
        set(ParameterStore(program, own, weights, torch.float64).decisions)
        for own in LockstepCommunicator(case.mesh, num_stages=case.stages).stages
    ]
    read: list[set[str]] = [set() for _ in range(case.stages)]
    for index, operator in enumerate(program.graph.operators):
        reads = (program.graph.tensors[name].read for name in operator.inputs if name is not None)
        read[program.stage_of(program.chunk_of(index))].update(each.parameter for each in reads if each is not None)
    assert held == read
    assert sum(map(len, held)) == len(set.union(*held)) + 1 == len(program.decisions.parameters) + 1


@by_schedule
def test_as_many_microbatches_are_in_flight_as_the_schedule_says(
    case: Pipelined, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stage has something of a microbatch from its first turn to its last, and nothing of any when the step ends."""
    program = case.program(1)
    communicator = LockstepCommunicator(case.mesh, num_stages=case.stages)
    workers = make_workers(program, communicator, RandomWeights(program.graph), dtype=torch.float64)
    held, most = Counter[int](), Counter[int]()

    class Counted(MicrobatchState):
        """Is counted for its stage."""

        def __init__(self, microbatch: int, values: TensorValues) -> None:
            super().__init__(microbatch, values)
            self.stage = values._sources.communicator.stage
            held[self.stage] += 1
            most[self.stage] = max(most[self.stage], held[self.stage])

        def clear(self) -> None:
            held[self.stage] -= 1
            super().clear()

    monkeypatch.setattr("tap_planner.apply.executor.MicrobatchState", Counted)
    run_stages([worker.executor for worker in workers], synthetic_inputs(case.graph()))
    expected = [each.until_weight_backward for each in peak_in_flight(case.order)]
    assert [most[stage] for stage in range(case.stages)] == expected
    assert not any(held.values())


# Steps, jobs and processes --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def job() -> ApplyJob:
    """Training GPT-2 with two chunks on each of two stages of two ranks."""
    return Pipelined(schedule="interleaved", chunks=2, zero=2).job(3)


def test_losses_do_not_depend_on_the_pipeline(job: ApplyJob) -> None:
    """Three steps give the losses of one rank, and the outputs of the last of them."""
    case = Pipelined()
    alone = RandomPlan(case.graph(), (1,), 0).build()
    steps = replace(job, verify=False, steps=3, keep_outputs=True)
    expected, made = apply_job(replace(steps, decisions=alone)), apply_job(steps)
    assert expected is not None and made is not None
    assert len(made.losses) == 3 and made.num_ranks == 4
    np.testing.assert_allclose(made.losses, expected.losses, rtol=1e-9)
    for (name, value), (expected_name, expected_value) in zip(made.outputs, expected.outputs, strict=True):
        assert name == expected_name
        np.testing.assert_allclose(value, expected_value, atol=1e-12)


def test_processes_verify(job: ApplyJob) -> None:
    """Four gloo processes verify as lockstep does, with the same number of collectives."""
    _check_processes(job)


def test_processes_share_out_transfers() -> None:
    """The same with what both ranks of a stage hold sent in halves."""
    _check_processes(Pipelined(schedule="interleaved", chunks=2, scatter=(0,)).job(3))


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Pipelined(stages=4, mesh=(), microbatches=8),
        Pipelined(stages=4, mesh=(1,), schedule="zb-h1"),
        Pipelined(stages=2, mesh=(2,), schedule="fill-drain", zero=3, recompute="full"),
        replace(T5, schedule="zbv", zero=None, recompute="mixed"),
        replace(T5, schedule="interleaved", stages=4, chunks=2, mesh=()),
        replace(UNET, stages=4, schedule="zbv"),
    ],
    ids=str,
)
def test_more_processes_verify(case: Pipelined) -> None:
    """Other shapes: one rank a stage, several messages under way in both directions between two stages."""
    _check_processes(case.job(3))


def _check_processes(job: ApplyJob) -> None:
    result, lockstep = apply_job(job, num_processes=4), apply_job(job)
    assert result is not None and result.report is not None and lockstep is not None
    assert result.report.passed, "\n".join(result.report.lines())
    assert result.num_collectives == lockstep.num_collectives > 0


def test_processes_train_as_lockstep_does(job: ApplyJob) -> None:
    """Steps in processes: the process of rank 0 knows losses and outputs that other stages made."""
    steps = replace(job, verify=False, steps=2, keep_outputs=True)
    made, lockstep = apply_job(steps, num_processes=4), apply_job(steps)
    assert made is not None and lockstep is not None
    np.testing.assert_allclose(made.losses, lockstep.losses, rtol=1e-12)
    assert len(made.losses) == 2
    for (_, value), (_, expected) in zip(made.outputs, lockstep.outputs, strict=True):
        np.testing.assert_allclose(value, expected, atol=1e-12)


def test_wrong_number_of_processes(job: ApplyJob) -> None:
    """Ranks are those of all stages."""
    with pytest.raises(ApplyError, match="2 stages of mesh 2 have 4 ranks, got 2") as caught:
        apply_job(job, num_processes=2)
    assert "start 4 processes" in caught.value.hint


# Messages -------------------------------------------------------------------------------------------------------


def test_messages_come_in_the_order_in_which_they_are_sent() -> None:
    """Each direction between two stages is a queue; what another stage has not sent yet is not there."""
    first, second, _ = LockstepCommunicator((), num_stages=3).stages
    assert not second.may_receive(0)
    for value in (1.0, 2.0):
        first.send([torch.tensor([value])], 1)
    second.send([torch.tensor([3, 4])], 0)
    form = Form((1,), torch.float32)
    assert [second.receive([form], 0)[0].item() for _ in range(2)] == [1.0, 2.0]
    assert not second.may_receive(0) and first.may_receive(1) and not first.may_receive(2)
    with pytest.raises(AssertionError, match="stage 1 sent"):
        first.receive([form], 1)


def test_a_lost_message_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients that arrive as zeros make the gradients of earlier stages differ: the message is no decoration."""
    case = Pipelined(mesh=())
    program = case.program(1)
    assert case.verify(program).passed
    real = LockstepCommunicator.receive

    def losing(self: LockstepCommunicator, forms: list[Form], stage: int) -> list[torch.Tensor]:
        parts = real(self, forms, stage)
        return [part * 0 for part in parts] if stage > self.stage else parts

    monkeypatch.setattr(LockstepCommunicator, "receive", losing)
    findings = case.verify(program).findings
    assert findings and all(finding.startswith(("gradient ", "parameter ")) for finding in findings)


def test_a_missing_send_is_found() -> None:
    """Stages that wait for what nobody sends do not hang."""
    case = Pipelined(mesh=())
    program = case.program(1)
    first = program.chunks[0]
    silent = replace(first, forward=tuple(i for i in first.forward if type(i).__name__ != "Send"))
    broken = replace(program, chunks=(silent, *program.chunks[1:]))
    with pytest.raises(AssertionError, match="wait for each other"):
        case.verify(broken)


def test_a_wrong_list_of_a_stage_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Findings about collectives name the stage."""
    case = Pipelined(mesh=())
    program = case.program(1)
    monkeypatch.setattr("tap_planner.apply.verify.collectives", lambda program, stage: ())
    findings = case.verify(program).findings
    assert any(f.startswith("stage 0: collective send_recv over axes []") and "in forward" in f for f in findings)
    assert any(f.startswith("stage 1: collective send_recv over axes []") and "in backward" in f for f in findings)
