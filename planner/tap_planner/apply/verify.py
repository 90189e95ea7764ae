"""Compares the execution of a plan with single-process execution, and its collectives with the plan's list.

The tolerances are those of definitions.md, "Comparing execution with the plan".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Axes, Communicator, Issued
from tap_planner.apply.executor import run_stages
from tap_planner.apply.in_flight import StepResult
from tap_planner.apply.operators import NO_CUSTOM, CustomFunctions
from tap_planner.apply.optimizer import Optimizer, make_optimizer
from tap_planner.apply.placing import assemble
from tap_planner.apply.reference import ReferenceResult, run_reference
from tap_planner.apply.values import output_placement
from tap_planner.apply.weights import WeightSource, random_part
from tap_planner.apply.workers import Worker, make_workers
from tap_planner.errors import ApplyError
from tap_planner.graph import Graph
from tap_planner.program import Phase, Program, collectives
from tap_planner.sharding import Placements

OUTPUT_TOLERANCE = 1e-12
LOSS_TOLERANCE = 1e-12
GRADIENT_TOLERANCE = 1e-10
SMALL_GRADIENT = 1e-6
"""A gradient is compared at least on this share of the model's largest."""
UPDATE_TOLERANCE = 1e-10
NO_GRADIENT = 1e-9
"""If no gradient of the model is larger, nothing was verified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One thing that was compared."""

    what: str
    """``output NAME``, ``loss``, ``gradient NAME`` or ``parameter NAME``."""
    error: float
    """Largest absolute difference over all replicas."""
    limit: float

    @property
    def passed(self) -> bool:
        """Whether the error is a number within the limit."""
        return self.error <= self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    """Outcome of a verification."""

    comparisons: tuple[Comparison, ...]
    num_collectives: int
    """Collectives that the rank at coordinate 0 issued in the step."""
    largest_gradient: float
    findings: tuple[str, ...]
    """What differs; empty when verified."""

    @property
    def passed(self) -> bool:
        """Whether execution is what the plan and the single process say."""
        return not self.findings

    def lines(self) -> tuple[str, ...]:
        """A summary for people."""
        lines: list[str] = []
        for kind in ("output", "loss", "gradient", "parameter"):
            rows = [row for row in self.comparisons if row.what.split(" ")[0] == kind]
            if rows:
                worst = max(rows, key=lambda row: row.error / row.limit if row.limit else float(row.error > 0))
                good = sum(row.passed for row in rows)
                limits = f"largest difference {worst.error:.1e} (limit {worst.limit:.1e})"
                lines.append(f"{kind}: {good} of {len(rows)} equal, {limits}")
        lines.append(f"collectives: {self.num_collectives} issued on rank 0")
        return (*lines, *self.findings)


def verify_program(
    program: Program,
    communicator: Communicator,
    weights: WeightSource,
    inputs: Mapping[str, np.ndarray],
    *,
    reference_graph: Graph | None = None,
    seed: int = 0,
    custom: CustomFunctions = NO_CUSTOM,
) -> VerificationReport | None:
    """Run one step in float64, on the mesh and in one process, and compare.

    Every process of the mesh must call it; the report is made where rank 0 is, the others get None.

    Args:
        program: what to verify.
        communicator: holds the ranks of this process.
        weights: values of the parameters.
        inputs: whole inputs of the global batch.
        reference_graph: the model bound with the global batch; not needed with one microbatch.
        seed: of the factors at the loss's gradient.
        custom: torch functions of the user's.

    Raises:
        ApplyError: ``reference_graph`` is missing.
    """
    graph = reference_graph or program.graph
    if reference_graph is None and program.decisions.microbatches > 1:
        raise ApplyError("verifying microbatches needs the graph bound with the global batch")
    factors = _Factors(program, graph, seed)
    workers = make_workers(
        program, communicator, weights, dtype=torch.float64, gradient_factor=factors.of_microbatch, custom=custom
    )
    results = run_stages([worker.executor for worker in workers], inputs)
    made = [each for worker, result in zip(workers, results, strict=True) for each in _made_by(worker, result)]
    everything = communicator.collect(made)
    if everything is None:
        return None
    gathered = _Gathered(program, everything)
    issued = [each.issued for each in everything]
    reference = run_reference(graph, weights, inputs, factors.of_whole, custom)
    return _Comparer(program, graph, gathered, reference).report(issued)


def _optimizer(program: Program) -> Optimizer:
    """A fresh one; both sides of the comparison round what they keep alike, as both are fed the same gradients."""
    return make_optimizer(program.decisions.optimizer, program.decisions.optimizer_states)


class _Factors:
    """Fixed pseudo-random factors in [0.5, 1.5) by global position at the operand of the loss."""

    def __init__(self, program: Program, graph: Graph, seed: int) -> None:
        self._seed = seed
        self._shape: tuple[int, ...] = ()
        self._dim: int | None = None
        self._size = 0
        if program.graph.loss is not None:
            part, whole = (g.operators[-1].signature.inputs[0] for g in (program.graph, graph))
            assert part is not None and whole is not None
            self._shape = whole.shape
            self._dim = microbatch_dim(part.shape, whole.shape)
            self._size = 0 if self._dim is None else part.shape[self._dim]

    def of_microbatch(self, indices: Sequence[np.ndarray], microbatch: int) -> np.ndarray:
        """Factors at positions of one microbatch."""
        moved = [held + microbatch * self._size if dim == self._dim else held for dim, held in enumerate(indices)]
        return 0.5 + random_part("loss gradient", self._shape, moved, self._seed)

    def of_whole(self, shape: tuple[int, ...]) -> np.ndarray:
        """Factors at all positions."""
        return 0.5 + random_part("loss gradient", shape, [np.arange(size) for size in shape], self._seed)


def microbatch_dim(part: tuple[int, ...], whole: tuple[int, ...]) -> int | None:
    """The dim in which a microbatch's tensor is a part of the whole one."""
    different = [dim for dim, (a, b) in enumerate(zip(part, whole, strict=True)) if a != b]
    return different[0] if different else None


@dataclass(slots=True)
class _Made:
    """What execution made on a rank."""

    issued: list[Issued]
    outputs: dict[str, list[Tensor]] = field(default_factory=dict)
    """Per microbatch."""
    losses: list[Tensor] = field(default_factory=list)
    """Per microbatch."""
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)


def _made_by(worker: Worker, result: StepResult) -> list[_Made]:
    """What a stage made, per rank that this process holds; all its processes call this."""
    made = [_Made(issued) for issued in worker.recorder.issued]
    training = worker.store.final_gradients(worker.communicator), worker.store.final_values(worker.communicator)
    for rank, each in enumerate(made):
        each.outputs = {name: [_host(parts[rank]) for parts in found] for name, found in result.outputs.items()}
        each.losses = [_host(parts[rank]) for parts in result.losses]
        each.gradients, each.parameters = (
            {name: _host(parts[rank]) for name, parts in found.items()} for found in training
        )
    return made


def _host(part: Tensor) -> Tensor:
    return part.detach().cpu()


Replicas = list[np.ndarray]
"""Whole values, one per replica."""


class _Gathered:
    """Everything that execution made, made whole.

    Args:
        program: what was run.
        made: by all ranks of all stages.
    """

    def __init__(self, program: Program, made: Sequence[_Made]) -> None:
        self._mesh_shape = program.decisions.mesh_shape
        ranks = len(made) // program.decisions.num_stages
        stages = [made[first : first + ranks] for first in range(0, len(made), ranks)]
        graph, placements = program.graph, {decision.name: decision for decision in program.decisions.parameters}
        self.outputs: dict[str, list[Replicas]] = {}
        """Per microbatch."""
        self.losses: list[Replicas] = []
        self.gradients: dict[str, Replicas] = {}
        """Of all stages that hold the parameter."""
        self.parameters: dict[str, Replicas] = {}
        for stage in stages:
            for name in stage[0].outputs:
                shape, placement = graph.tensors[name].type.shape, output_placement(program, name)
                by_rank = [each.outputs[name] for each in stage]
                self.outputs[name] = [self._whole(parts, shape, placement) for parts in zip(*by_rank, strict=True)]
            if graph.loss is not None and stage[0].losses:
                placement, by_rank = output_placement(program, graph.loss), [each.losses for each in stage]
                self.losses = [self._whole(parts, (), placement) for parts in zip(*by_rank, strict=True)]
            for target, by_name in (
                (self.gradients, [each.gradients for each in stage]),
                (self.parameters, [each.parameters for each in stage]),
            ):
                for name in by_name[0]:
                    parts, decision = [each[name] for each in by_name], placements[name]
                    target.setdefault(name, []).extend(self._whole(parts, decision.shape, decision.placement))

    def _whole(self, parts: Sequence[Tensor], shape: tuple[int, ...], placements: Placements) -> Replicas:
        return assemble(parts, shape, placements, self._mesh_shape)


class _Comparer:
    """Holds what is compared and writes the report."""

    def __init__(self, program: Program, graph: Graph, gathered: _Gathered, reference: ReferenceResult) -> None:
        self._program = program
        self._graph = graph
        self._gathered = gathered
        self._reference = reference
        self._rows: list[Comparison] = []
        self._findings: list[str] = []

    def report(self, issued: list[list[Issued]]) -> VerificationReport:
        """Compare everything."""
        self._outputs()
        largest = 0.0
        if self._program.decisions.mode == "train":
            self._loss()
            largest = self._gradients()
            self._updates()
        for row in self._rows:
            if not row.passed:
                self._findings.append(f"{row.what} differs by {row.error:.3e}, limit {row.limit:.3e}")
        self._findings.extend(collective_findings(self._program, issued))
        return VerificationReport(
            comparisons=tuple(self._rows),
            num_collectives=len(issued[0]),
            largest_gradient=largest,
            findings=tuple(self._findings),
        )

    def _add(self, what: str, replicas: Sequence[np.ndarray], expected: np.ndarray, limit: float) -> None:
        error = max((_difference(value, expected) for value in replicas), default=float("nan"))
        self._rows.append(Comparison(what=what, error=error, limit=limit))

    def _outputs(self) -> None:
        for name, shown in zip(self._program.graph.outputs, self._graph.output_names, strict=True):
            expected = self._reference.outputs[shown]
            if not np.isfinite(expected).all():
                self._findings.append(f"output {shown} of the single process is not finite")
            parts = self._gathered.outputs[name]
            dim = microbatch_dim(parts[0][0].shape, expected.shape)
            replicas = [each[0] if dim is None else np.concatenate(each, dim) for each in zip(*parts, strict=True)]
            scale = float(np.abs(expected.astype(np.float64)).max()) if expected.size else 0.0
            is_float = expected.dtype.kind == "f"
            self._add(f"output {shown}", replicas, expected, OUTPUT_TOLERANCE * scale if is_float else 0.0)

    def _loss(self) -> None:
        assert self._reference.loss is not None
        total = [np.asarray(sum(each)) for each in zip(*self._gathered.losses, strict=True)]
        losses = [value / self._program.loss_scale_denominator for value in total]
        limit = LOSS_TOLERANCE * self._reference.loss_scale
        self._add("loss", losses, np.asarray(self._reference.loss), limit)

    def _gradients(self) -> float:
        expected = self._reference.gradients
        largest = max((float(np.abs(value).max()) for value in expected.values() if value.size), default=0.0)
        if not largest >= NO_GRADIENT:
            self._findings.append(f"the model's largest gradient is {largest:.1e}: nothing is verified by comparing it")
        for name, value in expected.items():
            scale = max(float(np.abs(value).max()) if value.size else 0.0, SMALL_GRADIENT * largest)
            self._add(f"gradient {name}", self._gathered.gradients[name], value, GRADIENT_TOLERANCE * scale)
        return largest

    def _updates(self) -> None:
        optimizer = _optimizer(self._program)
        for name in self._reference.gradients:
            expected = self._updated(optimizer, name)
            scale = max(float(np.abs(expected).max()) if expected.size else 0.0, optimizer.learning_rate)
            self._add(f"parameter {name}", self._gathered.parameters[name], expected, UPDATE_TOLERANCE * scale)

    def _updated(self, optimizer: Optimizer, name: str) -> np.ndarray:
        """The single-process optimizer step, fed with the gradient that execution made."""
        value = self._reference.parameters[name].detach()
        gradient = torch.from_numpy(self._gathered.gradients[name][0])
        return optimizer.update((name, 0), value, gradient).numpy()


def _difference(value: np.ndarray, expected: np.ndarray) -> float:
    if value.shape != expected.shape:
        return float("inf")
    if value.size == 0:
        return 0.0
    if value.dtype.kind in "fiu":
        return float(np.abs(value.astype(np.float64) - expected.astype(np.float64)).max())
    return float((value != expected).any())


def collective_findings(program: Program, issued: Sequence[Sequence[Issued]]) -> list[str]:
    """How the collectives that the ranks issued differ from the program's lists, stage by stage.

    Args:
        program: what was run.
        issued: per rank of all stages, in rank order.
    """
    num_stages = program.decisions.num_stages
    ranks = len(issued) // num_stages
    findings: list[str] = []
    for stage in range(num_stages):
        first = stage * ranks
        where = f"stage {stage}: " if num_stages > 1 else ""
        found = _findings_of_stage(program, stage, issued[first : first + ranks], first)
        findings.extend(f"{where}{each}" for each in found)
    return findings


def _findings_of_stage(program: Program, stage: int, issued: Sequence[Sequence[Issued]], first: int) -> list[str]:
    planned: Counter[tuple[Phase, str, Axes, int]] = Counter()
    for entry in collectives(program, stage):
        planned[entry.phase, entry.kind, entry.axes, entry.elements] += entry.count
    seen = Counter((each.phase, each.kind, each.axes, each.elements) for each in issued[0])
    findings = [
        f"collective {kind} over axes {list(axes)} of {elements} elements in {phase.value}: "
        f"issued {seen[phase, kind, axes, elements]} times, the plan says {planned[phase, kind, axes, elements]}"
        for phase, kind, axes, elements in sorted(planned | seen, key=str)
        if seen[phase, kind, axes, elements] != planned[phase, kind, axes, elements]
    ]
    sequence_of_first = [(each.phase, each.kind, each.axes) for each in issued[0]]
    for rank, sequence in enumerate(issued[1:], start=first + 1):
        if [(each.phase, each.kind, each.axes) for each in sequence] != sequence_of_first:
            findings.append(f"rank {rank} issued another sequence of collectives than rank {first}")
        elif any(each.elements > other.elements for each, other in zip(sequence, issued[0], strict=True)):
            findings.append(f"rank {rank} issued a larger collective than rank {first}")
    return findings
