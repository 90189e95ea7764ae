"""Traversal orders of the forward graph of groups: the sequences in which placers take groups.

The forward graph has an edge from group a to group b where a forward task of b reads what a forward task of a makes and
a < b. (An edge back, between operators that are kept together though others lie between them, is left out: so the
graph has no cycle, and the numbering is one topological order.) A source is a group without predecessors. Successors
and sources are taken by ascending number, unless said otherwise:

``topo``
    Kahn's: a queue holds the sources; the first leaves it and is listed; each of its successors whose last predecessor
    is listed now joins the queue at its end.
``reversed-topo``
    ``topo`` backwards.
``dfs-preorder``
    Depth first from each source in turn; a group is listed when it is first met, before its successors.
``dfs-postorder``
    The same walk; a group is listed when it is left, after its successors. (Not backwards: what comes last in the
    model comes first.)
``bfs``
    A queue holds the sources; the first leaves it and is listed; each of its successors that was never met joins the
    queue at its end.
``lexico-topo``
    Of all groups whose predecessors are listed, the one with the least name is next; of equal names, and where there
    are no names, the one with the least number (then it is the numbering itself).
``random:SEED``
    Of all groups whose predecessors are listed, in ascending order, one drawn by numpy's Generator(PCG64(SEED)) is
    next.
``upward-rank``
    HEFT's (Topcuoglu, Hariri, Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
    Computing", 2002): groups by descending upward rank of the first forward task; ties by number. Kept apart
    from :data:`ORDERS`, for comparison.

The six names of :data:`ORDERS` are those of "Accelerate Model Parallel Training by Using Efficient Graph Traversal
Order in Device Placement" (2022). The others beside topo, lexico-topo, random and upward-rank may list a group before
its predecessors; the placers say what they make of that.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush

import numpy as np

from tap_planner.device_placement.index import TaskIndex
from tap_planner.device_placement.priorities import upward_rank
from tap_planner.device_placement.problem import Problem
from tap_planner.errors import UsageError
from tap_planner.plan import TRAVERSAL_ORDERS

__all__ = ["MORE_ORDERS", "ORDERS", "order_groups", "orders_for"]

MORE_ORDERS = ("upward-rank",)
"""Those that are not of the paper, beside ``random:SEED``."""
ORDERS = tuple(name for name in TRAVERSAL_ORDERS if name not in MORE_ORDERS)
"""Those of the paper."""
_RANDOM = "random:"
_PREFERRED = ("lexico-topo", "topo", "dfs-preorder", "reversed-topo", "dfs-postorder", "bfs")
"""By how near each came to the best of them, training and inference together."""
_EFFORT = 1_500_000
"""Of all orders that are tried together."""
_OF_ANY = 4
"""What playing its placements takes, as devices that placers look at."""


def orders_for(problem: Problem) -> tuple[str, ...]:
    """The orders that are worth trying: all of :data:`ORDERS`; of a very large problem as many as are cheap.

    To try an order takes about as many steps as there are tasks times devices (and four more, for what does not depend
    on these). Orders may take 1,500,000 steps in all, which are six orders for 10,000 operators that are trained on 8
    devices; where they would take more, there are as many as that allows, at least one. Those that came nearest to the
    best where all were measured (docs/traversal-order.md, "Which order to choose") are first: ``lexico-topo``, then
    ``topo``, ``dfs-preorder``, ``reversed-topo``, ``dfs-postorder`` and ``bfs``.
    """
    affordable = _EFFORT // (problem.num_tasks * (problem.num_devices + _OF_ANY))
    return _PREFERRED[: max(1, affordable)]


def order_groups(problem: Problem, name: str) -> tuple[int, ...]:
    """All groups in an order.

    Args:
        problem: what is placed.
        name: one of :data:`ORDERS` or :data:`MORE_ORDERS`, or ``random:SEED``.

    Raises:
        UsageError: there is no such order.
    """
    tasks = problem.index.tasks
    if name == "lexico-topo":
        return _by_name(tasks, problem.group_names)
    if name == "upward-rank":
        return _by_rank(problem)
    if name.startswith(_RANDOM):
        return _at_random(tasks, _seed(name))
    if name not in _WALKS:
        known = ", ".join((*ORDERS, *MORE_ORDERS, "random:SEED"))
        raise UsageError(f"unknown traversal order {name!r}, expected one of {known}", hint="Choose one of these.")
    return tuple(_WALKS[name](tasks))


def _seed(name: str) -> int:
    text = name.removeprefix(_RANDOM)
    if not (text.isascii() and text.isdigit()):
        raise UsageError(f"traversal order {name!r} has no seed", hint="Give a whole number, as in random:7.")
    return int(text)


def _sources(tasks: TaskIndex) -> list[int]:
    return [group for group, before in enumerate(tasks.predecessors) if not before]


def _topo(tasks: TaskIndex) -> Iterator[int]:
    waiting = [len(before) for before in tasks.predecessors]
    queue = deque(_sources(tasks))
    while queue:
        group = queue.popleft()
        yield group
        for after in tasks.successors[group]:
            waiting[after] -= 1
            if not waiting[after]:
                queue.append(after)


def _reversed_topo(tasks: TaskIndex) -> Iterator[int]:
    return reversed(list(_topo(tasks)))


def _bfs(tasks: TaskIndex) -> Iterator[int]:
    queue = deque(_sources(tasks))
    met = set(queue)
    while queue:
        group = queue.popleft()
        yield group
        for after in tasks.successors[group]:
            if after not in met:
                met.add(after)
                queue.append(after)


def _walk(tasks: TaskIndex) -> Iterator[tuple[int, bool]]:
    """Depth first: each group when it is met (True) and when it is left (False)."""
    met: set[int] = set()
    for source in _sources(tasks):
        met.add(source)
        yield source, True
        stack = [(source, iter(tasks.successors[source]))]
        while stack:
            group, rest = stack[-1]
            after = next((after for after in rest if after not in met), None)
            if after is None:
                stack.pop()
                yield group, False
            else:
                met.add(after)
                yield after, True
                stack.append((after, iter(tasks.successors[after])))


def _preorder(tasks: TaskIndex) -> Iterator[int]:
    return (group for group, enters in _walk(tasks) if enters)


def _postorder(tasks: TaskIndex) -> Iterator[int]:
    return (group for group, enters in _walk(tasks) if not enters)


_WALKS: dict[str, Callable[[TaskIndex], Iterator[int]]] = {
    "topo": _topo,
    "reversed-topo": _reversed_topo,
    "dfs-preorder": _preorder,
    "dfs-postorder": _postorder,
    "bfs": _bfs,
}


def _by_name(tasks: TaskIndex, names: tuple[str, ...]) -> tuple[int, ...]:
    waiting = [len(before) for before in tasks.predecessors]
    keys = [(names[group] if names else "", group) for group in range(len(waiting))]
    ready = [keys[group] for group in _sources(tasks)]
    heapify(ready)
    listed: list[int] = []
    while ready:
        _, group = heappop(ready)
        listed.append(group)
        for after in tasks.successors[group]:
            waiting[after] -= 1
            if not waiting[after]:
                heappush(ready, keys[after])
    return tuple(listed)


def _at_random(tasks: TaskIndex, seed: int) -> tuple[int, ...]:
    draw = np.random.Generator(np.random.PCG64(seed))
    waiting = [len(before) for before in tasks.predecessors]
    ready = _sources(tasks)
    listed: list[int] = []
    while ready:
        group = ready.pop(int(draw.integers(len(ready))))
        listed.append(group)
        for after in tasks.successors[group]:
            waiting[after] -= 1
            if not waiting[after]:
                insort(ready, after)
    return tuple(listed)


def _by_rank(problem: Problem) -> tuple[int, ...]:
    rank = upward_rank(problem)
    first = [
        min(members, key=lambda task: (bool(problem.is_backward[task]), task))
        for members in problem.index.tasks.members
    ]
    return tuple(sorted(range(problem.num_groups), key=lambda group: (-rank[first[group]], group)))
