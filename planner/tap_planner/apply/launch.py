"""Local processes, one per rank: started, watched, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tap_planner.apply.jobs import ApplyJob, ApplyResult, idle_result, run_job
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.errors import ApplyError, TapError

Tell = Callable[[object], None]
"""Sends a value to the process that started this one, while work goes on."""
Task = Callable[[int, Tell], object]
"""(Number of processes, how to tell something) -> result; runs in every process, so it must be possible to send it
there. The process group exists by then."""

_GRACE_S = 3.0
"""After the first failure the other ranks may still report: what they say is often only that a peer is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    """Why a rank ended early."""

    rank: int
    message: str
    hint: str
    priority: int
    """0: the rank's own error, 1: it died without a word, 2: it lost a peer."""


@dataclass(frozen=True, slots=True)
class _Told:
    """What a rank says while it works."""

    value: object


@dataclass(frozen=True, slots=True)
class _Done:
    """What came of a rank's task."""

    value: object


def run_processes(job: ApplyJob, num_processes: int, timeout_s: int = 600) -> ApplyResult:
    """Do a job with local processes over gloo, one thread each.

    Args:
        job: what to do.
        num_processes: as many as the plan has ranks; processes beyond those are idle.
        timeout_s: how long one collective may take.

    Raises:
        ApplyError: a rank failed; the others were ended.
    """
    results = run_task(partial(_run_job, job), num_processes, timeout_s=timeout_s)
    found = [result for result in results if isinstance(result, ApplyResult) and result.holds_first]
    if not found:
        raise ApplyError("no rank reported a result")
    return found[0]


def _run_job(job: ApplyJob, world: int, tell: Tell) -> ApplyResult:
    decisions = job.decisions
    communicator = ProcessGroupCommunicator(
        decisions.mesh_shape, "gloo", members=job.members(world), num_stages=decisions.num_stages
    )
    result = idle_result(job) if communicator.is_idle else run_job(job, communicator)
    communicator.wait_for_all()
    return result


def run_task(
    task: Task, num_processes: int, *, timeout_s: int = 600, heard: Callable[[object], None] | None = None
) -> list[object]:
    """Do a task in local processes over gloo, one thread each.

    Args:
        task: what every process does.
        num_processes: how many.
        timeout_s: how long one collective may take.
        heard: called with what the processes tell.

    Returns:
        The results, by rank.

    Raises:
        ApplyError: a rank failed; the others were ended.
    """
    context = _context()
    with tempfile.TemporaryDirectory(prefix="tap-apply-") as folder:
        pipes: list[Connection] = []
        processes: list[BaseProcess] = []
        try:
            for rank in range(num_processes):
                receiver, sender = context.Pipe(duplex=False)
                arguments = (task, rank, num_processes, Path(folder) / "store", timeout_s, dict(os.environ), sender)
                process = context.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return _watch(processes, pipes, heard or (lambda value: None))
        finally:
            _end(processes)


def _context() -> ForkServerContext | SpawnContext:
    """Processes are forked from one that has imported torch and done nothing else, where the system has that: importing
    it takes longer than what most small plans do."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _watch(processes: list[BaseProcess], pipes: list[Connection], heard: Callable[[object], None]) -> list[object]:
    """Wait for every rank's result; the first failure ends the wait after a short grace."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    results: list[object] = [None] * len(pipes)
    failures: list[_Failure] = []
    deadline: float | None = None
    while waiting:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            break
        for pipe in wait(list(waiting), remaining):
            assert isinstance(pipe, Connection)
            rank = waiting[pipe]
            message = _receive(pipe, rank, processes[rank])
            if isinstance(message, _Told):
                heard(message.value)
                continue
            del waiting[pipe]
            if isinstance(message, _Failure):
                failures.append(message)
                deadline = deadline or time.monotonic() + _GRACE_S
            else:
                results[rank] = message.value
    if failures:
        first = min(failures, key=lambda failure: (failure.priority, failure.rank))
        raise ApplyError(f"rank {first.rank} failed: {first.message}", hint=first.hint)
    return results


def _receive(pipe: Connection, rank: int, process: BaseProcess) -> _Told | _Done | _Failure:
    try:
        return pipe.recv()
    except EOFError:
        process.join(_GRACE_S)
        return _Failure(
            rank=rank,
            message=f"its process ended with exit code {process.exitcode} and no message",
            hint="a negative code is the signal that ended it; -9 often means that memory ran out",
            priority=1,
        )


def _end(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.join(0.2)
        if process.is_alive():
            process.terminate()
    for process in processes:
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join()


def _run_rank(
    task: Task,
    rank: int,
    world: int,
    store: Path,
    timeout_s: int,
    environment: Mapping[str, str],
    sender: Connection,
) -> None:
    """Body of a process: join the group, do the task, send what came of it."""
    os.environ.update(environment)  # the server that forked it has that of the first call
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    try:
        dist.init_process_group(
            "gloo",
            init_method=store.as_uri(),
            rank=rank,
            world_size=world,
            timeout=timedelta(seconds=timeout_s),
        )
        result = task(world, lambda value: sender.send(_Told(value)))
        dist.barrier()
        dist.destroy_process_group()
    except TapError as error:
        sender.send(_Failure(rank=rank, message=error.message, hint=error.hint, priority=0))
    except Exception as error:  # the parent reports it, whatever it is
        lost = isinstance(error, RuntimeError) and ("peer" in str(error) or "gloo" in str(error).lower())
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        sender.send(_Failure(rank=rank, message=message, hint="", priority=2 if lost else 0))
    else:
        sender.send(_Done(result))
