"""Order of the instructions: what a rank reads is there when it reads it, in forward, recomputation and backward."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, Graph, LossOptions, TensorKind, bind
from tap_planner.operators import kept_for_backward, lookup
from tap_planner.plan import OperandDecision
from tap_planner.program import (
    Compute,
    ForgetParameters,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Part,
    Phase,
    Program,
    Receive,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Release,
    Send,
    UpdateParameters,
    lower,
)
from tap_planner.schedule import rerun_operators
from tap_planner.search import Model
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model, symbols
from tests.search.building import configuration_of, make_model, program_of, random_assignments

MODELS = ("gpt2_tiny", "hm_llama_tiny", "t5_tiny", "gshard_moe_tiny")
SETTINGS = [(0, "none"), (1, "full"), (2, "none"), (3, "none"), (3, "full"), (-1, "selective"), (-1, "mixed")]
"""ZeRO level (-1: another for each region) and recompute."""


@functools.cache
def graph_of(name: str) -> Graph:
    """A model bound for training."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return bind(model, BindOptions(batch=8, dims=dims, training=True, loss=LossOptions(kind="mean")))


@functools.cache
def model_of(name: str) -> Model:
    """The model on 2 x 2."""
    return make_model(graph_of(name), (2, 2))


@functools.cache
def programs(name: str, zero: int, recompute: str) -> tuple[Program, ...]:
    """Random plans, lowered."""
    if recompute in ("selective", "mixed"):
        plans = (RandomPlan(graph_of(name), (2, 2), seed, zero=None, recompute=recompute) for seed in range(3))
        return tuple(lower(graph_of(name), plan.build()) for plan in plans)
    model, configuration = model_of(name), configuration_of(zero=zero, recompute=recompute)
    assignments = random_assignments(model, 7, 3, per_class=False)
    return tuple(program_of(model, configuration, assignment) for assignment in assignments)


everywhere = pytest.mark.parametrize(
    "program",
    [pytest.param((name, *setting), id=f"{name}-{setting}") for name in MODELS for setting in SETTINGS],
)
Key = tuple[str, int, str]


class Rank:
    """Which copies of which tensors a rank has, as it runs the instructions."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.decisions = program.decisions
        self.tensors = program.graph.tensors
        self.maker = {
            output.tensor: (index, output.placement)
            for index, operator in enumerate(self.decisions.operators)
            for output in operator.outputs
        }
        self.region_of = {name: n for n, region in enumerate(self.decisions.regions) for name in region.operators}
        self.made: set[str] = set()
        self.copies: set[int] = set()
        self.gathered: set[int] = set()

    def release(self, released: Release) -> None:
        """Forget what is named, which must be there."""
        assert self.made >= set(released.tensors) and self.copies >= set(released.redistributions)
        self.made -= set(released.tensors)
        self.copies -= set(released.redistributions)

    def needs_gather(self, tensor: str) -> int | None:
        """Bucket of a parameter that must be gathered before it is read."""
        read = self.tensors[tensor].read
        for parameter in self.decisions.parameters:
            if read is not None and parameter.name == read.parameter and parameter.zero_level == 3:
                return parameter.bucket
        return None

    def has(self, operand: OperandDecision) -> bool:
        """Whether an operand is there in the placement that is wanted."""
        tensor = self.tensors[operand.tensor]
        edges = [
            edge
            for edge, decision in enumerate(self.decisions.redistributions)
            if (decision.tensor, decision.to, decision.gradient)
            == (operand.tensor, operand.placement, operand.gradient)
        ]
        if edges:
            return edges[0] in self.copies
        if tensor.kind in (TensorKind.INPUT, TensorKind.CONSTANT):
            return True
        if tensor.kind is TensorKind.PARAMETER:
            bucket = self.needs_gather(operand.tensor)
            return bucket is None or bucket in self.gathered
        return operand.tensor in self.made and self.maker[operand.tensor][1] == operand.placement

    def source_is_there(self, edge: int) -> bool:
        """Whether what a redistribution reads is there."""
        decision = self.decisions.redistributions[edge]
        if self.tensors[decision.tensor].kind is TensorKind.PARAMETER:
            bucket = self.needs_gather(decision.tensor)
            return bucket is None or bucket in self.gathered
        _, placement = self.maker[decision.tensor]
        return placement == decision.source and decision.tensor in self.made

    def compute(self, index: int) -> None:
        """Run an operator forward."""
        decision = self.decisions.operators[index]
        for operand in decision.inputs:
            assert operand is None or self.has(operand), (decision.id, operand)
        self.made |= {output.tensor for output in decision.outputs}

    def compute_gradients(self, index: int, part: Part) -> None:
        """Run a part of an operator's backward."""
        operator, decision = self.program.graph.operators[index], self.decisions.operators[index]
        needed = tuple(
            o is not None
            and o.gradient is not None
            and (part is Part.ALL or (self.tensors[o.tensor].read is not None) is (part is Part.PARAMETERS))
            for o in decision.inputs
        )
        assert any(needed)
        inputs, outputs = kept_for_backward(lookup(operator.type), needed)
        kept = [decision.inputs[position] for position in inputs]
        assert all(operand is None or self.has(operand) for operand in kept), decision.id
        assert all(decision.outputs[position].tensor in self.made for position in outputs), decision.id

    def run(self, instruction: Instruction) -> None:
        """Run an instruction, which finds what it reads."""
        match instruction:
            case Compute(phase=Phase.BACKWARD, operator=index, part=part):
                self.compute_gradients(index, part)
            case Compute(operator=index):
                self.compute(index)
            case Redistribute(phase=phase, redistribution=edge) if phase is not Phase.BACKWARD:
                assert self.source_is_there(edge)
                self.copies.add(edge)
            case Send(phase=Phase.FORWARD, operator=index):
                (operand,) = self.decisions.operators[index].inputs
                assert operand is not None and self.has(operand)
            case Receive(phase=Phase.FORWARD, operator=index):
                self.made.add(self.decisions.operators[index].outputs[0].tensor)
            case GatherParameters(bucket=bucket):
                assert bucket not in self.gathered
                self.gathered.add(bucket)
            case ForgetParameters(bucket=bucket):
                self.gathered.remove(bucket)
            case Release():
                self.release(instruction)
            case _:
                pass

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held."""
        return not (self.made or self.copies or self.gathered)


@everywhere
def test_operands_are_there(program: Key) -> None:
    """Forward, recomputation and backward find every operand made, redistributed and gathered, none released; at the
    end nothing is held."""
    for lowered in programs(*program):
        rank = Rank(lowered)
        for instruction in lowered.microbatch:
            rank.run(instruction)
        assert rank.is_empty


@everywhere
def test_gathers_come_again_in_backward(program: Key) -> None:
    """ZeRO 3 gathers each bucket before its first use in forward, and once more before its first use in backward."""
    for lowered in programs(*program):
        buckets = {p.bucket for p in lowered.decisions.parameters if p.zero_level == 3}
        for phase in (Phase.FORWARD, Phase.BACKWARD):
            found = [i.bucket for i in lowered.microbatch if isinstance(i, GatherParameters) and i.phase is phase]
            assert len(found) == len(set(found))
            assert set(found) == buckets


@everywhere
def test_gradients_are_complete_before_a_producers_backward(program: Key) -> None:
    """An operator's backward runs after that of all consumers whose gradients it needs, and after their edges."""
    for lowered in programs(*program):
        decisions = lowered.decisions
        position = {
            i.operator: at
            for at, i in enumerate(lowered.microbatch)
            if isinstance(i, Compute) and i.phase is Phase.BACKWARD
        }
        edges = {
            i.redistribution: at
            for at, i in enumerate(lowered.microbatch)
            if isinstance(i, Redistribute) and i.phase is Phase.BACKWARD
        }
        index_of = {operator.id: index for index, operator in enumerate(decisions.operators)}
        maker = {output.tensor: index for index, op in enumerate(decisions.operators) for output in op.outputs}
        for index, operator in enumerate(decisions.operators):
            for operand in operator.inputs:
                if operand is not None and operand.gradient is not None and operand.tensor in maker:
                    assert position[index] < position[maker[operand.tensor]]
        for edge, decision in enumerate(decisions.redistributions):
            if decision.gradient is None:
                assert edge not in edges
                continue
            assert all(position[index_of[consumer]] < edges[edge] for consumer in decision.consumers)
            if decision.tensor in maker:
                assert edges[edge] < position[maker[decision.tensor]]


@everywhere
def test_every_instruction_runs_once(program: Key) -> None:
    """Each operator and each redistribution runs once forward; each recomputed operator once more."""
    for lowered in programs(*program):
        decisions = lowered.decisions
        computes = [i for i in lowered.microbatch if isinstance(i, Compute)]
        forward = [i.operator for i in computes if i.phase is Phase.FORWARD]
        assert forward == list(range(len(decisions.operators)))
        index_of = {operator.id: index for index, operator in enumerate(decisions.operators)}
        recomputed: set[int] = set()
        for region in decisions.regions:
            indices = [index_of[name] for name in region.operators]
            if region.recompute == "full":
                recomputed.update(indices)
            elif region.recompute == "selective":
                recomputed.update(rerun_operators(lowered.graph, indices))
        again = [i.operator for i in computes if i.phase is Phase.RECOMPUTE]
        assert len(again) == len(set(again))
        assert set(again) == recomputed
        backward = [i.operator for i in computes if i.phase is Phase.BACKWARD]
        assert len(backward) == len(set(backward))
        moved = [
            i.redistribution for i in lowered.microbatch if isinstance(i, Redistribute) and i.phase is Phase.FORWARD
        ]
        assert sorted(moved) == list(range(len(decisions.redistributions)))


@everywhere
def test_a_group_is_whole_only_while_its_regions_run(program: Key) -> None:
    """ZeRO 3: from the first reader's region to the last one's a bucket is whole, and no longer."""
    for lowered in programs(*program):
        decisions = lowered.decisions
        region_of = {name: n for n, region in enumerate(decisions.regions) for name in region.operators}
        readers: dict[int, set[int]] = {}
        bucket_of = {p.name: p.bucket for p in decisions.parameters if p.zero_level == 3 and p.bucket is not None}
        for operator in decisions.operators:
            for operand in operator.inputs:
                read = None if operand is None else lowered.graph.tensors[operand.tensor].read
                if read is not None and read.parameter in bucket_of:
                    readers.setdefault(bucket_of[read.parameter], set()).add(region_of[operator.id])
        whole: set[int] = set()
        for instruction in lowered.microbatch:
            match instruction:
                case Compute(operator=index):
                    region = region_of[decisions.operators[index].id]
                    assert all(min(readers[b]) <= region <= max(readers[b]) for b in whole)
                case GatherParameters(bucket=bucket):
                    whole.add(bucket)
                case ForgetParameters(bucket=bucket):
                    whole.remove(bucket)
                case _:
                    pass


@everywhere
def test_gradients_are_reduced_before_the_update(program: Key) -> None:
    """Every bucket is reduced once: at ZeRO 2 and 3 when the backward of its region is done, else at the end of the
    step; then shards over the other data axes; then update, then gathers."""
    for lowered in programs(*program):
        decisions = lowered.decisions
        levels = {bucket.id: bucket.zero_level for bucket in decisions.buckets}
        position = {id(i): at for at, i in enumerate(lowered.microbatch)}
        each = [i for i in lowered.microbatch if isinstance(i, ReduceGradients)]
        once = [i.bucket for i in lowered.step if isinstance(i, ReduceGradients)]
        assert sorted(i.bucket for i in each) == [b for b in levels if levels[b] >= 2]
        assert once == [b for b in levels if levels[b] < 2]
        region_of = {name: n for n, region in enumerate(decisions.regions) for name in region.operators}
        regions = regions_of_buckets(lowered)
        for reduction in each:
            first = min(regions[reduction.bucket])
            for instruction in lowered.microbatch[position[id(reduction)] :]:
                if isinstance(instruction, Compute):
                    assert region_of[decisions.operators[instruction.operator].id] < first
            inside = [
                at
                for at, i in enumerate(lowered.microbatch)
                if isinstance(i, Compute) and region_of[decisions.operators[i.operator].id] == first
            ]
            assert max(inside) < position[id(reduction)]
        shards = [i.bucket for i in lowered.step if isinstance(i, ReduceShards)]
        assert shards == [b.id for b in decisions.buckets if b.zero_level and set(b.zero_axes) < set(b.axes)]
        rest = [i for i in lowered.step if not isinstance(i, ReduceGradients | ReduceShards)]
        assert rest == [UpdateParameters(), *(GatherUpdated(b) for b in levels if levels[b] in (1, 2))]


def regions_of_buckets(program: Program) -> dict[int, set[int]]:
    """Regions that first read the parameters of each bucket."""
    region_of = {name: n for n, region in enumerate(program.decisions.regions) for name in region.operators}
    first: dict[str, int] = {}
    for operator in program.decisions.operators:
        for operand in operator.inputs:
            read = None if operand is None else program.graph.tensors[operand.tensor].read
            if read is not None:
                first.setdefault(read.parameter, region_of[operator.id])
    return {bucket.id: {first[name] for name in bucket.parameters} for bucket in program.decisions.buckets}


@everywhere
def test_buckets_of_sharded_gradients_lie_in_one_region(program: Key) -> None:
    """From ZeRO 2 on a bucket holds parameters that one region reads first, and one setting."""
    for lowered in programs(*program):
        parameters = {parameter.name: parameter for parameter in lowered.decisions.parameters}
        for number, regions in regions_of_buckets(lowered).items():
            bucket = lowered.decisions.buckets[number]
            assert bucket.zero_level < 2 or len(regions) == 1
            settings = {
                (p.zero_level, p.zero_axes, p.data_axes, p.dtype) for p in map(parameters.get, bucket.parameters) if p
            }
            assert settings == {(bucket.zero_level, bucket.zero_axes, bucket.axes, bucket.dtype)}


def test_decisions_about_another_model_are_refused() -> None:
    """A plan for another model is refused with the place of the first difference and a remedy."""
    decisions = programs("gpt2_tiny", 0, "none")[0].decisions
    with pytest.raises(ApplyError, match="another model") as caught:
        lower(graph_of("hm_llama_tiny"), decisions)
    assert caught.value.hint


def test_regions_that_leave_out_operators_are_refused() -> None:
    """Regions must list the operators in order."""
    program = programs("gpt2_tiny", 0, "none")[0]
    with pytest.raises(ApplyError, match="order"):
        lower(program.graph, replace(program.decisions, regions=program.decisions.regions[1:]))
