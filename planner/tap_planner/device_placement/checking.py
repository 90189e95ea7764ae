"""Checks of arrays that make up a problem; each names the field, the place, the value and what to do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tap_planner.errors import UsageError

__all__ = ["check_before", "check_least", "check_range", "check_shapes", "check_total"]


def check_shapes(wanted: Mapping[str, tuple[np.ndarray, tuple[int, ...], type]]) -> None:
    """Arrays have their shapes and kinds of numbers."""
    for name, (array, shape, kind) in wanted.items():
        if array.shape != shape or not np.issubdtype(array.dtype, kind):
            raise UsageError(
                f"{name} is {array.dtype} {list(array.shape)}, expected {kind.__name__} {list(shape)}",
                hint="Give arrays by the counts of tasks, groups, tensors, edges and devices, in whole numbers.",
            )


def check_least(name: str, array: np.ndarray, limit: int) -> None:
    """No value is below a limit."""
    low = np.argwhere(array < limit)
    if len(low):
        place = tuple(low[0].tolist())
        raise UsageError(f"{name}{list(place)} is {array[place]}", hint=f"Give at least {limit}.")


def check_range(name: str, array: np.ndarray, count: int) -> None:
    """All values number something from 0."""
    wrong = np.flatnonzero((array < 0) | (array >= count))
    if len(wrong):
        place = int(wrong[0])
        raise UsageError(f"{name}[{place}] is {array[place]}, expected 0 to {count - 1}", hint="Number them from 0.")


def check_before(producers: np.ndarray, consumers: np.ndarray, tensors: np.ndarray) -> None:
    """Tasks are numbered in a topological order.

    Args:
        producers: by edge, a task.
        consumers: by edge, the task that reads of it.
        tensors: by edge, what it reads.
    """
    late = np.flatnonzero(producers >= consumers)
    if len(late):
        edge = int(late[0])
        raise UsageError(
            f"edge {edge}: task {consumers[edge]} reads tensor {tensors[edge]} of task {producers[edge]}, "
            "which is not before it",
            hint="Number the tasks in a topological order.",
        )


def check_total(what: str, values: Sequence[int], limit: int) -> None:
    """Everything together stays far from the end of int64."""
    total = sum(values)
    if total >= limit:
        raise UsageError(
            f"all together are {total} {what}, expected less than {limit}",
            hint="Check the units: times are ns, sizes bytes, bandwidths bytes per second.",
        )
