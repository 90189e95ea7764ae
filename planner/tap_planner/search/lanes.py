"""Lanes side by side: the same answers whether they run by turns in this process or each in one of its own.

What a lane is told when it chooses depends on nothing but the order in which stages end, and that is taken from what
they cost roughly, not from how long they take. So neither the number of processes nor their speed changes a plan.
"""

from __future__ import annotations

import heapq
import multiprocessing
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any, Protocol

from tap_planner.processes import allowed_processes
from tap_planner.search.lane import Lane
from tap_planner.search.messages import Choice, Known

LANES = 2
"""Most lanes of a search: each does some work that one queue for all would have been spared."""
MIN_WORK = 2_000
"""Operators x meshes from which a process of its own is worth while for a lane."""


class LostProcessError(Exception):
    """A lane's process has ended, or failed; what it was doing can be done again in this one."""


class Worker(Protocol):
    """A lane, wherever it runs: what is sent is answered in order."""

    def send(self, name: str, *arguments: object) -> None:
        """Have a method called."""
        ...

    def receive(self) -> Any:
        """What the earliest call that was not received yet has returned.

        Raises:
            LostProcessError: it has not.
        """
        ...

    def close(self) -> None:
        """End."""
        ...


def ask(worker: Worker, name: str, *arguments: object) -> Any:
    """Call a method of a lane and wait for what it returns."""
    worker.send(name, *arguments)
    return worker.receive()


def ask_all(workers: Sequence[Worker], name: str) -> list[Any]:
    """The same of all lanes at once."""
    for worker in workers:
        worker.send(name)
    return [worker.receive() for worker in workers]


class LocalWorker:
    """A lane in this process."""

    def __init__(self, lane: Lane) -> None:
        self._lane = lane
        self._answers: list[Any] = []

    def send(self, name: str, *arguments: object) -> None:
        """See ``Worker``."""
        self._answers.append(getattr(self._lane, name)(*arguments))

    def receive(self) -> Any:
        """See ``Worker``."""
        return self._answers.pop(0)

    def close(self) -> None:
        """See ``Worker``."""


class ForkedWorker:
    """A lane in a process of its own, which has all that this one has found out so far.

    Args:
        lane: it is not changed in this process.
        others: what the new process must let go of.
    """

    def __init__(self, lane: Lane, others: Sequence[ForkedWorker]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, far = context.Pipe()
        kept = [other.connection for other in others]
        self._process = context.Process(target=_serve, args=(lane, far, [self.connection, *kept]), daemon=True)
        self._process.start()
        far.close()

    def send(self, name: str, *arguments: object) -> None:
        """See ``Worker``."""
        try:
            self.connection.send((name, arguments))
        except OSError as error:
            raise LostProcessError from error

    def receive(self) -> Any:
        """See ``Worker``."""
        try:
            failed, answer = self.connection.recv()
        except (EOFError, OSError) as error:
            raise LostProcessError from error
        if failed:
            raise LostProcessError(answer)
        return answer

    def close(self) -> None:
        """See ``Worker``."""
        self.connection.close()
        self._process.terminate()
        self._process.join()
        self._process.close()


def _serve(lane: Lane, connection: Connection, unused: Sequence[Connection]) -> None:
    """Answer calls until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in unused:
        other.close()
    while True:
        try:
            name, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = getattr(lane, name)(*arguments)
        except Exception as error:
            connection.send((True, repr(error)))
            return
        connection.send((False, answer))


def workers_of(lanes: Sequence[Lane], work: int) -> tuple[Worker, ...]:
    """Processes for lanes where that is allowed and worth while, else this one for all.

    Args:
        lanes: what runs in them.
        work: operators x meshes of the search.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    is_child = multiprocessing.parent_process() is not None
    if min(allowed_processes(), len(lanes)) < 2 or work < MIN_WORK or not can_fork or is_child:
        return tuple(LocalWorker(lane) for lane in lanes)
    workers: list[ForkedWorker] = []
    for lane in lanes:
        workers.append(ForkedWorker(lane, workers))
    return tuple(workers)


def run_lanes(workers: Sequence[Worker]) -> int | None:
    """Have all lanes do all that is left to do.

    A lane learns of a plan when the stage that gave it has ended, by a clock that counts what stages cost.

    Returns:
        The lane of the best plan; None: there is none.
    """
    known, winner = Known(), None
    ends: list[tuple[int, int]] = []

    busy: dict[int, int | None] = {}

    def start(number: int, clock: int) -> None:
        bounds = [bound for other, bound in busy.items() if other != number and bound is not None]
        elsewhere = min(bounds, default=None)
        choice: Choice | None = ask(workers[number], "choose", known, elsewhere)
        busy.pop(number, None)
        if choice is not None:
            busy[number] = choice.bound_ns
            workers[number].send("advance")
            heapq.heappush(ends, (clock + choice.cost, number))

    for number in range(len(workers)):
        start(number, 0)
    while ends:
        clock = ends[0][0]
        waiting: list[int] = []
        while ends and ends[0][0] == clock:  # what ends at the same time is known to all that start then
            _, number = heapq.heappop(ends)
            waiting.append(number)
            found: Known = workers[number].receive()
            if found.multiplier:
                known = replace(known, multiplier=found.multiplier)
            if found.best_ns is not None and (known.best_ns is None or found.best_ns < known.best_ns):
                known, winner = replace(known, best_ns=found.best_ns), number
        for number in waiting:
            start(number, clock)
    return winner
