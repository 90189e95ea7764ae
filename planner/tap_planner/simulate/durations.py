"""Times of the instructions of a Program, each by itself, with latency; or what each sends, by another price list."""

from __future__ import annotations

from tap_planner.cluster import Cluster, Mesh, MeshAxis
from tap_planner.cost import PriceList, operator_times_ns, prices_of
from tap_planner.plan import OperatorDecision, ParameterDecision
from tap_planner.program import (
    Instruction,
    Program,
    instruction_collectives,
    local_factor_sizes,
    local_operands,
    made_gradients,
)
from tap_planner.sharding import local_elements
from tap_planner.simulate.overlap import Busy


class Durations:
    """What the instructions of a Program take on the rank at coordinate 0.

    Args:
        program: the plan, lowered.
        cluster: the devices that its mesh uses.
        which: what is counted; with ``PriceList.VOLUME`` bytes sent take the place of nanoseconds.
    """

    def __init__(self, program: Program, cluster: Cluster, which: PriceList = PriceList.TIME) -> None:
        decisions = program.decisions
        self._program = program
        self._mesh_shape = decisions.mesh_shape
        axes = tuple(MeshAxis(name=axis.name, size=axis.size) for axis in decisions.axes)
        self._prices = prices_of(which, cluster, Mesh(axes=axes), decisions.precision)
        self.compute = self._prices.compute
        """Costs of operators, and sizes of tensors."""
        self.links = self._prices.collectives
        """Costs of collectives."""
        self._levels = [frozenset(axis.levels) for axis in decisions.axes]
        self._operators: dict[int, tuple[int, int]] = {}
        self._alike: dict[object, tuple[int, int]] = {}

    def collectives(self, instruction: Instruction) -> tuple[Busy, ...]:
        """The collectives that an instruction issues, each with the levels whose links it uses."""
        found: list[Busy] = []
        for _, kind, axes, elements, dtype in instruction_collectives(self._program, instruction):
            ns = self.links.cost(kind, axes, self.compute.tensor_bytes(dtype, elements)).ns
            found.append(Busy(ns, frozenset[str]().union(*(self._levels[axis] for axis in axes))))
        return tuple(found)

    def operator_ns(self, index: int) -> tuple[int, int]:
        """Forward and backward time of an operator, without collectives."""
        if index not in self._operators:
            self._operators[index] = self._operator_ns(index)
        return self._operators[index]

    def _operator_ns(self, index: int) -> tuple[int, int]:
        operator, decision = self._program.graph.operators[index], self._program.decisions.operators[index]
        key = (operator.signature, decision.strategy, *_placements(decision))
        if key not in self._alike:
            self._alike[key] = operator_times_ns(
                self.compute,
                operator.signature,
                factor_sizes=local_factor_sizes(self._program, index),
                input_elements=local_operands(self._program, index),
                output_elements=[
                    local_elements(output.shape, given.placement, self._mesh_shape)
                    for output, given in zip(operator.signature.outputs, decision.outputs, strict=True)
                ],
                requires_gradient=made_gradients(decision),
            )
        return self._alike[key]

    def update_ns(self) -> int:
        """The optimizer's step."""
        return sum(self._update_ns(p) for p in self._program.decisions.parameters if p.trainable)

    def _update_ns(self, parameter: ParameterDecision) -> int:
        shards = 1
        for axis in parameter.zero_axes:
            shards *= self._mesh_shape[axis]
        return self._prices.optimizer_ns(
            local_elements(parameter.shape, parameter.placement, self._mesh_shape),
            shards=shards,
            zero_level=parameter.zero_level,
            precision=self._program.decisions.precision,
            optimizer=self._program.decisions.optimizer,
            optimizer_states=self._program.decisions.optimizer_states,
            device=self.compute.device,
        )


def _placements(decision: OperatorDecision) -> tuple[object, ...]:
    """What of an operator's operands its time depends on."""
    operands = ((o.placement, o.gradient is not None) if o is not None else None for o in decision.inputs)
    return (*operands, *(output.placement for output in decision.outputs))
