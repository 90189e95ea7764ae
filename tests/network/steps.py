"""What ranks are asked to do: run training steps of a plan, as tap-apply does."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
import torch

from tap_planner.apply import ApplyJob, ParameterStore, RecordingCommunicator, StepExecutor, synthetic_inputs
from tap_planner.apply.jobs import prepare
from tap_planner.apply.optimizer import make_optimizer
from tests.network.probes import communicator


class _Ready(NamedTuple):
    executor: StepExecutor
    inputs: dict[str, np.ndarray]


_ready: dict[str, _Ready] = {}
"""Plans that this rank can run a step of, by name."""


def get_ready(name: str, job: ApplyJob) -> None:
    """Read the model, make the weights, and keep all that a step of the job needs, under a name."""
    prepared = prepare(job)
    decisions = prepared.program.decisions
    recorder = RecordingCommunicator(communicator(decisions.mesh_shape))
    store = ParameterStore(prepared.program, recorder, prepared.weights, torch.float32)
    optimizer = make_optimizer(decisions.optimizer, decisions.optimizer_states)
    executor = StepExecutor(prepared.program, recorder, store, optimizer, dtype=torch.float32)
    _ready[name] = _Ready(executor, synthetic_inputs(prepared.whole, job.seed))


def run_step(name: str) -> float:
    """Run a step of a job that is ready; how long it took, in seconds."""
    started = time.perf_counter()
    _ready[name].executor.run(_ready[name].inputs)
    return time.perf_counter() - started
