"""Where to cut a chain of operators into parts of about equal work."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from tap_planner.errors import UsageError

__all__ = ["balanced_cuts"]

_FAR = np.int64(1) << 60


def balanced_cuts(
    work_ns: np.ndarray,
    border_ns: Sequence[int],
    rows: Sequence[int],
    allowed: Sequence[bool] | None = None,
    fits: Callable[[int, np.ndarray], np.ndarray] | None = None,
    times: Sequence[int] | None = None,
) -> tuple[int, ...] | None:
    """Cut a chain so that the part that takes longest takes as little as possible.

    Of the cuts that are as good, those with the least sum of borders, and of these the first ones, are taken. Dynamic
    programming over the last cut (as Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training",
    SOSP 2019, section 3.1).

    Args:
        work_ns: [rows, operators] what each operator takes; one row where it takes the same in all parts.
        border_ns: per operator, what a cut before it adds to the parts on both of its sides.
        rows: per part, which row of ``work_ns`` is its; at least one part.
        allowed: per operator, whether a part may begin there; None: anywhere. The first operator always begins one.
        fits: for a part (from 0) and n places in the chain, [n, n] whether it may reach from one to another (what is
            said of those that are not after it does not matter); None: any part may.
        times: per part, how many times its length counts; None: once.

    Returns:
        First operator of every part; None where they cannot all fit.

    Raises:
        UsageError: there are fewer places to cut at than cuts.
    """
    num_parts, count = len(rows), work_ns.shape[1]
    places = [0, *(i for i in range(1, count) if allowed is None or allowed[i]), count]
    if num_parts < 1 or len(places) <= num_parts:
        raise UsageError(
            f"{num_parts} pipeline stages (or chunks of them) from a model that can be cut in {len(places) - 1} parts",
            hint="Choose fewer stages or chunks.",
        )
    border = np.asarray([0, *(border_ns[place] for place in places[1:-1]), 0], dtype=np.int64)
    where = np.asarray(places)
    kinds = list(zip(rows, (1,) * num_parts if times is None else times, strict=True))
    lengths = {(row, factor): _lengths(work_ns[row], where, border, factor) for row, factor in dict.fromkeys(kinds)}
    parts = [
        lengths[kind] if fits is None else np.where(fits(part, where).T, lengths[kind], _FAR)
        for part, kind in enumerate(kinds)
    ]
    most = _least_most(parts)
    if most >= _FAR:
        return None
    within = {id(part): part <= most for part in parts}
    reach = [within[id(part)] for part in parts]
    chosen = _least_borders(reach, border)
    return tuple(places[index] for index in chosen)


def _lengths(work_ns: np.ndarray, places: np.ndarray, border: np.ndarray, times: int) -> np.ndarray:
    """[to, from] so many times what the operators between two places take, with the borders there."""
    ends = np.concatenate([[0], np.cumsum(work_ns)])[places]
    lengths = (ends[:, None] - ends[None, :] + border[None, :] + border[:, None]) * times
    lengths[np.triu_indices(len(places))] = _FAR
    return lengths


def _least_most(parts: Sequence[np.ndarray]) -> int:
    """The least maximum of parts, each [to, from]."""
    best = parts[0][:, 0]
    for lengths in parts[1:]:
        best = np.maximum(best, lengths).min(axis=1)
    return int(best[-1])


def _least_borders(fits: Sequence[np.ndarray], border: np.ndarray) -> list[int]:
    """Where parts begin: the least sum of borders of parts that fit, each [to, from] (ties: the earliest last cut, and
    so on)."""
    cost = np.where(fits[0][:, 0], 0, _FAR)
    origins: list[np.ndarray] = []
    for part in fits[1:]:
        total = np.where(part, cost + border, _FAR)
        origins.append(total.argmin(axis=1))
        cost = total[np.arange(len(total)), origins[-1]]
    chosen = [len(border) - 1]
    for origin in reversed(origins):
        chosen.append(int(origin[chosen[-1]]))
    return [0, *chosen[:0:-1]]
