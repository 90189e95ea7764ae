"""Measured steps as the planner sees them: the plan that ran, found under rules, and what it is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from tap_planner.cluster import Cluster
from tap_planner.plan import Constraint, PlanOptions, cut_decisions, parse_constraint
from tap_planner.program import Program, lower
from tap_planner.requests import prepare
from tap_planner.schedule import make_schedule
from tap_planner.search import SearchResult, search
from tap_planner.simulate import price_program, simulate
from tests.bench.measured_steps import MeasuredStep
from tests.bench.megatron_gpt import write_gpt
from tests.bench.step_constants import Fitted, with_constants

_DATA = ("*:replicate", "batch=dp")
"""Every parameter whole (but for ZeRO), samples along ``dp``."""
_TENSOR = (
    "batch=dp",
    "*.qkv.weight:tp=column",
    "*.up.weight:tp=column",
    "*.dense.weight:tp=row",
    "*.down.weight:tp=row",
    "embedding.word.weight:tp=vocabulary",
)
"""Megatron's splits."""
_BETWEEN = ("LayerNormalization", "*.added", "embedding.sum")
"""What lies between the splits: whole on ``tp``, or split along the sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedStep:
    """The plan of a measured step."""

    step: MeasuredStep
    program: Program
    cluster: Cluster
    memory_bytes: int
    """Memory model M."""

    def predicted_ns(self, cluster: Cluster | None = None) -> int:
        """The predicted step; where the library overlaps nothing, with all its communication.

        Args:
            cluster: the same cluster with other constants.
        """
        return simulate(self.program, cluster or self.cluster, overlap=self.step.overlap).step_ns

    @property
    def fits(self) -> bool:
        """Whether the plan is within the device's memory."""
        return self.memory_bytes <= self.cluster.usable_memory_bytes


def plan_step(step: MeasuredStep, folder: Path, fitted: Fitted | None = None) -> PlannedStep:
    """Find the plan that ran.

    Args:
        step: what ran.
        folder: where the model's file goes.
        fitted: constants of devices, instead of the catalogue's.

    Raises:
        TapError: there is none.
    """
    planned = _planned(step, folder, fitted or {})
    while step.is_micro_batch_assumed and not planned.fits and step.micro_batch % 2 == 0:
        step = replace(step, micro_batch=step.micro_batch // 2)
        planned = _planned(step, folder, fitted or {})
    return planned


def _planned(step: MeasuredStep, folder: Path, fitted: Fitted) -> PlannedStep:
    cluster, stage = (with_constants(found, fitted) for found in (step.cluster(), step.cluster(step.tp * step.dp)))
    options = PlanOptions(
        batch=step.global_batch,
        precision=step.precision,
        loss="cross-entropy",
        zero=step.zero,
        microbatches=step.microbatches,
        recompute=step.recompute.value,
        mesh=step.mesh,
        max_memory_bytes="none",
        constraints=_rules(step),
        custom_rules=step.shape.rules_with(fused_softmax=step.fused_softmax),
    )
    prepared = prepare(write_gpt(folder, step.shape, fused_softmax=step.fused_softmax), stage, options)
    mesh = replace(prepared.request.meshes[0], num_stages=step.pp)
    result = search(replace(prepared.request, hybrid_zero=False, cluster=cluster, meshes=(mesh,)))
    if step.pp == 1:
        program = lower(result.folded.graph, result.decisions)
        num_bytes = price_program(program, cluster).memory_bytes
    else:
        program = _cut(step, result)
        num_bytes = simulate(program, cluster).peak_bytes
    return PlannedStep(step=step, program=program, cluster=cluster, memory_bytes=num_bytes)


def _cut(step: MeasuredStep, result: SearchResult) -> Program:
    """The plan with Megatron's stages: layers in equal parts, embedding and loss with the first and the last."""
    graph, parts = result.folded.graph, step.pp * step.chunks
    each = step.shape.layers // parts
    starts = [graph.operators[0].id, *(f"layers.{part * each}.input_norm.out" for part in range(1, parts))]
    name, chunks = ("interleaved", step.chunks) if step.chunks > 1 else ("1f1b", None)
    schedule = make_schedule(name, step.pp, step.microbatches, chunks)
    scattered = [axis for axis, given in enumerate(result.decisions.axes) if given.name == "tp" and step.scatter]
    return lower(*cut_decisions(graph, result.decisions, starts, schedule, tuple(scattered)))


def _rules(step: MeasuredStep) -> tuple[Constraint, ...]:
    rules = _DATA
    if step.tp > 1:
        between = "sequence" if step.sequence_parallel else "none"
        rules = (*_TENSOR, *(f"{name}:tp={between}" for name in _BETWEEN))
    return tuple(parse_constraint(rule) for rule in rules if step.dp > 1 or "=dp" not in rule)
