"""Which devices are alike, and in which sequences they are tried."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from tap_planner.device_placement.problem import Placement, Problem

__all__ = ["MAX_SEQUENCES", "device_sequences", "in_order_of_use", "interchangeable", "kinds_of_devices"]

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


def device_sequences(problem: Problem, devices: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Sequences of devices in which segments of an order are dealt out.

    The cluster's own comes first. Where devices are of several kinds, all distinct sequences of their kinds follow, the
    devices of a kind in the cluster's order, if these are at most :data:`MAX_SEQUENCES` and groups times sequences at
    most 10,000; else only the cluster's backwards.

    Args:
        problem: what is placed.
        devices: those that are arranged, ascending; None: all.
    """
    own = tuple(range(problem.num_devices) if devices is None else devices)
    kind_of = kinds_of_devices(problem)
    kinds = _numbered(kind_of[device] for device in own)
    if len(set(kinds)) == 1:
        return (own,)
    most = min(MAX_SEQUENCES, _MAX_PLACES // problem.num_groups)
    if _num_sequences(kinds) > most:
        return own, own[::-1]
    found = [own]
    for sequence in _sequences_of(kinds):
        places = [
            [device for device, its in zip(own, kinds, strict=True) if its == kind] for kind in range(max(kinds) + 1)
        ]
        arranged = tuple(places[kind].pop(0) for kind in sequence)
        if arranged != own:
            found.append(arranged)
    return tuple(found)


def _numbered(values: Iterable[int]) -> tuple[int, ...]:
    """Equal values as equal numbers, from 0 as they come."""
    numbers: dict[int, int] = {}
    return tuple(numbers.setdefault(value, len(numbers)) for value in values)


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


def interchangeable(problem: Problem, devices: Sequence[int] | None = None) -> tuple[tuple[int, ...], ...]:
    """Classes of devices, any two of which can change places with nothing else changed; ascending, only of two or more.

    Two such devices are of one kind, have the same links to all others and to each other, and exchanging them maps
    channels to channels one to one.

    Args:
        problem: what is placed.
        devices: those that count, ascending; None: all.
    """
    own = tuple(range(problem.num_devices) if devices is None else devices)
    kinds = kinds_of_devices(problem)
    channels = problem.index.links.channels
    uses = Counter(channel for a in own for b in own if a != b for channel in channels[a][b])
    classes: list[list[int]] = []
    for device in own:
        for known in classes:
            if kinds[known[0]] == kinds[device] and _can_swap(problem, own, uses, known[0], device):
                known.append(device)
                break
        else:
            classes.append([device])
    return tuple(tuple(found) for found in classes if len(found) > 1)


def in_order_of_use(problem: Problem, placement: Sequence[int]) -> Placement:
    """The same placement with devices that can change places in the sequence of their first groups: placements that
    differ in nothing else become equal. It takes as long, unless what happens at the same time goes by device number.

    Args:
        problem: what is placed.
        placement: by group, its device.
    """
    placement = tuple(placement)
    for devices in interchangeable(problem):
        first = {device: placement.index(device) if device in placement else len(placement) for device in devices}
        ranked = sorted(devices, key=lambda device, first=first: (first[device], device))
        renamed = dict(zip(ranked, devices, strict=True))
        placement = tuple(renamed.get(device, device) for device in placement)
    return placement


def _can_swap(problem: Problem, devices: Sequence[int], uses: Counter[int], a: int, b: int) -> bool:
    """Whether two devices have the same links, and channels that only they use, or both.

    Args:
        problem: what is placed.
        devices: those that count.
        uses: by channel, between how many pairs of them it carries.
        a: one of them.
        b: another one.
    """
    links = problem.index.links
    changed = [((a, b), (b, a)), ((b, a), (a, b))]
    for other in devices:
        if other not in (a, b):
            changed += [((a, other), (b, other)), ((b, other), (a, other))]
            changed += [((other, a), (other, b)), ((other, b), (other, a))]
    if any(links.kind_of[old[0]][old[1]] != links.kind_of[new[0]][new[1]] for old, new in changed):
        return False
    image: dict[int, int] = {}
    touched: Counter[int] = Counter()
    for (source, target), (new_source, new_target) in changed:
        old, new = links.channels[source][target], links.channels[new_source][new_target]
        touched.update(old)
        if len(old) != len(new) or any(image.setdefault(x, y) != y for x, y in zip(old, new, strict=True)):
            return False
    # the image of the image is the channel itself, so no two have the same; what all other pairs use stays where it is
    return all(x == y or touched[x] == uses[x] for x, y in image.items())
