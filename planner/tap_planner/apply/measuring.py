"""Times of training steps on one device as ``tap-apply`` runs them: the executor, its bookkeeping included.

All processes of a team run the same step at the same time, each for itself: where they share cores or memory, that is
in the times. Means over blocks of steps count, not single steps, as a scheduler's time slices are longer than most.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from tap_planner.apply.communicator import RecordingCommunicator
from tap_planner.apply.executor import StepExecutor
from tap_planner.apply.inputs import synthetic_inputs
from tap_planner.apply.jobs import DTYPES
from tap_planner.apply.lockstep import LockstepCommunicator
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.team import Budget, Team, repetitions
from tap_planner.apply.weights import RandomWeights
from tap_planner.program import Compute, Instruction, Phase, Program, UpdateParameters

_BLOCKS = 5
_LEAST_STEPS, _MOST_STEPS = 5, 500
_WARM_UPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """What a step takes, by part."""

    forward_ns: float
    backward_ns: float
    optimizer_ns: float


class _TimedExecutor(StepExecutor):
    """Knows when each part of a step began."""

    def __init__(self, program: Program, team: Team) -> None:
        communicator = RecordingCommunicator(LockstepCommunicator((), team.device))
        decisions = program.decisions
        dtype = DTYPES[decisions.precision]
        store = ParameterStore(program, communicator, RandomWeights(program.graph), dtype)
        optimizer = make_optimizer(decisions.optimizer, decisions.optimizer_states)
        super().__init__(program, communicator, store, optimizer, dtype=dtype)
        self._team = team
        self._marks: list[int] = []
        """Begin of forward, backward and the optimizer."""

    def _execute(self, instruction: Instruction) -> None:
        match instruction, len(self._marks):
            case (_, 0) | (Compute(phase=Phase.BACKWARD), 1) | (UpdateParameters(), 2):
                self._marks.append(self._team.now_ns())
            case _:
                pass
        super()._execute(instruction)

    def timed(self, inputs: Mapping[str, np.ndarray]) -> tuple[int, int, int]:
        """Run a step; what forward, backward and the optimizer took, in ns."""
        self._marks = []
        self.run(inputs)
        begin, backward, optimizer = self._marks
        return backward - begin, optimizer - backward, self._team.now_ns() - optimizer


def measure_steps(
    programs: Sequence[Program], team: Team, seconds: float, progress: Callable[[int], None]
) -> list[StepTimes | None]:
    """Measure steps one after the other.

    Args:
        programs: on meshes without axes; each has one microbatch.
        team: all its processes call this.
        seconds: for all of them.
        progress: called with the number of steps that are done, before each.

    Returns:
        Means over the processes; None for those that no time was left for.
    """
    budget = Budget(team, seconds, len(programs))
    found: list[StepTimes | None] = []
    for number, program in enumerate(programs):
        progress(number)
        share = budget.next_share()
        found.append(_measured(program, team, share) if share > 0 else None)
    return found


def _measured(program: Program, team: Team, share_s: float) -> StepTimes:
    executor = _TimedExecutor(program, team)
    inputs = synthetic_inputs(program.graph)
    for _ in range(_WARM_UPS):
        executor.timed(inputs)
    team.wait_for_all()
    once_ns = team.most(sum(executor.timed(inputs)))
    size = repetitions(once_ns / 1e9, share_s, _LEAST_STEPS, _MOST_STEPS) // _BLOCKS
    team.wait_for_all()
    blocks = [np.mean([executor.timed(inputs) for _ in range(size)], axis=0) for _ in range(_BLOCKS)]
    forward, backward, optimizer = team.means([statistics.median(part) for part in zip(*blocks, strict=True)])
    return StepTimes(forward_ns=forward, backward_ns=backward, optimizer_ns=optimizer)


def empty_device_cache(device: torch.device) -> None:
    """Give memory back that measurements leave behind."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
