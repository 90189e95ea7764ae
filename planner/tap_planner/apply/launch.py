"""Local processes, one per rank: started, watched, and ended together."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
import torch.distributed as dist

from tap_planner.apply.jobs import ApplyJob, ApplyResult, idle_result, run_job
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.errors import ApplyError, TapError

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


_Message = ApplyResult | _Failure


def run_processes(job: ApplyJob, num_processes: int, timeout_s: int = 600) -> ApplyResult:
    """Do a job with local processes over gloo, one thread each.

    Args:
        job: what to do.
        num_processes: as many as the plan's mesh has ranks; processes beyond those are idle.
        timeout_s: how long one collective may take.

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
                arguments = (job, rank, num_processes, Path(folder) / "store", timeout_s, dict(os.environ), sender)
                process = context.Process(target=_run_rank, args=arguments, daemon=True)
                process.start()
                sender.close()
                pipes.append(receiver)
                processes.append(process)
            return _watch(processes, pipes)
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


def _watch(processes: list[BaseProcess], pipes: list[Connection]) -> ApplyResult:
    """Wait for every rank's message; the first failure ends the wait after a short grace."""
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    result: ApplyResult | None = None
    failures: list[_Failure] = []
    deadline: float | None = None
    while waiting:
        remaining = None if deadline is None else deadline - time.monotonic()
        if remaining is not None and remaining <= 0:
            break
        for pipe in wait(list(waiting), remaining):
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            message = _receive(pipe, rank, processes[rank])
            if isinstance(message, _Failure):
                failures.append(message)
                deadline = deadline or time.monotonic() + _GRACE_S
            elif message.holds_first:
                result = message
    if failures:
        first = min(failures, key=lambda failure: (failure.priority, failure.rank))
        raise ApplyError(f"rank {first.rank} failed: {first.message}", hint=first.hint)
    if result is None:
        raise ApplyError("no rank reported a result")
    return result


def _receive(pipe: Connection, rank: int, process: BaseProcess) -> _Message:
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
    job: ApplyJob,
    rank: int,
    world: int,
    store: Path,
    timeout_s: int,
    environment: Mapping[str, str],
    sender: Connection,
) -> None:
    """Body of a process: join the group, do the job, send what came of it."""
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
        communicator = ProcessGroupCommunicator(job.decisions.mesh_shape, "gloo", members=job.members(world))
        result = idle_result(job) if communicator.is_idle else run_job(job, communicator)
        communicator.wait_for_all()
        dist.barrier()
        dist.destroy_process_group()
    except TapError as error:
        sender.send(_Failure(rank=rank, message=error.message, hint=error.hint, priority=0))
    except Exception as error:  # the parent reports it, whatever it is
        lost = isinstance(error, RuntimeError) and ("peer" in str(error) or "gloo" in str(error).lower())
        message = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        sender.send(_Failure(rank=rank, message=message, hint="", priority=2 if lost else 0))
    else:
        sender.send(result)
