"""Cost tables of redistributions: cheapest sequences of steps between all placements of a tensor."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from functools import lru_cache

import numpy as np

from tap_planner.cost import CollectivePrices, ComputeModel
from tap_planner.operators import TensorType
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    Step,
    fits,
    local_shape,
    make_step,
    step_elements,
    step_kind,
)

INFINITE = np.int64(1) << 52
"""Cost of what cannot be done; sums of a few thousand stay inside int64."""
_HOP = 64
"""Costs are scaled by this while paths are sought, so that among equally cheap ones the one of fewest steps wins."""


@lru_cache(maxsize=1 << 17)
def _step_and_elements(
    shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], axis: int, target: Placement
) -> tuple[Step, int] | None:
    """``make_step`` with its ``step_elements``."""
    step = make_step(shape, placements, mesh_shape, axis, target)
    return None if step is None else (step, step_elements(shape, placements, mesh_shape, step))


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
        self._known: dict[tuple[str, int, int], int] = {}
        """Scaled costs by kind, axis and payload in elements."""
        self._steps: list[list[tuple[int, Step, int]]] = []
        """Per state, (state reached, step, scaled cost) of every single step, axis by axis."""
        self.scaled = self._shortest_paths()
        self.cost_ns = np.where(self.scaled < INFINITE, self.scaled // _HOP, INFINITE)
        """[num_states, num_states] ns of the cheapest sequence."""

    # -- single steps ------------------------------------------------------------------------------------------

    def _all_steps(self) -> Iterator[list[tuple[int, Step, int]]]:
        """The single steps from each state."""
        plain = self._plain_steps()
        for state in self.states:
            found: list[tuple[int, Step, int]] = []
            shape = local_shape(self._tensor.shape, state, self._mesh_shape)
            for axis, source in enumerate(state):
                before, after = state[:axis], state[axis + 1 :]
                split = {p.dim for p in (*before, *after) if p.is_shard}
                for target, step in plain[axis, source]:
                    reached = self.index.get((*before, target, *after))
                    if reached is None:
                        continue
                    if step is None or source.dim in split or target.dim in split:
                        possible = self._step_inside(state, shape, axis, target)
                        if possible is None:
                            continue
                        step, elements = possible
                    else:
                        elements = self._plain_elements(shape, step)
                    found.append((reached, step, self._scaled_cost(step, elements)))
            yield found

    def _step_inside(
        self, state: Placements, shape: tuple[int, ...], axis: int, target: Placement
    ) -> tuple[Step, int] | None:
        """A step and its payload in elements. All but the dims that it touches only multiplies the payload.

        Args:
            state: the placements before.
            shape: of the local part before.
            axis: where the step is.
            target: what the placement there becomes.
        """
        touched = [placement.dim for placement in (state[axis], target) if placement.is_shard]
        sizes = tuple([size if dim in touched else 1 for dim, size in enumerate(self._tensor.shape)])
        placements = tuple([p if a == axis or p.dim in touched else REPLICATE for a, p in enumerate(state)])
        found = _step_and_elements(sizes, placements, self._mesh_shape, axis, target)
        if found is None:
            return None
        step, elements = found
        return step, elements * math.prod([length for dim, length in enumerate(shape) if dim not in touched])

    def _plain_steps(self) -> dict[tuple[int, Placement], list[tuple[Placement, Step | None]]]:
        """By axis and placement, the other placements, with the step to each where it is one as long as no other axis
        splits the dims that it touches; None where the blocks of the dims have to be looked at."""
        found: dict[tuple[int, Placement], list[tuple[Placement, Step | None]]] = {}
        for axis, source, target in itertools.product(range(len(self._mesh_shape)), self._per_axis, self._per_axis):
            targets = found.setdefault((axis, source), [])
            kind = step_kind(source, target)
            if kind is not None:
                blocks = source.blocks > 1 or target.blocks > 1 or (source.is_shard and source.dim == target.dim)
                targets.append((target, None if blocks else Step(kind=kind, axis=axis, source=source, target=target)))
        return found

    def _plain_elements(self, shape: tuple[int, ...], step: Step) -> int:
        """``step_elements`` of a step that alone splits the dims that it touches.

        Args:
            shape: of the local part before.
            step: the step.
        """
        if step.is_local:
            return 0
        elements, ranks = math.prod(shape), self._mesh_shape[step.axis]
        if step.kind == "all_gather":
            return elements * ranks
        if step.kind == "all_reduce" or not elements:
            return elements
        length = shape[step.target.dim]
        return elements // length * (-(-length // ranks) * ranks)

    def _scaled_cost(self, step: Step, elements: int) -> int:
        """Cost of a step; one that moves nothing counts as a hop all the same."""
        key = (step.kind, step.axis, elements)
        cost = self._known.get(key)
        if cost is None:
            cost = 1
            if not step.is_local:
                payload = self._compute.tensor_bytes(self._tensor.dtype, elements)
                cost += self._collectives.cost(step.kind, (step.axis,), payload).ns * _HOP
            self._known[key] = cost
        return cost

    # -- sequences ---------------------------------------------------------------------------------------------

    def _shortest_paths(self) -> np.ndarray:
        """[num_states, num_states] scaled cost of the cheapest sequence (Floyd, CACM 5(6), 1962)."""
        count, most = len(self.states), int(INFINITE)
        distance = np.full((count, count), INFINITE, dtype=np.int64)
        np.fill_diagonal(distance, 0)
        for number, steps in enumerate(self._all_steps()):
            self._steps.append(steps)
            if steps:
                distance[number, [reached for reached, _, _ in steps]] = [min(cost, most) for _, _, cost in steps]
        through = np.empty_like(distance)
        for middle in range(count):
            np.add(distance[:, middle, None], distance[None, middle, :], out=through)
            np.minimum(distance, through, out=distance)
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
