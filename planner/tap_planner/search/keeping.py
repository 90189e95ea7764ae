"""Models of one search kept for the next, where many follow that differ in other things than mesh and microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING

from tap_planner.cluster import Mesh

if TYPE_CHECKING:
    from tap_planner.search.model import Model
    from tap_planner.search.request import SearchRequest

__all__ = ["kept_model", "models_kept"]


class _Kept:
    """The models that were asked for last, without their tables and prices: these are of what a search looks at.

    Args:
        most: how many.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._models: list[tuple[tuple[object, ...], Model]] = []
        """With what they were built from, the last used last."""

    def get(self, request: SearchRequest, mesh: Mesh, microbatches: int, build: Callable[[], Model]) -> Model:
        """The model of a request; graphs are compared by identity, rules by the function that makes them."""
        inputs = (request.graphs, request.constraints, mesh, microbatches)
        inputs = (*inputs, request.precision, request.prices, request.cluster, request.stage_shares)
        place = next((place for place, (known, _) in enumerate(self._models) if known == inputs), None)
        found = build() if place is None else self._models.pop(place)[1]
        found.tables.clear()
        found.points.clear()
        self._models = [*self._models, (inputs, found)][-self._most :]
        return found


_kept: ContextVar[_Kept | None] = ContextVar("kept_models", default=None)


@contextlib.contextmanager
def models_kept(most: int) -> Iterator[None]:
    """Let searches inside use each other's models; answers do not depend on it.

    Args:
        most: how many are kept.
    """
    token = _kept.set(_Kept(most))
    try:
        yield
    finally:
        _kept.reset(token)


def kept_model(request: SearchRequest, mesh: Mesh, microbatches: int, build: Callable[[], Model]) -> Model:
    """The model of a request, built if it is not kept.

    Args:
        request: what is searched.
        mesh: one of its meshes.
        microbatches: their number.
        build: makes the model.
    """
    kept = _kept.get()
    return build() if kept is None else kept.get(request, mesh, microbatches, build)
