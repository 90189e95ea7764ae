"""Which devices are alike, and in which sequences they are tried."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tap_planner.device_placement.problem import Problem

__all__ = ["MAX_SEQUENCES", "device_sequences", "interchangeable", "kinds_of_devices"]

MAX_SEQUENCES = 720
"""Of the kinds of devices, for a small graph."""
_MAX_PLACES = 10_000
"""Groups times sequences."""


def kinds_of_devices(problem: Problem) -> tuple[int, ...]:
    """By device, its kind: devices on which all groups take the same, with the same memory and constraints."""
    kinds: dict[tuple[bytes, int, bytes], int] = {}
    return tuple(
        kinds.setdefault(
            (
                problem.task_ns[:, device].tobytes(),
                int(problem.capacity_bytes[device]),
                problem.allowed[:, device].tobytes(),
            ),
            len(kinds),
        )
        for device in range(problem.num_devices)
    )


def device_sequences(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Sequences of all devices in which segments of an order are dealt out.

    The cluster's own comes first. Where devices are of several kinds, all distinct sequences of their kinds follow, the
    devices of a kind in the cluster's order, if these are at most :data:`MAX_SEQUENCES` and groups times sequences at
    most 10,000; else only the cluster's backwards.
    """
    kinds = kinds_of_devices(problem)
    own = tuple(range(len(kinds)))
    if len(set(kinds)) == 1:
        return (own,)
    most = min(MAX_SEQUENCES, _MAX_PLACES // problem.num_groups)
    if _num_sequences(kinds) > most:
        return own, own[::-1]
    found = [own]
    for sequence in _sequences_of(kinds):
        places = [[device for device in own if kinds[device] == kind] for kind in range(len(set(kinds)))]
        devices = tuple(places[kind].pop(0) for kind in sequence)
        if devices != own:
            found.append(devices)
    return tuple(found)


def _num_sequences(kinds: tuple[int, ...]) -> int:
    """The multinomial coefficient."""
    number, total = 1, 0
    for kind in set(kinds):
        for chosen in range(1, kinds.count(kind) + 1):
            total += 1
            number = number * total // chosen
    return number


def _sequences_of(kinds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """All distinct arrangements, in lexicographic order."""
    current = sorted(kinds)
    while True:
        yield tuple(current)
        pivot = next((i for i in range(len(current) - 2, -1, -1) if current[i] < current[i + 1]), None)
        if pivot is None:
            return
        other = max(i for i in range(pivot + 1, len(current)) if current[i] > current[pivot])
        current[pivot], current[other] = current[other], current[pivot]
        current[pivot + 1 :] = current[:pivot:-1]


def interchangeable(problem: Problem) -> tuple[tuple[int, ...], ...]:
    """Classes of devices, any two of which can change places with nothing else changed; ascending, only of two or more.

    Two such devices are of one kind, have the same links to all others and to each other, and exchanging them maps
    channels to channels one to one.
    """
    kinds = kinds_of_devices(problem)
    classes: list[list[int]] = []
    for device, kind in enumerate(kinds):
        for known in classes:
            if kinds[known[0]] == kind and _can_swap(problem, known[0], device):
                known.append(device)
                break
        else:
            classes.append([device])
    return tuple(tuple(found) for found in classes if len(found) > 1)


def _can_swap(problem: Problem, a: int, b: int) -> bool:
    swapped = np.arange(problem.num_devices)
    swapped[[a, b]] = b, a
    links = problem.index.links
    kind_of = np.asarray(links.kind_of)
    if (kind_of[swapped][:, swapped] != kind_of).any():
        return False
    image: dict[int, int] = {}
    for source in range(problem.num_devices):
        for target in range(problem.num_devices):
            old, new = links.channels[source][target], links.channels[int(swapped[source])][int(swapped[target])]
            if len(old) != len(new) or any(image.setdefault(x, y) != y for x, y in zip(old, new, strict=True)):
                return False
    return True  # the image of the image is the channel itself, so no two have the same
