"""Times of training steps on one device as ``tap-apply`` runs them: the executor, its bookkeeping included.

All processes of a team run the same step at the same time, each for itself, and begin each step together, as training
steps do: where they share cores or memory, that is in the times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from tap_planner.apply.communicator import RecordingCommunicator
from tap_planner.apply.executor import StepExecutor
from tap_planner.apply.inputs import synthetic_inputs
from tap_planner.apply.jobs import DTYPES
from tap_planner.apply.lockstep import LockstepCommunicator
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.parameters import ParameterStore
from tap_planner.apply.rounds import measure_in_rounds
from tap_planner.apply.team import Team
from tap_planner.apply.weights import RandomWeights
from tap_planner.program import Compute, Instruction, Phase, Program, UpdateParameters


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
        self._inputs = synthetic_inputs(program.graph)
        self._marks: list[int] = []
        """Begin of forward, backward and the optimizer."""

    def _execute(self, instruction: Instruction) -> None:
        match instruction, len(self._marks):
            case (_, 0) | (Compute(phase=Phase.BACKWARD), 1) | (UpdateParameters(), 2):
                self._marks.append(self._team.now_ns())
            case _:
                pass
        super()._execute(instruction)

    def block(self, runs: int) -> Sequence[float]:
        """Mean times of forward, backward and the optimizer in so many steps."""
        return [float(part) for part in np.mean([self._timed() for _ in range(runs)], axis=0)]

    def _timed(self) -> tuple[int, int, int]:
        self._marks = []
        self._team.wait_for_all()
        self.run(self._inputs)
        begin, backward, optimizer = self._marks
        return backward - begin, optimizer - backward, self._team.now_ns() - optimizer


def measure_steps(
    programs: Sequence[Program], team: Team, seconds: float, progress: Callable[[int, int], None]
) -> list[StepTimes | None]:
    """Measure steps.

    Args:
        programs: on meshes without axes; each has one microbatch.
        team: all its processes call this.
        seconds: for all of them.
        progress: see ``measure_in_rounds``.

    Returns:
        Means over the processes; None for those that no time was left for.
    """
    found = measure_in_rounds([partial(_TimedExecutor, program, team) for program in programs], team, seconds, progress)
    return [
        None if times is None else StepTimes(forward_ns=times[0], backward_ns=times[1], optimizer_ns=times[2])
        for times in found
    ]
