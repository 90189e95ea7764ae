"""The best plans on other meshes: what a different mesh would cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from tap_planner.documents import lower_result
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.requests import PreparedSearch

if TYPE_CHECKING:
    from tap_planner.search import SearchResult

__all__ = ["Alternative", "best_on_other_meshes"]

GAP = Fraction(1, 100)
"""Searches for alternatives end when they are proven this near their optimum, or as near as was asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """The best plan on another mesh."""

    mesh: str
    microbatches: int
    objective_ns: int
    """Objective A."""
    bound_ns: int | None
    """No plan on this mesh, or on one that comes after it, has a smaller objective; None where sent bytes are that."""
    memory_bytes: int
    """Per device."""
    step_ns: int
    """Predicted."""
    objective_bytes: int | None = None
    """What a device sends or needs, where that is the objective."""
    bound_bytes: int | None = None
    """As ``bound_ns``."""

    def to_json(self) -> dict[str, object]:
        """The figures that there are."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def best_on_other_meshes(
    prepared: PreparedSearch,
    shape: tuple[int, ...],
    count: int,
    search: Callable[[PreparedSearch], SearchResult],
) -> tuple[Alternative, ...]:
    """The best plans on different meshes, the best first; fewer where nothing else fits.

    Args:
        prepared: the request.
        shape: the mesh that is left out.
        count: how many.
        search: searches all parts of a space.
    """
    left_out = {shape}
    found: list[Alternative] = []
    while len(found) < count:
        parts = [
            replace(part, meshes=meshes, gap=max(part.gap, GAP))
            for part in prepared.requests
            if (meshes := tuple(mesh for mesh in part.meshes if mesh.shape not in left_out))
        ]
        if not parts:
            break
        try:
            result = search(replace(prepared, requests=tuple(parts)))
        except (InfeasibleError, LimitReachedError):
            break
        left_out.add(result.mesh.shape)
        found.append(_alternative(prepared, result))
    return tuple(found)


def _alternative(prepared: PreparedSearch, result: SearchResult) -> Alternative:
    from tap_planner.simulate import price_program

    lowered = lower_result(result, prepared.cluster, prepared.options.overlap)
    objective_ns, bound_ns = result.objective_ns, result.bound_ns
    objective_bytes = bound_bytes = None
    if prepared.options.objective == "communication":
        objective_bytes, bound_bytes = result.objective_ns, result.bound_ns
        objective_ns, bound_ns = price_program(lowered.program, lowered.used).objective_ns, None
    elif result.smallest is not None:
        objective_bytes, bound_bytes = result.memory_bytes, min(result.memory_bytes, result.smallest.bound_bytes)
    return Alternative(
        mesh=str(result.mesh),
        microbatches=result.decisions.microbatches,
        objective_ns=objective_ns,
        bound_ns=bound_ns,
        memory_bytes=result.memory_bytes,
        step_ns=lowered.prediction.step_ns,
        objective_bytes=objective_bytes,
        bound_bytes=bound_bytes,
    )
