"""What planning a combination gave, and how combinations are ranked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from fractions import Fraction
from typing import Any

from tap_planner.cluster import mesh_text
from tap_planner.errors import InfeasibleError, LimitReachedError, TapError
from tap_planner.plan import PlanDocument
from tap_planner.sweep.combinations import Combination
from tap_planner.sweep.pareto import pareto_front

__all__ = [
    "Outcome",
    "RankedRow",
    "Status",
    "better_of",
    "failed_outcome",
    "outcome_of_error",
    "outcome_of_plan",
    "rank",
]


class Status(Enum):
    """How planning a combination ended."""

    PLANNED = "planned"
    INFEASIBLE = "infeasible"
    """Proven: nothing fits."""
    NOT_FOUND = "not found"
    """Nothing that fits was found, and it is not proven that nothing does."""
    IMPOSSIBLE = "impossible"
    """There is no such plan: the options, the model and the cluster do not go together."""
    FAILED = "failed"
    """A bug, or its process was ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What planning a combination gave."""

    status: Status
    seconds: float = 0.0
    """Wall time."""
    batch: int | None = None
    mesh: str = ""
    microbatches: int | None = None
    schedule: str = ""
    """Of a pipeline."""
    step_ns: int | None = None
    """Predicted."""
    objective_ns: int | None = None
    """Objective A."""
    objective_bytes: int | None = None
    """What a device sends or needs, where that is the objective."""
    bound_ns: int | None = None
    gap_basis_points: int | None = None
    """Of the objective that was asked for."""
    memory_bytes: int | None = None
    """Per device."""
    tokens: int | None = None
    """New ones of a step, of a decoder with caches."""
    decisions: str = ""
    """Digest of the plan's decisions."""
    least_memory_bytes: int | None = None
    """Per device: no plan needs less, where nothing fits."""
    limit_bytes: int | None = None
    reason: str = ""
    """Why there is no plan."""

    def to_json(self) -> dict[str, object]:
        """What there is."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {**{key: value for key, value in found.items() if value not in (None, "")}, "status": self.status.value}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Outcome:
        """Inverse of ``to_json``.

        Raises:
            ValueError: it is no outcome.
        """
        known = {field.name: str(field.type) for field in fields(cls)}
        for key, value in found.items():
            wanted = known.get(key, "")
            kind = str if wanted in ("str", "Status") else (int, float) if wanted == "float" else int
            if not wanted or isinstance(value, bool) or not isinstance(value, kind):
                raise ValueError(f"{key!r} is no figure of a combination")
        return cls(**{**found, "status": Status(found["status"])})

    @property
    def time_per_sample(self) -> Fraction:
        """Predicted ns of a step, of each of its samples: steps of unlike batches can be compared by it."""
        return Fraction(self.step_ns or 0, self.batch or 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankedRow:
    """A combination and its outcome among the others."""

    combination: Combination
    outcome: Outcome
    rank: int | None = None
    """From 1, of those that were planned."""
    pareto: bool = False
    """Whether no other plan is faster without needing more memory, or needs less without being slower."""


def outcome_of_plan(document: PlanDocument, seconds: float) -> Outcome:
    """The figures of a plan."""
    certificate, mesh, pipeline = document.certificate, document.mesh, document.pipeline
    return Outcome(
        status=Status.PLANNED,
        seconds=seconds,
        batch=document.model.batch,
        mesh=mesh_text(mesh.axes, mesh.order, pipeline.num_stages),
        microbatches=pipeline.microbatches,
        schedule=pipeline.schedule if pipeline.num_stages > 1 else "",
        step_ns=document.predicted.step_ns,
        objective_ns=certificate.objective_ns,
        objective_bytes=certificate.objective_bytes,
        bound_ns=certificate.bound_ns,
        gap_basis_points=certificate.gap_basis_points,
        memory_bytes=document.predicted.total_memory_bytes,
        tokens=document.predicted.tokens,
        decisions="" if document.digests is None else document.digests.decisions,
    )


def outcome_of_error(error: TapError, seconds: float) -> Outcome:
    """Why there is no plan."""
    if isinstance(error, InfeasibleError):
        return Outcome(
            status=Status.INFEASIBLE,
            seconds=seconds,
            least_memory_bytes=error.least_memory_bytes,
            limit_bytes=error.limit_bytes,
            reason=error.message,
        )
    status = Status.NOT_FOUND if isinstance(error, LimitReachedError) else Status.IMPOSSIBLE
    return Outcome(status=status, seconds=seconds, reason=error.message)


def failed_outcome(reason: str, seconds: float = 0.0) -> Outcome:
    """Not an answer: planning it again may give one."""
    return Outcome(status=Status.FAILED, seconds=seconds, reason=reason)


def rank(
    combinations: Sequence[Combination], outcomes: Mapping[int, Outcome], objective: str = "time"
) -> tuple[RankedRow, ...]:
    """The combinations that have an outcome, the best first, then those without a plan.

    Args:
        combinations: all.
        outcomes: by number of the combination.
        objective: what is to be least; of equal ones the time, then the memory decides, then the order of the grid.
    """
    planned = [number for number in sorted(outcomes) if outcomes[number].status is Status.PLANNED]
    front = pareto_front(
        [outcomes[number].time_per_sample for number in planned],
        [outcomes[number].memory_bytes or 0 for number in planned],
    )
    on_front = {number for number, is_best in zip(planned, front, strict=True) if is_best}
    planned.sort(key=lambda number: (_key(outcomes[number], objective), number))
    rows = [
        RankedRow(combination=combinations[number], outcome=outcomes[number], rank=place, pareto=number in on_front)
        for place, number in enumerate(planned, start=1)
    ]
    order = list(Status)
    others = [number for number in sorted(outcomes) if outcomes[number].status is not Status.PLANNED]
    others.sort(key=lambda number: (order.index(outcomes[number].status), outcomes[number].least_memory_bytes or 0))
    rows += [RankedRow(combination=combinations[number], outcome=outcomes[number]) for number in others]
    return tuple(rows)


def _key(outcome: Outcome, objective: str) -> tuple[Fraction | int, ...]:
    time, size = outcome.time_per_sample, outcome.memory_bytes or 0
    if objective == "memory":
        return size, time
    if objective == "communication":
        return Fraction(outcome.objective_bytes or 0, outcome.batch or 1), time, size
    return time, size


def better_of(one: Outcome | None, other: Outcome, objective: str) -> Outcome | None:
    """The better plan of two, the first where they are alike; None where there is none."""
    if other.status is not Status.PLANNED:
        return one
    return other if one is None or _key(other, objective) < _key(one, objective) else one
