"""Tasks on several processes: what a task gives does not depend on how many there are, and none is lost."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Generic, TypeVar

__all__ = ["Done", "Lost", "how_ended", "work_through"]

T = TypeVar("T")
MAX_TRIES = 2
"""How often a task is tried whose process ends."""
TICK_S = 0.5
"""How long to wait for an answer before something else may be done."""
_log = logging.getLogger("tap_planner")


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """What a task gave."""

    task: int
    answer: T


@dataclass(frozen=True, slots=True)
class Lost:
    """A task whose processes ended before it did."""

    task: int
    exit_code: int | None
    """Negative: the signal that ended the last of them."""


def how_ended(exit_code: int | None) -> str:
    """In words."""
    if exit_code is None or exit_code >= 0:
        return f"exit code {exit_code}"
    return f"signal {-exit_code}" + (", perhaps for want of memory" if -exit_code == signal.SIGKILL else "")


def work_through(
    tasks: Sequence[int], work: Callable[[int], T], processes: int, on_tick: Callable[[], None] = lambda: None
) -> Iterator[Done[T] | Lost]:
    """Do tasks, each in one process; answers come as they are ready.

    Args:
        tasks: numbers.
        work: does one; what it raises ends everything.
        processes: most of them. With one, or where this process cannot fork, the work is done in it.
        on_tick: called while nothing is ready.
    """
    can_fork = "fork" in multiprocessing.get_all_start_methods() and threading.active_count() == 1
    if min(processes, len(tasks)) < 2 or not can_fork or multiprocessing.parent_process() is not None:
        for task in tasks:
            yield Done(task, work(task))
        return
    team = _Team(tasks, work)
    try:
        team.grow(min(processes, len(tasks)))
        while team.is_busy:
            answers = team.wait(TICK_S)
            if not answers:
                on_tick()
            yield from answers
    finally:
        team.end()


class _Worker:
    """A process that has all that this one has found out so far."""

    def __init__(self, work: Callable[[int], object], others: Sequence[_Worker]) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, far = context.Pipe()
        unused = [self.connection, *(other.connection for other in others)]
        self._process = context.Process(target=_serve, args=(work, far, unused), daemon=True)
        self._process.start()
        far.close()
        self.task: int | None = None

    def start(self, task: int) -> None:
        """Have a task done; whether the process still lives is seen when its answer is waited for."""
        self.task = task
        with contextlib.suppress(OSError):
            self.connection.send(task)

    def end(self) -> int | None:
        """End the process; returns its exit code."""
        self.connection.close()
        self._process.terminate()
        self._process.join()
        code = self._process.exitcode
        self._process.close()
        return code

    def exit_code(self) -> int | None:
        """That of a process which has ended by itself."""
        self._process.join()
        return self._process.exitcode


class _Team(Generic[T]):
    def __init__(self, tasks: Sequence[int], work: Callable[[int], T]) -> None:
        self._left = deque(tasks)
        self._work = work
        self._tries: dict[int, int] = {}
        self._workers: list[_Worker] = []

    @property
    def is_busy(self) -> bool:
        """Whether anything is still to be done."""
        return any(worker.task is not None for worker in self._workers)

    def grow(self, count: int) -> None:
        """More processes, each with a task if one is left."""
        for _ in range(count):
            worker = _Worker(self._work, self._workers)
            self._workers.append(worker)
            self._next(worker)

    def wait(self, seconds: float) -> list[Done[T] | Lost]:
        """What has ended."""
        busy = {worker.connection: worker for worker in self._workers if worker.task is not None}
        found: list[Done[T] | Lost] = []
        for connection in wait(list(busy), seconds):
            assert isinstance(connection, Connection)
            found.extend(self._receive(busy[connection]))
        return found

    def end(self) -> None:
        """End all processes."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _next(self, worker: _Worker) -> None:
        worker.task = None
        if self._left:
            worker.start(self._left.popleft())

    def _receive(self, worker: _Worker) -> Iterator[Done[T] | Lost]:
        task = worker.task
        assert task is not None
        try:
            failure, answer = worker.connection.recv()
        except (EOFError, OSError):
            yield from self._replace(worker, task)
            return
        if failure is not None:
            raise failure
        self._next(worker)
        yield Done(task, answer)

    def _replace(self, worker: _Worker, task: int) -> Iterator[Lost]:
        """Try a task again in a new process, for the last time."""
        code = worker.exit_code()
        worker.end()
        self._workers.remove(worker)
        self._tries[task] = self._tries.get(task, 1) + 1
        if self._tries[task] <= MAX_TRIES:
            _log.warning(f"a process was lost ({how_ended(code)}); what it was planning is planned again")
            self._left.appendleft(task)
        else:
            yield Lost(task, code)
        if self._left:
            self.grow(1)


def _serve(work: Callable[[int], object], connection: Connection, unused: Sequence[Connection]) -> None:
    """Do tasks until the other end is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that forked this one ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    for other in unused:
        other.close()
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer = (None, work(task))
        except Exception as error:
            answer = (error, None)
        try:
            connection.send(answer)
        except OSError:
            return
