"""Time and results of device placement on a generated branchy training graph, order by order.

Blocks of several branches, as in Inception and NASNet, with skips over blocks; each operator has a forward and a
backward task. Two nodes of four devices; a node's NIC carries one transfer at a time.

    python -m tests.bench.placement_orders [--groups 10000] [--seed 0] [--runs 3] [--tight] [--json build/orders.json]
        [--markdown]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tap_planner.device_placement import (
    ORDERS,
    Links,
    Problem,
    contiguous,
    earliest_finish,
    lower_bound_ns,
    makespan_ns,
    order_groups,
    place,
    rank_priority,
)
from tests.bench.instances import markdown, table, write_json

NODES, DEVICES_PER_NODE = 2, 4


def branchy_edges(draw: random.Random, groups: int) -> list[tuple[int, int]]:
    """(Producer, consumer): blocks of an operator, one to six branches of one to four, and one that joins them."""
    edges: list[tuple[int, int]] = []
    heads = [0]
    size = 1
    while size < groups:
        head, tails = heads[-1], []
        for _ in range(draw.randint(1, 6)):
            last = head
            for _ in range(draw.randint(1, 4)):
                if size < groups:
                    edges.append((last, size))
                    last, size = size, size + 1
            tails.append(last)
        if size < groups:
            edges += [(tail, size) for tail in sorted(set(tails))]
            if len(heads) > 3 and draw.random() < 0.3:
                edges.append((heads[-3], size))
            heads.append(size)
            size += 1
    return sorted(set(edges))


def two_nodes() -> Links:
    """Channels: every device's way out and in, every node's NIC out and in."""
    count = NODES * DEVICES_PER_NODE
    devices = np.arange(count)
    node = devices // DEVICES_PER_NODE
    apart = node[:, None] != node[None, :]
    channels = np.full((count, count, 4), -1, dtype=np.int64)
    channels[:, :, 0], channels[:, :, 1] = devices[:, None], count + devices[None, :]
    channels[:, :, 2] = np.where(apart, 2 * count + node[:, None], -1)
    channels[:, :, 3] = np.where(apart, 2 * count + NODES + node[None, :], -1)
    return Links(
        latency_ns=np.where(apart, 8_000, 3_000).astype(np.int64),
        bytes_per_s=np.where(apart, 25 * 10**9, 300 * 10**9).astype(np.int64),
        channels=channels,
    )


def branchy_problem(groups: int, seed: int, *, tight: bool = False) -> Problem:
    """The training step; with ``tight``, all devices together have a quarter more memory than is needed."""
    draw = random.Random(seed)
    forward = branchy_edges(draw, groups)
    back = [2 * groups - 1 - group for group in range(groups)]
    work = [draw.choice([8_000, 20_000, 60_000, 200_000]) for _ in range(groups)]
    size = [draw.choice([256 << 10, 1 << 20, 4 << 20]) for _ in range(groups)]
    edges = [(a, b) for a, b in forward]  # tensor a is what group a makes
    producer, sizes = list(range(groups)), list(size)
    for a, b in forward:
        edges += [(a, back[b]), (len(producer), back[a])]
        producer.append(back[b])
        sizes.append(size[a])
    for group in range(groups):
        edges.append((group, back[group]))
    count = NODES * DEVICES_PER_NODE
    times = np.asarray([*work, *(2 * work[group] for group in reversed(range(groups)))], dtype=np.int64)
    fixed = np.asarray([draw.choice([0, 1, 8]) << 20 for _ in range(groups)], dtype=np.int64) + np.asarray(size)
    capacity = int(fixed.sum()) * 5 // (4 * count) if tight else int(fixed.sum())
    return Problem(
        task_ns=np.repeat(times[:, None], count, axis=1),
        group_of=np.asarray([*range(groups), *reversed(range(groups))], dtype=np.int64),
        is_backward=np.arange(2 * groups) >= groups,
        tensor_producer=np.asarray(producer, dtype=np.int64),
        tensor_bytes=np.asarray(sizes, dtype=np.int64),
        edge_tensor=np.asarray([tensor for tensor, _ in edges], dtype=np.int64),
        edge_consumer=np.asarray([reader for _, reader in edges], dtype=np.int64),
        fixed_bytes=fixed,
        capacity_bytes=np.full(count, capacity, dtype=np.int64),
        allowed=np.ones((groups, count), dtype=bool),
        links=two_nodes(),
    )


def median_s(function: Callable[[], object], runs: int) -> float:
    """Median seconds of a call."""
    seconds: list[float] = []
    for _ in range(runs):
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return round(statistics.median(seconds), 3)


def measure(problem: Problem, name: str, runs: int) -> dict[str, object]:
    """One row: the parts' times and makespans for one order."""
    order = order_groups(problem, name)
    priority = rank_priority(problem)
    found = contiguous(problem, order)
    greedy = earliest_finish(problem, order)
    row: dict[str, object] = {
        "order": name,
        "order_s": median_s(lambda: order_groups(problem, name), runs),
        "contiguous_s": median_s(lambda: contiguous(problem, order), runs),
        "earliest_finish_s": median_s(lambda: earliest_finish(problem, order), runs),
        "play_s": median_s(lambda: makespan_ns(problem, greedy, priority), runs),
    }
    row.update((f"{cut.objective}_ms", _ms(makespan_ns(problem, cut.placement, priority))) for cut in found)
    fits = not any(problem.overshoot_bytes(greedy))
    row["earliest_finish_ms"] = _ms(makespan_ns(problem, greedy, priority)) if fits else "does not fit"
    return row


def _ms(nanoseconds: int) -> float:
    return round(nanoseconds / 1e6, 2)


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--tight", action="store_true", help="little memory: no device holds everything")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    started = time.perf_counter()
    problem = branchy_problem(options.groups, options.seed, tight=options.tight)
    made_s = round(time.perf_counter() - started, 3)
    rows = [measure(problem, name, options.runs) for name in ORDERS]
    whole_s = median_s(lambda: place(problem, improve=False), options.runs)
    placing = place(problem, improve=False)
    whole: dict[str, object] = {
        "groups": problem.num_groups,
        "tasks": problem.num_tasks,
        "problem_s": made_s,
        "place_s": whole_s,
        "best": f"{placing.tries[0].order} {placing.tries[0].placer}",
        "best_ms": _ms(placing.tries[0].makespan_ns),
        "bound_ms": _ms(lower_bound_ns(problem)),
    }
    show = markdown if options.markdown else table
    print(show(rows), show([whole]), sep="\n\n")
    result = {"orders": rows, "whole": whole}
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
