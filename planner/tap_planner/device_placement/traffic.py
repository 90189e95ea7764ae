"""What goes between groups, and how what crosses the border of a segment changes as the segment grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.device_placement.problem import Problem

__all__ = ["Steps", "Traffic", "held_steps", "traffic_of", "traffic_steps"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Traffic:
    """What goes between groups, in bundles: all tensors that one group makes and the same other groups read."""

    producer: np.ndarray
    """int64 [num_bundles], a group."""
    readers: list[tuple[int, ...]]
    """By bundle, other groups, ascending."""
    weight_ns: np.ndarray
    """int64 [num_bundles, num_kinds]: what a bundle takes on each kind of link."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """What is added to segments when the group at a position joins them."""

    offsets: list[int]
    """By position, its first change; and the end."""
    first: list[int]
    """By change: the first start of a segment that it is for."""
    stop: list[int]
    """By change: after the last start that it is for."""
    weight_ns: np.ndarray
    """By change, int64 [num_changes, num_rows, 1]."""


def traffic_of(problem: Problem) -> Traffic:
    """All bundles, by their first tensor."""
    tasks, links = problem.index.tasks, problem.index.links
    found: dict[tuple[int, tuple[int, ...]], int] = {}
    bundle_of: list[int] = []
    tensors: list[int] = []
    for tensor, readers in enumerate(tasks.readers):
        producer = tasks.group_of[tasks.producer[tensor]]
        others = {tasks.group_of[reader] for reader in readers}
        others.discard(producer)
        if others:
            bundle_of.append(found.setdefault((producer, tuple(sorted(others))), len(found)))
            tensors.append(tensor)
    durations = np.asarray(links.durations_ns, dtype=np.int64).reshape(len(links.kinds), len(tasks.readers))
    weights = np.zeros((len(found), len(links.kinds)), dtype=np.int64)
    np.add.at(weights, np.asarray(bundle_of, dtype=np.int64), durations[:, tensors].T)
    return Traffic(
        producer=np.asarray([producer for producer, _ in found], dtype=np.int64),
        readers=[readers for _, readers in found],
        weight_ns=weights,
    )


def traffic_steps(traffic: Traffic, position: np.ndarray, received: np.ndarray, sent: np.ndarray) -> Steps:
    """How traffic of segments changes.

    A segment that starts somewhere and grows receives a bundle that is made outside of it and read inside, and sends
    one that is made inside and read outside, each once.

    Args:
        traffic: what goes between groups.
        position: int64 [num_groups], of each group in the order.
        received: bool [num_rows, num_kinds]: of which kind of link a row counts what is received; one or none.
        sent: the same for what is sent.
    """
    changes = _changes(traffic, position)  # [num_changes, 6]: position, first, last, bundle, sign, whether sent
    at, first, last, bundle, sign, is_sent = changes.T
    coming = traffic.weight_ns @ received.T.astype(np.int64)  # [num_bundles, num_rows]
    going = traffic.weight_ns @ sent.T.astype(np.int64)
    weights = np.where(is_sent[:, None] != 0, going[bundle], coming[bundle]) * sign[:, None]
    order = np.lexsort((last, first, at))
    at, first, last, weights = at[order], first[order], last[order], weights[order]
    begins = np.ones(len(at), dtype=bool)
    begins[1:] = (at[1:] != at[:-1]) | (first[1:] != first[:-1]) | (last[1:] != last[:-1])
    starts = np.flatnonzero(begins)
    sums = np.add.reduceat(weights, starts, axis=0) if len(starts) else weights
    kept = sums.any(axis=1)
    starts, sums = starts[kept], sums[kept]
    return Steps(
        offsets=np.searchsorted(at[starts], np.arange(len(position) + 1)).tolist(),
        first=first[starts].tolist(),
        stop=(last[starts] + 1).tolist(),
        weight_ns=sums[:, :, None],
    )


def _changes(traffic: Traffic, position: np.ndarray) -> np.ndarray:
    """[num_changes, 6]: position, first start, last start, bundle, sign, whether it is sent."""
    single = np.asarray([len(readers) == 1 for readers in traffic.readers], dtype=bool)
    found = [_changes_of_pairs(traffic, position, np.flatnonzero(single))]
    rows: list[tuple[int, int, int, int, int, int]] = []
    for bundle in np.flatnonzero(~single).tolist():
        maker = int(position[traffic.producer[bundle]])
        places = sorted(position[list(traffic.readers[bundle])].tolist())
        rows.extend((*change[:3], bundle, change[3], 0) for change in _receiving(maker, places))
        rows.extend((*change[:3], bundle, change[3], 1) for change in _sending(maker, places))
    found.append(np.asarray(rows, dtype=np.int64).reshape(-1, 6))
    return np.concatenate(found)


def _changes_of_pairs(traffic: Traffic, position: np.ndarray, which: np.ndarray) -> np.ndarray:
    """The same as :func:`_receiving` and :func:`_sending` say, for bundles with one reader."""
    maker = position[traffic.producer[which]]
    place = position[np.asarray([traffic.readers[bundle][0] for bundle in which.tolist()], dtype=np.int64)]
    low, high = np.minimum(maker, place), np.maximum(maker, place)
    onward = maker < place
    zero, one = np.zeros_like(low), np.ones_like(low)
    whole = np.stack([low, zero, low, which, one, onward.astype(np.int64)], axis=1)  # from the lower one on
    ended = np.stack([high, zero, low, which, -one, onward.astype(np.int64)], axis=1)  # until the upper one joins
    later = np.stack([high, low + 1, high, which, one, (~onward).astype(np.int64)], axis=1)
    return np.concatenate([whole, ended, later])


def _receiving(maker: int, places: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(Position, first start, last start, sign) of changes of what is received."""
    before = -1
    for place in places:
        if 0 <= before < maker < place:
            yield maker, 0, before, -1
        yield place, max(before, maker if maker < place else -1) + 1, place, 1
        before = place
    if before < maker:
        yield maker, 0, before, -1


def _sending(maker: int, places: Sequence[int]) -> Iterator[tuple[int, int, int, int]]:
    """(Position, first start, last start, sign) of changes of what is sent."""
    if places[-1] > maker:
        yield maker, 0, maker, 1
        yield places[-1], 0, min(maker, places[0]), -1
    else:
        yield maker, places[0] + 1, maker, 1


def held_steps(problem: Problem, position: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """By position, (first start, after the last start, bytes) of shared parameters that segments come to hold there."""
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(problem.num_groups)]
    for shared in problem.shared:
        before = -1
        for place in sorted({int(position[group]) for group in shared.groups}):
            steps[place].append((before + 1, place + 1, shared.num_bytes))
            before = place
    return steps
