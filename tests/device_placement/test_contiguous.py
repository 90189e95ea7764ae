"""Cuts of an order against all cuts there are."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.device_placement import ORDERS, Problem, contiguous, order_groups
from tap_planner.device_placement.sequences import device_sequences
from tests.device_placement.problems import Traits, problems

NAMES = st.sampled_from((*ORDERS, "shuffled:0", "shuffled:1", "shuffled:2"))


def ordered(problem: Problem, name: str) -> tuple[int, ...]:
    """An order by name, or any permutation: cuts are defined for each."""
    if not name.startswith("shuffled:"):
        return order_groups(problem, name)
    groups = list(range(problem.num_groups))
    random.Random(name).shuffle(groups)
    return tuple(groups)


def cuts(problem: Problem, order: Sequence[int], devices: Sequence[int]) -> Iterator[dict[int, int]]:
    """All ways to deal segments out that fit."""
    for ends in itertools.combinations_with_replacement(range(len(order) + 1), len(devices) - 1):
        borders = [0, *ends, len(order)]
        placement = {
            group: device
            for device, (a, b) in zip(devices, itertools.pairwise(borders), strict=True)
            for group in order[a:b]
        }
        listed = [placement[group] for group in range(len(order))]
        if not any(problem.overshoot_bytes(listed)) and problem.is_allowed(listed):
            yield placement


def prices(problem: Problem, placement: dict[int, int], devices: Sequence[int]) -> tuple[int, int]:
    """(Longest segment, sum of all tasks and of what is received), from their definitions."""
    busy = dict.fromkeys(devices, 0)
    total = 0
    for task, group in enumerate(problem.group_of.tolist()):
        busy[placement[group]] += int(problem.task_ns[task, placement[group]])
        total += int(problem.task_ns[task, placement[group]])
    readers: dict[int, set[int]] = {}
    for tensor, reader in zip(problem.edge_tensor.tolist(), problem.edge_consumer.tolist(), strict=True):
        readers.setdefault(tensor, set()).add(placement[int(problem.group_of[reader])])
    for tensor, targets in readers.items():
        source = placement[int(problem.group_of[problem.tensor_producer[tensor]])]
        for target in targets - {source}:
            place = devices.index(target)
            price = problem.transfer_ns(tensor, devices[place - 1] if place else devices[1], target)
            busy[target] += price
            total += price
        if targets - {source}:
            place = devices.index(source)
            after = devices[place + 1] if place + 1 < len(devices) else devices[place - 1]
            busy[source] += problem.transfer_ns(tensor, source, after)
    return max(busy.values()), total


@settings(max_examples=400)
@given(problem=problems(Traits(max_groups=7)), name=NAMES)
def test_no_cut_is_better(problem: Problem, name: str) -> None:
    """The longest segment, then the sum, and the sum alone, are the least of all cuts that fit; none, if none fit."""
    order = ordered(problem, name)
    found = {cut.objective: cut for cut in contiguous(problem, order)}
    known = [
        prices(problem, placement, devices)
        for devices in device_sequences(problem)
        for placement in cuts(problem, order, devices)
    ]
    if not known:
        assert found == {}
        return
    assert found["bottleneck"].objective_ns == min(longest for longest, _ in known)
    assert found["sequential"].objective_ns == min(total for _, total in known)
    for objective, cut in found.items():
        assert not any(problem.overshoot_bytes(cut.placement)) and problem.is_allowed(cut.placement)
        priced = [
            prices(problem, dict(enumerate(cut.placement)), devices)
            for devices in device_sequences(problem)
            if dict(enumerate(cut.placement)) in list(cuts(problem, order, devices))
        ]
        if objective == "bottleneck":
            assert min(known) in priced
        else:
            assert min(total for _, total in priced) == cut.objective_ns


def segment(problem: Problem, groups: Sequence[int], devices: Sequence[int], place: int) -> tuple[int, int] | None:
    """(What a segment takes with all traffic, with only what it receives); None if it does not fit."""
    inside, device = set(groups), devices[place]
    if not problem.allowed[list(groups), device].all():
        return None
    held = sum(int(problem.fixed_bytes[group]) for group in groups)
    held += sum(shared.num_bytes for shared in problem.shared if inside & set(shared.groups))
    if held > problem.capacity_bytes[device]:
        return None
    tasks = sum(int(problem.task_ns[task, device]) for task, g in enumerate(problem.group_of) if int(g) in inside)
    received = sent = 0
    for tensor, readers in enumerate(problem.index.tasks.readers):
        maker = int(problem.group_of[problem.tensor_producer[tensor]])
        reading = {int(problem.group_of[reader]) for reader in readers}
        if maker not in inside and reading & inside:
            before = devices[place - 1 if place else min(1, len(devices) - 1)]
            received += problem.transfer_ns(tensor, before, device)
        if maker in inside and reading - inside:
            after = devices[place + 1] if place + 1 < len(devices) else devices[place - 1]
            sent += problem.transfer_ns(tensor, device, after)
    return tasks + received + sent, tasks + received


@settings(max_examples=60)
@given(problem=problems(Traits(max_groups=22, max_devices=4, alike=True, constraints=False)), name=NAMES)
def test_larger_cuts(problem: Problem, name: str) -> None:
    """The same with more groups and devices than all cuts can be tried of, against plain dynamic programming."""
    order = ordered(problem, name)
    (devices,) = device_sequences(problem)
    count, far = problem.num_groups, 1 << 50
    prices = {
        (place, i, j): segment(problem, order[i:j], devices, place) or (far, far)
        for place in range(len(devices))
        for i in range(count)
        for j in range(i + 1, count + 1)
    }

    def least_busiest(place: int, end: int) -> int:
        if place < 0:
            return far if end else 0
        parts = [max(best[place - 1, i], prices[place, i, end][0]) for i in range(end)]
        return min([best[place - 1, end], *parts])

    def least_total(place: int, end: int, limit: int) -> int:
        if place < 0:
            return far if end else 0
        fitting = [i for i in range(end) if prices[place, i, end][0] <= limit]
        return min([total[place - 1, end], *(total[place - 1, i] + prices[place, i, end][1] for i in fitting)])

    best: dict[tuple[int, int], int] = {}
    for place in range(-1, len(devices)):
        for end in range(count + 1):
            best[place, end] = least_busiest(place, end)
    longest = best[len(devices) - 1, count]
    found = {cut.objective: cut for cut in contiguous(problem, order)}
    if longest >= far:
        assert found == {}
        return
    assert found["bottleneck"].objective_ns == longest
    total: dict[tuple[int, int], int] = {}
    for limit, objective in ((far - 1, "sequential"), (longest, "bottleneck")):
        for place in range(-1, len(devices)):
            for end in range(count + 1):
                total[place, end] = least_total(place, end, limit)
        cut = found[objective]
        borders = [i for i in range(1, count) if cut.placement[order[i]] != cut.placement[order[i - 1]]]
        parts = [
            prices[devices.index(cut.placement[order[i]]), i, j]
            for i, j in zip([0, *borders], [*borders, count], strict=True)
        ]
        assert max(busy for busy, _ in parts) <= limit
        assert sum(received for _, received in parts) == total[len(devices) - 1, count]
