"""What is to be applied, as values that can be sent to other processes; and doing it in this one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch

from tap_planner.apply.clock import now_ns
from tap_planner.apply.communicator import Communicator
from tap_planner.apply.executor import run_stages
from tap_planner.apply.in_flight import StepResult
from tap_planner.apply.inputs import load_inputs, synthetic_inputs
from tap_planner.apply.operators import CustomFunctions, check_executable, load_custom_operators
from tap_planner.apply.placing import assemble
from tap_planner.apply.values import output_placement
from tap_planner.apply.verify import VerificationReport, microbatch_dim, verify_program
from tap_planner.apply.weights import RandomWeights, StoredWeights, WeightSource
from tap_planner.apply.workers import Worker, make_workers
from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, Graph, ModelFile, WeightReader, bind, load_model
from tap_planner.plan import Decisions
from tap_planner.program import Program, lower_plan

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What floats are computed in, by precision."""

_SMALL_ELEMENTS = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyJob:
    """A plan, its model and what to do with them."""

    model: Path
    options: BindOptions
    """As the plan was made: the batch is the global one."""
    decisions: Decisions
    graph_digest: str | None = None
    """The plan's; a model that is bound to another is refused. None: not checked."""
    random_weights: bool = False
    """Make random weights (``--init random``) instead of reading them."""
    seed: int = 0
    """Of random weights and synthetic inputs."""
    inputs: Path | None = None
    """``.npz`` file; None: synthetic."""
    steps: int = 1
    verify: bool = False
    """Verify one step in float64 instead of running steps in the plan's precision."""
    keep_outputs: bool = False
    """Bring the outputs of the last step together."""
    custom_ops: tuple[Path, ...] = ()
    """Python files with torch functions of the user's; every process runs their code."""
    devices: tuple[int, ...] = ()
    """Number of each rank's device among those of the cluster; empty where the plan uses all, in order."""
    num_devices: int | None = None
    """Devices of the cluster, as many processes may there be; None: those of the plan."""

    def members(self, world: int) -> tuple[int, ...]:
        """The process that holds each rank, of ``world`` processes: the one on the rank's device where
        there is one process for each device of the cluster, else the first ones; the others are idle.

        Raises:
            ApplyError: there are too few processes, or more than devices.
        """
        ranks, stages = self.decisions.num_ranks, self.decisions.num_stages
        most = self.num_devices or ranks
        if not ranks <= world <= most:
            shown = f"mesh {'x'.join(map(str, self.decisions.mesh_shape))}"
            if stages > 1:
                shown = f"{stages} stages of {shown}"
            raise ApplyError(
                f"the plan's {shown} {'have' if stages > 1 else 'has'} {ranks} ranks, got {world} processes",
                hint=f"start {ranks}{f' to {most}' if most > ranks else ''} processes, or none to emulate them",
            )
        return self.devices if self.devices and world == most else tuple(range(ranks))


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """What was done, as a process saw it. Only the process that holds rank 0 has a report and outputs."""

    holds_first: bool
    """Whether the process holds rank 0."""
    num_ranks: int
    losses: tuple[float, ...]
    """Per step; empty in inference, when verifying, and on processes that hold neither rank 0 nor a rank of the stage
    that makes the loss."""
    num_collectives: int
    """Collectives that rank 0 issued in all steps."""
    report: VerificationReport | None
    outputs: tuple[tuple[str, np.ndarray], ...]
    """Whole outputs of the last step by ONNX name, where they were asked for."""
    step_ns: tuple[int, ...] = ()
    """What each step took on this process, without making its inputs; empty when verifying."""


def idle_result(job: ApplyJob) -> ApplyResult:
    """What a process has to say that holds no rank."""
    return ApplyResult(
        holds_first=False, num_ranks=job.decisions.num_ranks, losses=(), num_collectives=0, report=None, outputs=()
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A job with its model read."""

    program: Program
    whole: Graph
    """Bound with the global batch."""
    weights: WeightSource
    custom: CustomFunctions


def load_functions(job: ApplyJob) -> CustomFunctions:
    """Run the user's files and check that every operator of the plan can be executed.

    Raises:
        ApplyError: a file is wrong, or an operator has no torch function.
    """
    custom = load_custom_operators(job.custom_ops)
    ruled = {rule.type for rule in job.options.custom_rules}
    check_executable((operator.type for operator in job.decisions.operators), ruled, custom)
    return custom


def prepare(job: ApplyJob) -> Prepared:
    """Read and bind a job's model and check that the plan is about it.

    Raises:
        ApplyError: the plan is about another graph, or weights or a torch function are absent.
    """
    custom = load_functions(job)
    model = load_model(job.model)
    whole = bind(model, job.options)
    if job.graph_digest is not None and whole.digest != job.graph_digest:
        raise ApplyError(
            f"model {job.model.name!r} gives graph {whole.digest[:12]}, the plan was made for {job.graph_digest[:12]}",
            hint="give the model that the plan was made from with --model, or plan anew",
        )
    microbatches = job.decisions.microbatches
    part = whole
    if microbatches > 1:
        part = bind(model, replace(job.options, batch=whole.batch // microbatches))
    weights = RandomWeights(whole, job.seed) if job.random_weights else _stored_weights(model, whole)
    return Prepared(program=lower_plan(part, job.decisions), whole=whole, weights=weights, custom=custom)


def _stored_weights(model: ModelFile, graph: Graph) -> StoredWeights:
    reader = WeightReader(model)
    wanted = [*(parameter.name for parameter in graph.parameters), *graph.constants.outside()]
    problems = [problem for name in wanted if (problem := reader.problem(name)) is not None]
    if problems:
        raise ApplyError(
            f"weights of {graph.name!r} are absent, {len(problems)} of {len(wanted)}: {problems[0].message}",
            hint=problems[0].hint,
        )
    return StoredWeights(reader)


def run_job(job: ApplyJob, communicator: Communicator, prepared: Prepared | None = None) -> ApplyResult:
    """Do a job on the ranks of this process; all processes of the mesh call it.

    Args:
        job: what to do.
        communicator: holds the ranks of this process.
        prepared: what ``prepare`` gave in this process; None: it is called here.

    Raises:
        ApplyError: the plan cannot be executed.
    """
    prepared = prepare(job) if prepared is None else prepared
    with _fitting_threads(prepared.whole):
        if job.verify:
            return _verify(job, prepared, communicator)
        return JobRunner(job, prepared, communicator).run()


@contextmanager
def _fitting_threads(graph: Graph) -> Iterator[None]:
    """One thread where every tensor is small: there threads cost more than they bring (3 to 6 times, 2 busy cores)."""
    before = torch.get_num_threads()
    if max(tensor.type.num_elements for tensor in graph.tensors.values()) < _SMALL_ELEMENTS:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _inputs(job: ApplyJob, whole: Graph, step: int) -> dict[str, np.ndarray]:
    return synthetic_inputs(whole, job.seed + step) if job.inputs is None else load_inputs(job.inputs, whole)


def _verify(job: ApplyJob, prepared: Prepared, communicator: Communicator) -> ApplyResult:
    report = verify_program(
        prepared.program,
        communicator,
        prepared.weights,
        _inputs(job, prepared.whole, 0),
        reference_graph=prepared.whole,
        seed=job.seed,
        custom=prepared.custom,
    )
    return ApplyResult(
        holds_first=report is not None,
        num_ranks=job.decisions.num_ranks,
        losses=(),
        num_collectives=0 if report is None else report.num_collectives,
        report=report,
        outputs=(),
    )


class JobRunner:
    """Runs the steps of a job.

    Args:
        job: what to do.
        prepared: its model, read.
        communicator: holds the ranks of this process.
    """

    def __init__(self, job: ApplyJob, prepared: Prepared, communicator: Communicator) -> None:
        self._job = job
        self._program = prepared.program
        self._whole = prepared.whole
        self._communicator = communicator
        dtype = DTYPES[self._program.decisions.precision]
        self._workers = make_workers(self._program, communicator, prepared.weights, dtype=dtype, custom=prepared.custom)

    def run(self) -> ApplyResult:
        """All steps."""
        said = [[_Said() for _ in worker.communicator.ranks] for worker in self._workers]
        step_ns: list[int] = []
        for step in range(self._job.steps):
            results, ns = self.step(step)
            step_ns.append(ns)
            keeps_outputs = self._job.keep_outputs and step == self._job.steps - 1
            for worker, result, ranks in zip(self._workers, results, said, strict=True):
                losses = self._loss(worker, result)
                for rank, each in enumerate(ranks):
                    each.losses.extend(losses)
                    if keeps_outputs:
                        each.outputs = {n: [p[rank].detach().cpu() for p in of] for n, of in result.outputs.items()}
        own = [each for ranks in said for each in ranks]
        everything = self._communicator.collect(own)
        return ApplyResult(
            holds_first=everything is not None,
            num_ranks=self._program.decisions.num_ranks,
            losses=tuple(next((each.losses for each in everything or own if each.losses), ())),
            num_collectives=len(self._workers[0].recorder.issued[0]),
            report=None,
            outputs=self._outputs(everything) if everything is not None and self._job.keep_outputs else (),
            step_ns=tuple(step_ns),
        )

    def step(self, number: int) -> tuple[list[StepResult], int]:
        """One step, by stage, and what it took in ns, without making its inputs."""
        inputs = _inputs(self._job, self._whole, number)
        device = self._communicator.device
        begin = now_ns(device)
        results = run_stages([worker.executor for worker in self._workers], inputs)
        return results, now_ns(device) - begin

    def _loss(self, worker: Worker, result: StepResult) -> list[float]:
        """The reported loss: summed over the axes where the loss is P, averaged over microbatches (not counted)."""
        name = self._program.graph.loss
        if name is None or not result.losses:
            return []
        axes = tuple(axis for axis, p in enumerate(output_placement(self._program, name)) if p.is_partial)
        summed = [worker.communicator.all_reduce(parts, axes) if axes else parts for parts in result.losses]
        return [float(sum(parts[0].double() for parts in summed)) / self._program.loss_scale_denominator]

    def _outputs(self, said: Sequence[_Said]) -> tuple[tuple[str, np.ndarray], ...]:
        wholes: list[tuple[str, np.ndarray]] = []
        part, whole, mesh_shape = self._program.graph, self._whole, self._program.decisions.mesh_shape
        for name, whole_name, shown in zip(part.outputs, whole.outputs, whole.output_names, strict=True):
            shape, placements = part.tensors[name].type.shape, output_placement(self._program, name)
            by_rank = [each.outputs[name] for each in said if name in each.outputs]
            values = [assemble(parts, shape, placements, mesh_shape)[0] for parts in zip(*by_rank, strict=True)]
            if values:
                dim = microbatch_dim(shape, whole.tensors[whole_name].type.shape)
                wholes.append((shown, values[0] if dim is None else np.concatenate(values, dim)))
        return tuple(wholes)


@dataclass(slots=True)
class _Said:
    """What a rank has to say about the steps."""

    losses: list[float] = field(default_factory=list)
    """Per step, where its stage makes the loss."""
    outputs: dict[str, list[torch.Tensor]] = field(default_factory=dict)
    """Of the last step, per microbatch."""
