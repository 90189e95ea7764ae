"""Plans whose regions and groups are treated differently: they verify, and hold what memory model M says they hold."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from tap_planner.apply import ApplyJob, LockstepCommunicator, RandomWeights, apply_job, synthetic_inputs
from tap_planner.apply.communicator import Parts, RecordingCommunicator
from tap_planner.apply.executor import StepExecutor
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.cluster import load_cluster
from tap_planner.graph import BindOptions, LossOptions
from tap_planner.program import Compute, ForgetParameters, GatherParameters, Instruction, Phase, Program, lower
from tap_planner.sharding import Placements, local_shape
from tap_planner.simulate import price_program
from tap_planner.simulate.holding import held_for_backward, working_regions
from tests.apply.test_verify import Case
from tests.graph.models import DATA

SETTINGS = ("none", "selective", "full")
_SEQ = {"seq": 8}
GPT2 = Case(model="gpt2_tiny", dims=_SEQ, loss="cross-entropy", zero=None, recompute="mixed")
CASES = (
    GPT2,
    replace(GPT2, model="llama_tiny", loss="mean"),
    replace(GPT2, model="t5_tiny", loss="mean", dims={"seq": 8, "dec_seq": 6}),
    replace(GPT2, model="gshard_moe_tiny", loss="mean", dims={}),
)
MORE = (
    replace(GPT2, batch=5, dims={"seq": 7}),
    replace(GPT2, microbatches=2),
    replace(GPT2, model="resnet_small", loss="mean", dims={}),
    replace(GPT2, model="hm_mixtral_tiny", loss="mean"),
)
MESHES = ((2, 2), (2, 4))
everywhere = pytest.mark.parametrize(
    ("case", "mesh_shape"),
    [
        pytest.param(case, mesh, id=f"{case.model}-{mesh}", marks=pytest.mark.full if mesh == (2, 4) and number else ())
        for number, case in enumerate(CASES)
        for mesh in MESHES
    ],
)


def check(case: Case, mesh_shape: tuple[int, ...], seed: int) -> None:
    """A random plan verifies: outputs, gradients, updated parameters, and the plan's list of collectives."""
    report = case.verify(case.decisions(mesh_shape, seed))
    assert report.passed, "\n".join(report.lines())


@everywhere
def test_mixed_plans_verify(case: Case, mesh_shape: tuple[int, ...]) -> None:
    """Recompute differs from region to region, ZeRO level and axes from group to group."""
    check(case, mesh_shape, 101)


@pytest.mark.full
@pytest.mark.parametrize("mesh_shape", [*MESHES, (2, 2, 2)], ids=str)
@pytest.mark.parametrize("case", [*CASES, *MORE], ids=lambda case: f"{case.model}-b{case.batch}-m{case.microbatches}")
def test_many_mixed_plans_verify(case: Case, mesh_shape: tuple[int, ...]) -> None:
    """The same on three meshes for 12 seeds, with uneven parts, microbatches, convolutions and experts."""
    for seed in range(12):
        check(case, mesh_shape, seed)


@pytest.mark.parametrize("zero", [1, 2, 3])
def test_selective_recompute_verifies(zero: int) -> None:
    """Every occurrence selective, at each ZeRO level, with two microbatches."""
    check(replace(GPT2, zero=zero, recompute="selective", microbatches=2), (2, 2), zero)


def test_the_random_plans_are_mixed() -> None:
    """What verifies above holds every setting, hybrid groups at each level, and levels side by side."""
    settings, groups, mixed = Counter[str](), Counter[tuple[int, bool]](), 0
    for case in CASES:
        for mesh_shape in MESHES:
            decisions = case.decisions(mesh_shape, 101)
            settings.update(region.recompute for region in decisions.regions)
            groups.update((b.zero_level, bool(b.rest_axes)) for b in decisions.buckets)
            mixed += len({b.zero_level for b in decisions.buckets}) > 1
    assert set(settings) == set(SETTINGS)
    assert {(1, True), (2, True), (3, True), (0, False), (1, False), (2, False), (3, False)} <= set(groups)
    assert mixed > len(CASES)


@pytest.mark.full
@pytest.mark.parametrize("case", CASES[:3], ids=lambda case: case.model)
def test_processes_verify(case: Case) -> None:
    """Four gloo processes verify mixed plans with two microbatches, with as many collectives as lockstep."""
    case = replace(case, microbatches=2)
    decisions = case.decisions((2, 2), 105)
    assert len({b.zero_level for b in decisions.buckets}) > 1 and any(b.rest_axes for b in decisions.buckets)
    options = BindOptions(batch=4, dims=case.dims, training=True, loss=LossOptions(kind=case.loss))  # type: ignore[arg-type]
    job = ApplyJob(
        model=DATA / f"{case.model}.onnx",
        options=options,
        decisions=decisions,
        graph_digest=case.graph(4).digest,
        random_weights=True,
        verify=True,
    )
    result, lockstep = apply_job(job, num_processes=4), apply_job(job)
    assert result is not None and result.report is not None and lockstep is not None
    assert result.report.passed, "\n".join(result.report.lines())
    assert result.num_collectives == lockstep.num_collectives > 0


# What is held ---------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Seen:
    """What an execution showed."""

    held: dict[tuple[str, Placements], Parts] = field(default_factory=dict)
    """When forward ended."""
    made: dict[int, list[StorageWeakRef]] = field(default_factory=dict)
    """Per operator the memory of its outputs of forward."""
    alive: set[int] = field(default_factory=set)
    """What of that memory was in use when forward ended."""
    memory: set[int] = field(default_factory=set)
    """The memory of ``held``, and of the graph's outputs."""
    gathered: dict[int, StorageWeakRef] = field(default_factory=dict)
    """Per bucket the memory of its gathered parameters of forward."""
    left: list[int] = field(default_factory=list)
    """Buckets whose memory was still in use when they had been forgotten."""


class Watching(StepExecutor):
    """Looks at what is held."""

    seen: Seen
    _at_the_end = False

    def _execute(self, instruction: Instruction) -> None:
        match instruction:
            case Compute(phase=Phase.BACKWARD) if not self._at_the_end:
                self._at_the_end = True
                self.seen.held = self._state.values.held()
                self.seen.alive = {
                    memory.cdata for made in self.seen.made.values() for memory in made if not memory.expired()
                }
                lasting = (*self.seen.held.values(), *self._state.results.values())
                self.seen.memory = {StorageWeakRef(parts[0].untyped_storage()).cdata for parts in lasting}
            case _:
                pass
        super()._execute(instruction)
        match instruction:
            case Compute(phase=Phase.FORWARD, operator=index):
                outputs = self._decisions.operators[index].outputs
                parts = [self._state.values.get(o.tensor)[0] for o in outputs]
                self.seen.made[index] = [StorageWeakRef(part.untyped_storage()) for part in parts if part.numel()]
            case GatherParameters(phase=Phase.FORWARD, bucket=bucket):
                name = self._decisions.buckets[bucket].parameters[0]
                self.seen.gathered[bucket] = StorageWeakRef(self._store.parts(name)[0].untyped_storage())
            case ForgetParameters(bucket=bucket) if not self._at_the_end:
                if not self.seen.gathered[bucket].expired():
                    self.seen.left.append(bucket)
            case _:
                pass


def watched(program: Program) -> Seen:
    """Run one step and look at it."""
    communicator = RecordingCommunicator(LockstepCommunicator(program.decisions.mesh_shape))
    store = ParameterStore(program, communicator, RandomWeights(program.graph), torch.float64)
    executor = Watching(program, communicator, store, make_optimizer("adamw"), dtype=torch.float64)
    executor.seen = Seen()
    executor.run(synthetic_inputs(program.graph))
    return executor.seen


def entry_bytes(program: Program, name: str, placements: Placements) -> int:
    """Bytes of a tensor's part on the rank at coordinate 0, floats in float64."""
    tensor = program.graph.tensors[name].type
    count = 1
    for size in local_shape(tensor.shape, placements, program.decisions.mesh_shape):
        count *= size
    return count * (8 if tensor.is_float else {"int64": 8, "int32": 4, "bool": 1}[tensor.dtype])


def only_shared_copies(program: Program, name: str) -> bool:
    """Whether fully recomputed regions read a tensor of another region through copies alone that regions share.

    M counts both the tensor and the copies then, an overestimate.
    """
    region_of = {op: n for n, region in enumerate(program.decisions.regions) for op in region.operators}
    copies = {
        (r.tensor, r.to, r.gradient): {region_of[c] for c in r.consumers} for r in program.decisions.redistributions
    }
    made_in = {o.tensor: region_of[d.id] for d in program.decisions.operators for o in d.outputs}
    for decision in program.decisions.operators:
        region = region_of[decision.id]
        for operand in decision.inputs:
            if operand is None or operand.tensor != name or region == made_in[name]:
                continue
            shared = len(copies.get((name, operand.placement, operand.gradient), ())) > 1
            if program.decisions.regions[region].recompute == "full" and not shared:
                return False
    return True


@pytest.mark.parametrize(
    "recompute",
    [pytest.param("none", marks=pytest.mark.full), "selective", pytest.param("full", marks=pytest.mark.full), "mixed"],
)
@everywhere
def test_held_activations_are_those_of_the_memory_model(
    case: Case, mesh_shape: tuple[int, ...], recompute: str
) -> None:
    """When forward ends a rank holds exactly what M counts without the working occurrence's extra."""
    decisions = replace(case, recompute=recompute).decisions(mesh_shape, 7)
    program = lower(case.graph(case.batch), decisions)
    seen = watched(program)
    counted, everything = held_for_backward(program, with_working=False), held_for_backward(program)
    held = frozenset(seen.held)
    assert held <= counted <= everything
    overestimate, extra = counted - held, everything - counted
    assert all(only_shared_copies(program, name) for name, _ in overestimate)
    real = sum(parts[0].numel() * parts[0].element_size() for parts in seen.held.values())
    price = price_program(program, load_cluster("1x8:a100-sxm4-80gb" if mesh_shape == (2, 4) else "2x2:a100-sxm4-80gb"))
    besides = sum(entry_bytes(program, *entry) for entry in overestimate | extra)
    assert real == price.activation_bytes - besides
    inside = {name for number in working_regions(decisions) for name in decisions.regions[number].operators}
    touched = {
        name
        for operator in program.graph.operators
        if operator.id in inside
        for name in (*operator.inputs, *operator.outputs)
    }
    assert touched >= {name for name, _ in extra}
    assert recompute != "none" or not extra


def test_the_working_occurrence_counts() -> None:
    """Where the last occurrence is recomputed M counts more than is held when forward ends."""
    extras = []
    for seed in range(4):
        decisions = replace(GPT2, recompute="selective").decisions((2, 2), seed)
        program = lower(GPT2.graph(GPT2.batch), decisions)
        extras.append(len(held_for_backward(program) - held_for_backward(program, with_working=False)))
    assert max(extras) > 0


@everywhere
def test_memory_of_what_runs_again_is_free(case: Case, mesh_shape: tuple[int, ...]) -> None:
    """When forward ends nobody, torch's autograd included, holds what is to be made again, unless it is a view of what
    is held; a group's whole parameters are gone once they are forgotten."""
    for recompute in ("selective", "full"):
        decisions = replace(case, recompute=recompute).decisions(mesh_shape, 3)
        program = lower(case.graph(case.batch), decisions)
        seen = watched(program)
        again = {i.operator for i in program.microbatch if isinstance(i, Compute) and i.phase is Phase.RECOMPUTE}
        assert again
        left = {
            program.decisions.operators[index].id
            for index in again
            for memory in seen.made[index]
            if memory.cdata in seen.alive - seen.memory
        }
        assert not left
        assert not seen.left
