"""Random small problems, and a branchy large one."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st

from tap_planner.device_placement import Links, Problem, Shared


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a random problem has."""

    max_groups: int = 6
    max_devices: int = 3
    training: bool | None = None
    alike: bool | None = None
    memory: bool = True
    constraints: bool = True
    uniform_links: bool | None = None


def channels_of(count: int) -> np.ndarray:
    """A way out and a way in for every device."""
    pairs = np.zeros((count, count, 2), dtype=np.int64)
    pairs[:, :, 0] = np.arange(count)[:, None]
    pairs[:, :, 1] = count + np.arange(count)[None, :]
    return pairs


def random_problem(seed: int, traits: Traits | None = None) -> Problem:
    """A problem in small numbers: zero durations, zero bytes and ties are common."""
    traits = traits or Traits()
    draw = random.Random(seed)
    groups, devices = draw.randint(1, traits.max_groups), draw.randint(1, traits.max_devices)
    training = draw.random() < 0.5 if traits.training is None else traits.training
    alike = draw.random() < 0.5 if traits.alike is None else traits.alike
    forward = [(a, b) for b in range(groups) for a in range(b) if draw.random() < 0.45]
    producer: list[int] = []
    size: list[int] = []
    edges: list[tuple[int, int]] = []
    for a in range(groups):
        readers = [b for x, b in forward if x == a]
        for part in [readers] if draw.random() < 0.7 else [[b] for b in readers]:
            if part:
                producer.append(a)
                size.append(draw.choice([0, 1, 2, 5]))
                edges += [(len(producer) - 1, b) for b in part]
    if training:
        _add_backward(draw, groups, forward, producer, size, edges)
    tasks = groups * (1 + training)
    base = [draw.choice([0, 1, 2, 3, 7]) for _ in range(tasks)]
    columns = [base if alike else [draw.choice([0, 1, 2, 3, 7]) for _ in range(tasks)] for _ in range(devices)]
    fixed = [draw.randint(0, 4) for _ in range(groups)]
    enough = sum(fixed) + 20
    room = draw.randint(1, 14)
    capacity = [(room if alike else draw.randint(1, 14)) if traits.memory and draw.random() < 0.6 else enough] * devices
    if not alike:
        capacity = [draw.randint(1, 14) if traits.memory and draw.random() < 0.6 else enough for _ in range(devices)]
    allowed = np.ones((groups, devices), dtype=bool)
    if traits.constraints and draw.random() < 0.3:
        allowed[draw.randrange(groups)] = np.arange(devices) == draw.randrange(devices)
    shared = ()
    if traits.memory and groups > 1 and draw.random() < 0.4:
        shared = (Shared(num_bytes=draw.randint(1, 5), groups=tuple(draw.sample(range(groups), 2))),)
    uniform = draw.random() < 0.5 if traits.uniform_links is None else traits.uniform_links
    latency, pace = draw.randint(0, 2), draw.choice([10**9, 2 * 10**9])
    shape = (devices, devices)
    return Problem(
        task_ns=np.asarray(columns, dtype=np.int64).T.copy(),
        group_of=np.asarray([*range(groups), *(reversed(range(groups)) if training else ())], dtype=np.int64),
        is_backward=np.asarray([False] * groups + [True] * (groups * training), dtype=bool),
        tensor_producer=np.asarray(producer, dtype=np.int64),
        tensor_bytes=np.asarray(size, dtype=np.int64),
        edge_tensor=np.asarray([t for t, _ in edges], dtype=np.int64),
        edge_consumer=np.asarray([r for _, r in edges], dtype=np.int64),
        fixed_bytes=np.asarray(fixed, dtype=np.int64),
        capacity_bytes=np.asarray(capacity, dtype=np.int64),
        allowed=allowed,
        links=Links(
            latency_ns=np.asarray(
                [[latency if uniform else draw.randint(0, 3) for _ in range(devices)] for _ in range(devices)],
                dtype=np.int64,
            ).reshape(shape),
            bytes_per_s=np.asarray(
                [
                    [pace if uniform else draw.choice([3 * 10**8, 10**9]) for _ in range(devices)]
                    for _ in range(devices)
                ],
                dtype=np.int64,
            ).reshape(shape),
            channels=channels_of(devices),
        ),
        shared=shared,
    )


def _add_backward(
    draw: random.Random,
    groups: int,
    forward: list[tuple[int, int]],
    producer: list[int],
    size: list[int],
    edges: list[tuple[int, int]],
) -> None:
    """Backward task of group g is 2 groups - 1 - g; it reads gradients, and what the forward task saved."""
    back = [2 * groups - 1 - g for g in range(groups)]
    for a, b in forward:
        producer.append(back[b])
        size.append(draw.choice([0, 1, 2, 5]))
        edges.append((len(producer) - 1, back[a]))
    for tensor, reader in list(edges):
        if reader < groups and draw.random() < 0.5:
            edges.append((tensor, back[reader]))
    for g in range(groups):
        producer.append(g)
        size.append(0)
        edges.append((len(producer) - 1, back[g]))


def problems(traits: Traits | None = None) -> st.SearchStrategy[Problem]:
    """Random problems, by seed."""
    return st.integers(0, 10**6).map(lambda seed: random_problem(seed, traits))


def restricted(problem: Problem, devices: Sequence[int]) -> Problem:
    """The same on some of the devices, which get numbers from 0."""
    own, links = list(devices), problem.links
    pairs = np.ix_(own, own)
    return replace(
        problem,
        task_ns=problem.task_ns[:, own],
        capacity_bytes=problem.capacity_bytes[own],
        allowed=problem.allowed[:, own],
        links=Links(
            latency_ns=links.latency_ns[pairs], bytes_per_s=links.bytes_per_s[pairs], channels=links.channels[pairs]
        ),
    )


def widened(problem: Problem, count: int) -> Problem:
    """So many devices, all like the first, with links that are all alike."""
    shape = (count, count)
    return replace(
        problem,
        task_ns=np.repeat(problem.task_ns[:, :1], count, axis=1),
        capacity_bytes=np.repeat(problem.capacity_bytes[:1], count),
        allowed=np.ones((problem.num_groups, count), dtype=bool),
        links=Links(
            latency_ns=np.full(shape, problem.num_groups % 3, dtype=np.int64),
            bytes_per_s=np.full(shape, 10**9, dtype=np.int64),
            channels=channels_of(count),
        ),
    )


def chain(
    times: Sequence[int],
    *,
    num_devices: int,
    tensor_bytes: int = 1,
    bytes_per_s: int = 10**9,
    capacity_bytes: int = 10**6,
) -> Problem:
    """Forward tasks one after the other, on devices that are alike."""
    return graph(
        times,
        [(a, a + 1) for a in range(len(times) - 1)],
        num_devices=num_devices,
        tensor_bytes=tensor_bytes,
        bytes_per_s=bytes_per_s,
        capacity_bytes=capacity_bytes,
    )


def graph(
    times: Sequence[int],
    edges: Sequence[tuple[int, int]],
    *,
    num_devices: int,
    tensor_bytes: int = 1,
    bytes_per_s: int = 10**9,
    capacity_bytes: int = 10**6,
) -> Problem:
    """Forward tasks on devices that are alike; each task makes one tensor, which all after it read."""
    shape = (num_devices, num_devices)
    makers = sorted({a for a, _ in edges})
    return Problem(
        task_ns=np.repeat(np.asarray(times, dtype=np.int64)[:, None], num_devices, axis=1),
        group_of=np.arange(len(times)),
        is_backward=np.zeros(len(times), dtype=bool),
        tensor_producer=np.asarray(makers, dtype=np.int64),
        tensor_bytes=np.full(len(makers), tensor_bytes, dtype=np.int64),
        edge_tensor=np.asarray([makers.index(a) for a, _ in edges], dtype=np.int64),
        edge_consumer=np.asarray([b for _, b in edges], dtype=np.int64),
        fixed_bytes=np.ones(len(times), dtype=np.int64),
        capacity_bytes=np.full(num_devices, capacity_bytes, dtype=np.int64),
        allowed=np.ones((len(times), num_devices), dtype=bool),
        links=Links(
            latency_ns=np.zeros(shape, dtype=np.int64),
            bytes_per_s=np.full(shape, bytes_per_s, dtype=np.int64),
            channels=channels_of(num_devices),
        ),
    )


def heft_example() -> Problem:
    """Figure 2 and table of Topcuoglu et al. 2002, times threefold so that means are whole; links without limits."""
    times = [
        (14, 16, 9), (13, 19, 18), (11, 13, 19), (13, 8, 17), (12, 13, 10),
        (13, 16, 9), (7, 15, 11), (5, 11, 14), (18, 12, 20), (21, 7, 16),
    ]  # fmt: skip
    edges = {
        (1, 2): 18, (1, 3): 12, (1, 4): 9, (1, 5): 11, (1, 6): 14, (2, 8): 19, (2, 9): 16, (3, 7): 23,
        (4, 8): 27, (4, 9): 23, (5, 9): 13, (6, 8): 15, (7, 10): 17, (8, 10): 11, (9, 10): 13,
    }  # fmt: skip
    return Problem(
        task_ns=3 * np.asarray(times, dtype=np.int64),
        group_of=np.arange(10),
        is_backward=np.zeros(10, dtype=bool),
        tensor_producer=np.asarray([a - 1 for a, _ in edges]),
        tensor_bytes=3 * np.asarray(list(edges.values()), dtype=np.int64),
        edge_tensor=np.arange(len(edges)),
        edge_consumer=np.asarray([b - 1 for _, b in edges]),
        fixed_bytes=np.ones(10, dtype=np.int64),
        capacity_bytes=np.full(3, 10, dtype=np.int64),
        allowed=np.ones((10, 3), dtype=bool),
        links=Links(
            latency_ns=np.zeros((3, 3), dtype=np.int64),
            bytes_per_s=np.full((3, 3), 10**9, dtype=np.int64),
            channels=np.zeros((3, 3, 0), dtype=np.int64),
        ),
    )
