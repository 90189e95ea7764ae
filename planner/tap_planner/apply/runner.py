"""Applies a plan: with local processes, as part of a launcher's job, or all ranks in lockstep."""

from __future__ import annotations

import os

from tap_planner.apply.jobs import ApplyJob, ApplyResult, idle_result, prepare, run_job
from tap_planner.apply.launch import run_processes
from tap_planner.apply.lockstep import LockstepCommunicator
from tap_planner.apply.process_group import ProcessGroupCommunicator


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
    mesh_shape, num_stages = job.decisions.mesh_shape, job.decisions.num_stages
    if num_processes is not None:
        job.members(num_processes)  # refuses a number that does not fit
        prepare(job)  # what is wrong with plan, model or weights is said once, before any process starts
        return run_processes(job, num_processes)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        members = job.members(int(os.environ["WORLD_SIZE"]))
        prepared = prepare(job)
        communicator = ProcessGroupCommunicator(mesh_shape, backend, members=members, num_stages=num_stages)
        try:
            result = idle_result(job) if communicator.is_idle else run_job(job, communicator, prepared)
            communicator.wait_for_all()
            return result if result.holds_first else None
        finally:
            communicator.close()
    return run_job(job, LockstepCommunicator(mesh_shape, num_stages=num_stages))
