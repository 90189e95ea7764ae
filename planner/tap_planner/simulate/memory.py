"""The most that a rank of each stage holds, and what of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from tap_planner.cost import ParameterMemory, parameter_memory
from tap_planner.plan import Decisions, ParameterDecision
from tap_planner.sharding import local_elements
from tap_planner.simulate.live import Held
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playing import Played
from tap_planner.simulate.sending import StageOrder


def stored_memory(decisions: Decisions, parameter: ParameterDecision) -> ParameterMemory:
    """What one rank holds of a parameter, its gradient and its optimizer states from step to step."""
    shards = 1
    for axis in parameter.zero_axes:
        shards *= decisions.mesh_shape[axis]
    return parameter_memory(
        local_elements(parameter.shape, parameter.placement, decisions.mesh_shape),
        dtype=parameter.dtype,
        shards=shards,
        zero_level=parameter.zero_level,
        precision=decisions.precision,
        optimizer=decisions.optimizer or "sgd",
        optimizer_states=decisions.optimizer_states,
        trainable=parameter.trainable,
    )


def stored_by(decisions: Decisions, names: Iterable[str]) -> ParameterMemory:
    """``stored_memory`` of some parameters together."""
    chosen = frozenset(names)
    found = [stored_memory(decisions, parameter) for parameter in decisions.parameters if parameter.name in chosen]
    return ParameterMemory(*(sum(sizes[kind] for sizes in found) for kind in range(3)))


class Profile(NamedTuple):
    """What a pass does to what is held, above what was held when it began."""

    after: Held
    """When it is over."""
    peak: Held
    """Where both together are most."""
    peak_position: int


def profile_of(given: Pass) -> Profile:
    """The profile of a pass."""
    activations = working = 0
    peak, peak_position = Held(), 0
    for position, change in given.changes:
        activations += change.activations
        working += change.working
        if activations + working > peak.total:
            peak, peak_position = Held(activations, working), position
    return Profile(Held(activations, working), peak, peak_position)


class Peak(NamedTuple):
    """The most that a stage holds beside what is there all the time."""

    held: Held
    time_ns: int


class Peaks:
    """Finds the peak of each stage.

    Args:
        passes: what slots do.
    """

    def __init__(self, passes: Sequence[Pass]) -> None:
        profiles = [profile_of(each) for each in passes]
        self._positions = [profile.peak_position for profile in profiles]
        rows = [(*profile.after, *profile.peak) for profile in profiles]
        self._rows = np.array(rows, dtype=np.int64).reshape(-1, 4)  # [passes, 4]

    def of(self, order: StageOrder, played: Played) -> Peak:
        """The peak of a stage (the first, where there are several).

        Args:
            order: what the stage does.
            played: when.
        """
        if not order.passes:
            return Peak(Held(), 0)
        rows = self._rows[list(order.passes)]  # [slots, 4]
        at_peak = rows[:, 2:]
        at_peak[1:] += np.cumsum(rows[:-1, :2], axis=0)
        slot = int((at_peak[:, 0] + at_peak[:, 1]).argmax())
        offset = played.runs[slot].offsets_ns[self._positions[order.passes[slot]]]
        return Peak(Held(int(at_peak[slot, 0]), int(at_peak[slot, 1])), played.starts_ns[slot] + offset)
