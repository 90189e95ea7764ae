"""What a process has of each stage whose ranks it holds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tap_planner.apply.communicator import Communicator, RecordingCommunicator
from tap_planner.apply.executor import GradientFactor, StepExecutor
from tap_planner.apply.operators import NO_CUSTOM, CustomFunctions
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.weights import WeightSource
from tap_planner.program import Program


@dataclass(frozen=True, slots=True)
class Worker:
    """A stage on the ranks of this process."""

    communicator: Communicator
    recorder: RecordingCommunicator
    """What it passes on is counted."""
    store: ParameterStore
    executor: StepExecutor


def make_workers(
    program: Program,
    communicator: Communicator,
    weights: WeightSource,
    *,
    dtype: torch.dtype,
    gradient_factor: GradientFactor | None = None,
    custom: CustomFunctions = NO_CUSTOM,
) -> tuple[Worker, ...]:
    """Get ready to run steps.

    Args:
        program: what to run.
        communicator: holds the ranks of this process.
        weights: initial values of the parameters.
        dtype: what floats are computed in.
        gradient_factor: see ``GradientFactor``; None for plain training.
        custom: torch functions of the user's.

    Returns:
        One for each stage that this process holds.
    """
    decisions = program.decisions
    workers: list[Worker] = []
    for own in communicator.stages:
        recorder = RecordingCommunicator(own)
        store = ParameterStore(program, recorder, weights, dtype)
        training = decisions.mode == "train"
        optimizer = make_optimizer(decisions.optimizer, decisions.optimizer_states) if training else None
        executor = StepExecutor(
            program, recorder, store, optimizer, dtype=dtype, gradient_factor=gradient_factor, custom=custom
        )
        workers.append(Worker(own, recorder, store, executor))
    return tuple(workers)
