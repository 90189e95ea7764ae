"""Applies a plan: with local processes, as part of a launcher's job, or all ranks in lockstep."""

from __future__ import annotations

import math
import os

from tap_planner.apply.jobs import ApplyJob, ApplyResult, prepare, run_job
from tap_planner.apply.launch import run_processes
from tap_planner.apply.lockstep import LockstepCommunicator
from tap_planner.apply.process_group import ProcessGroupCommunicator
from tap_planner.errors import ApplyError


def apply_job(job: ApplyJob, *, num_processes: int | None = None, backend: str | None = None) -> ApplyResult | None:
    """Do a job.

    Args:
        job: what to do.
        num_processes: start so many local processes; None: join the launcher whose RANK and WORLD_SIZE are set,
            else emulate all ranks in lockstep in this process.
        backend: of the launcher's process group; None: nccl where there are GPUs, else gloo.

    Returns:
        What rank 0 saw; None in a launcher's other processes.

    Raises:
        ApplyError: the number of processes does not fit the mesh, the plan is about another model, an
            operator has no torch function, or a rank failed.
    """
    mesh_shape = job.decisions.mesh_shape
    if num_processes is not None:
        _check_world(mesh_shape, num_processes)
        prepare(job)  # what is wrong with plan, model or weights is said once, before any process starts
        return run_processes(job, num_processes)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_world(mesh_shape, int(os.environ["WORLD_SIZE"]))
        prepared = prepare(job)
        communicator = ProcessGroupCommunicator(mesh_shape, backend)
        try:
            result = run_job(job, communicator, prepared)
            return result if result.holds_first else None
        finally:
            communicator.close()
    return run_job(job, LockstepCommunicator(mesh_shape))


def _check_world(mesh_shape: tuple[int, ...], world: int) -> None:
    ranks = math.prod(mesh_shape)
    if world != ranks:
        shown = "x".join(map(str, mesh_shape))
        raise ApplyError(
            f"the plan's mesh {shown} has {ranks} ranks, got {world} processes",
            hint=f"start {ranks} processes, or none to emulate them",
        )
