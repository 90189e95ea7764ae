"""Cost tables of redistributions: cheapest sequences of steps between all placements of a tensor."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np

from tap_planner.cost import CollectivePrices, ComputeModel
from tap_planner.operators import TensorType
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    Step,
    apply_step,
    fits,
    make_step,
    step_elements,
)

INFINITE = np.int64(1) << 52
"""Cost of what cannot be done; sums of a few thousand stay inside int64."""
_HOP = 64
"""Costs are scaled by this while paths are sought, so that among equally cheap ones the one of fewest steps wins."""


class RedistributionTable:
    """Cheapest conversions between the placements of tensors of one type on one mesh.

    Args:
        tensor: element type and global shape.
        mesh_shape: sizes of the axes.
        options: the placements that may occur on an axis, besides R and (for floats) P(sum).
        collectives: what a step costs.
        compute: sizes of tensors.
    """

    def __init__(
        self,
        tensor: TensorType,
        mesh_shape: tuple[int, ...],
        options: Iterable[Placement],
        collectives: CollectivePrices,
        compute: ComputeModel,
    ) -> None:
        self._tensor = tensor
        self._mesh_shape = mesh_shape
        self._collectives = collectives
        self._compute = compute
        shards = sorted({p for p in options if p.is_shard}, key=lambda p: (p.dim, p.blocks))
        per_axis = [REPLICATE, *([PARTIAL] if tensor.is_float else []), *shards]
        self.states: tuple[Placements, ...] = tuple(
            state
            for state in itertools.product(per_axis, repeat=len(mesh_shape))
            if fits(tensor.shape, state, mesh_shape)
        )
        self.index: dict[Placements, int] = {state: number for number, state in enumerate(self.states)}
        self._per_axis = per_axis
        self._steps: list[list[tuple[int, Step, int]]] = []
        self.scaled = self._shortest_paths()
        self.cost_ns = np.where(self.scaled < INFINITE, self.scaled // _HOP, INFINITE)
        """[num_states, num_states] ns of the cheapest sequence."""

    def _step_costs(self, number: int) -> list[tuple[int, Step, int]]:
        """(state reached, step, scaled cost) of every single step from a state, axis by axis."""
        state = self.states[number]
        shape, mesh_shape = self._tensor.shape, self._mesh_shape
        found: list[tuple[int, Step, int]] = []
        for axis in range(len(mesh_shape)):
            for target in self._per_axis:
                step = make_step(shape, state, mesh_shape, axis, target)
                if step is None:
                    continue
                reached = self.index.get(apply_step(state, step))
                if reached is None:
                    continue
                cost = 0
                if not step.is_local:
                    payload = self._compute.tensor_bytes(
                        self._tensor.dtype, step_elements(shape, state, mesh_shape, step)
                    )
                    cost = self._collectives.cost(step.kind, (axis,), payload).ns
                found.append((reached, step, cost * _HOP + 1))
        return found

    def _shortest_paths(self) -> np.ndarray:
        count = len(self.states)
        distance = np.full((count, count), INFINITE, dtype=np.int64)
        np.fill_diagonal(distance, 0)
        for number in range(count):
            steps = self._step_costs(number)
            self._steps.append(steps)
            for reached, _, cost in steps:
                distance[number, reached] = min(int(distance[number, reached]), cost)
        for middle in range(count):
            np.minimum(distance, distance[:, middle, None] + distance[None, middle, :], out=distance)
        return np.minimum(distance, INFINITE)

    def sequence(self, source: Placements, target: Placements) -> tuple[Step, ...]:
        """The cheapest steps from one placement to another (ties: fewest steps, then axis order)."""
        current, goal = self.index[source], self.index[target]
        result: list[Step] = []
        while current != goal:
            remaining = int(self.scaled[current, goal])
            if remaining >= INFINITE:
                raise AssertionError(f"no way from {source} to {target}")
            for reached, step, cost in self._steps[current]:
                if cost + int(self.scaled[reached, goal]) == remaining:
                    result.append(step)
                    current = reached
                    break
            else:
                raise AssertionError("shortest path is broken")
        return tuple(result)
