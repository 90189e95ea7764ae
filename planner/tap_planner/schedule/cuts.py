"""Where to cut a chain of operators into parts of about equal work."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tap_planner.errors import UsageError

__all__ = ["balanced_cuts"]

_FAR = np.int64(1) << 60


def balanced_cuts(
    work_ns: Sequence[int], border_ns: Sequence[int], num_parts: int, allowed: Sequence[bool] | None = None
) -> tuple[int, ...]:
    """Cut a chain so that the part that takes longest takes as little as possible.

    Of the cuts that are as good, those with the least sum of borders, and of these the first ones, are taken. Dynamic
    programming over the last cut (as Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
    SOSP 2019, section 3.1).

    Args:
        work_ns: what each operator takes.
        border_ns: per operator, what a cut before it adds to the parts on both of its sides.
        num_parts: at least 1.
        allowed: per operator, whether a part may begin there; None: anywhere. The first operator always begins one.

    Returns:
        First operator of every part.

    Raises:
        UsageError: there are fewer places to cut at than cuts.
    """
    places = [0, *(i for i in range(1, len(work_ns)) if allowed is None or allowed[i]), len(work_ns)]
    if num_parts < 1 or len(places) <= num_parts:
        raise UsageError(
            f"{num_parts} pipeline stages (or chunks of them) from a model that can be cut in {len(places) - 1} parts",
            hint="Choose fewer stages or chunks.",
        )
    ends = np.concatenate([[0], np.cumsum(np.asarray(work_ns, dtype=np.int64))])[places]
    border = np.asarray([0, *(border_ns[place] for place in places[1:-1]), 0], dtype=np.int64)
    lengths = ends[None, :] - ends[:, None] + border[None, :] + border[:, None]  # [num_places, num_places] from, to
    lengths[np.tril_indices(len(places))] = _FAR
    most = _least_most(lengths, num_parts)
    chosen = _least_borders(lengths <= most, border, num_parts)
    return tuple(places[index] for index in chosen)


def _least_most(lengths: np.ndarray, num_parts: int) -> int:
    """The least maximum of parts."""
    best = lengths[0]
    for _ in range(num_parts - 1):
        best = np.maximum(best[:, None], lengths).min(axis=0)
    return int(best[-1])


def _least_borders(fits: np.ndarray, border: np.ndarray, num_parts: int) -> list[int]:
    """Where parts begin: the least sum of borders of parts that fit (ties: the earliest last cut, and so on)."""
    cost = np.where(fits[0], 0, _FAR)
    origins: list[np.ndarray] = []
    for _ in range(num_parts - 1):
        total = np.where(fits, (cost + border)[:, None], _FAR)
        origins.append(total.argmin(axis=0))
        cost = total.min(axis=0)
    chosen = [len(border) - 1]
    for origin in reversed(origins):
        chosen.append(int(origin[chosen[-1]]))
    return [0, *chosen[:0:-1]]
