"""The decision space of one graph on one mesh: strategies per operator, and what each costs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tap_planner.cluster import Cluster, Mesh, axis_levels, part_of
from tap_planner.cost import PriceList, StageShare, operator_times_ns, prices_of, stage_prices
from tap_planner.graph import Operator, ParameterRead, Tensor, TensorKind
from tap_planner.operators import TensorType, kept_for_backward, record_of, rule_of
from tap_planner.schedule import made_gradients
from tap_planner.search.conflicts import no_strategy
from tap_planner.search.constraints import StrategyFilter
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.redistributions import RedistributionTable
from tap_planner.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Placements,
    Strategy,
    data_axes,
    dual_placements,
    enumerate_strategies,
    fits,
    local_elements,
    stored_placements,
)

_OperatorKey = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorSpace:
    """Strategies of an operator with their compute times; shared by operators that do not differ."""

    strategies: tuple[Strategy, ...]
    forward_ns: np.ndarray
    """[num_strategies] compute and internal collectives of one microbatch."""
    backward_ns: np.ndarray
    """[num_strategies]"""
    forward_compute_ns: np.ndarray
    """[num_strategies] of ``forward_ns`` what is compute."""
    backward_compute_ns: np.ndarray
    """[num_strategies]"""
    forward_floor_ns: np.ndarray
    """[num_strategies] least compute, however small the sizes."""
    backward_floor_ns: np.ndarray
    """[num_strategies]"""

    def least_of_step_ns(self, forwards: np.ndarray, repeat: int, microbatches: int) -> np.ndarray:
        """[..., num_strategies] what a step of smaller microbatches takes at least, compute and internal collectives.

        Args:
            forwards: [..., 1] how often the forward runs for each microbatch.
            repeat: microbatches of the sizes that were priced in a step.
            microbatches: those of the step; no fewer.
        """
        forward, backward = self.forward_compute_ns * repeat, self.backward_compute_ns * repeat
        more_forward = np.maximum(forward, self.forward_floor_ns * microbatches) - forward
        more_backward = np.maximum(backward, self.backward_floor_ns * microbatches) - backward
        return (forwards * self.forward_ns + self.backward_ns) * repeat + forwards * more_forward + more_backward


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterState:
    """Where a parameter may be stored and in which placement its gradient arrives."""

    placement: Placements
    gradient: Placements

    @property
    def data_axes(self) -> tuple[int, ...]:
        """Axes over which the parameter is replicated and its gradient is summed."""
        return data_axes(self.placement, self.gradient)


class ModelSpace:
    """Everything that the search asks about one graph on one mesh.

    Args:
        index: the graph, bound with the batch of one microbatch, and its repeats.
        cluster: devices and links.
        mesh: the mesh.
        precision: ``bf16``, ``fp16``, ``fp32`` or ``fp64``.
        strategy_filter: what the constraints leave of an operator's strategies.
        hints: block counts of its operators' factors.
        prices: what is minimised.
        shares: what the times of pipeline stages count where they have unlike devices.
    """

    def __init__(
        self,
        index: GraphIndex,
        cluster: Cluster,
        mesh: Mesh,
        precision: str,
        strategy_filter: StrategyFilter,
        hints: Mapping[str, tuple[tuple[int, ...], ...]],
        prices: PriceList = PriceList.TIME,
        shares: tuple[StageShare, ...] = (),
    ) -> None:
        self.cluster = cluster
        self.index = index
        self.graph = index.graph
        self.folded = index.folded
        self.mesh = mesh
        self.mesh_shape = tuple(axis.size for axis in mesh.axes)
        self.price_list = prices
        used = part_of(cluster, mesh)
        self.prices = (
            stage_prices(prices, used, mesh, precision, shares) if shares else prices_of(prices, used, mesh, precision)
        )
        self.compute = self.prices.compute
        self.collectives = self.prices.collectives
        self._filter = strategy_filter
        self._hints = hints
        self._spaces: dict[_OperatorKey, OperatorSpace] = {}
        self._by_operator: dict[int, OperatorSpace] = {}
        self._tables: dict[TensorType, RedistributionTable] = {}
        self._needed: dict[str, tuple[bool, ...]] = {}
        self._trainable = {parameter.name: parameter.trainable for parameter in index.graph.parameters}

    @cached_property
    def axis_levels(self) -> tuple[tuple[str, ...], ...]:
        """Per axis, names of the levels that it spans."""
        return tuple(axis_levels(self.mesh, self.cluster, axis) for axis in range(len(self.mesh.axes)))

    # -- operators ---------------------------------------------------------------------------------------------

    def requires_gradient(self, operator: Operator) -> tuple[bool, ...]:
        """Per operand, whether the operator's backward makes its gradient."""
        if operator.id not in self._needed:
            self._needed[operator.id] = made_gradients(self.graph, operator)
        return self._needed[operator.id]

    def operator(self, index: int) -> OperatorSpace:
        """Strategies of operator number ``index``."""
        if index not in self._by_operator:
            self._by_operator[index] = self._operator(self.graph.operators[index])
        return self._by_operator[index]

    def _operator(self, operator: Operator) -> OperatorSpace:
        partial_operands = tuple(
            name is not None and self.graph.tensors[name].kind is TensorKind.ACTIVATION for name in operator.inputs
        )
        hints = self._hints[operator.id]
        needed = self.requires_gradient(operator)
        key = (operator.signature, hints, partial_operands, needed, self._filter.demands(operator))
        if key not in self._spaces:
            self._spaces[key] = self._make_space(operator, hints, partial_operands, needed)
        return self._spaces[key]

    def _make_space(
        self,
        operator: Operator,
        hints: tuple[tuple[int, ...], ...],
        partial_operands: tuple[bool, ...],
        needed: tuple[bool, ...],
    ) -> OperatorSpace:
        signature = operator.signature
        rule = rule_of(signature)
        possible = enumerate_strategies(signature, rule, self.mesh_shape, hints, partial_operands)
        strategies = tuple(strategy for strategy in possible if self._filter.allows(operator, strategy, rule))
        if not strategies:
            raise no_strategy(self._filter, operator, rule, possible, str(self.mesh))
        known: dict[object, tuple[int, int]] = {}
        times = np.array([self._times(operator, strategy, needed, known) for strategy in strategies], dtype=np.int64)
        inside = [self._internal_ns(operator, strategy) for strategy in strategies]
        inside_backward = [self._internal_ns(operator, strategy, needed) for strategy in strategies]
        forward_ns, backward_ns = times[:, 0], times[:, 1]
        floor_ns, backward_floor_ns = self.compute.floor_ns(), self.compute.floor_ns(backward=True)
        return OperatorSpace(
            strategies=strategies,
            forward_ns=forward_ns + np.array(inside, dtype=np.int64),
            backward_ns=backward_ns + np.array(inside_backward, dtype=np.int64),
            forward_compute_ns=forward_ns,
            backward_compute_ns=backward_ns,
            forward_floor_ns=np.minimum(forward_ns, floor_ns),
            backward_floor_ns=np.minimum(backward_ns, backward_floor_ns),
        )

    def _times(
        self,
        operator: Operator,
        strategy: Strategy,
        needed: tuple[bool, ...],
        known: dict[object, tuple[int, int]],
    ) -> tuple[int, int]:
        """Forward and backward compute; ``known`` has those of the operator by the sizes that they depend on: many
        strategies differ in nothing but the axes."""
        signature = operator.signature
        input_elements = [
            0 if operand is None or placements is None else passes * self.local_elements(operand.shape, placements)
            for operand, placements, passes in zip(
                signature.inputs, strategy.inputs, strategy.input_passes, strict=True
            )
        ]
        output_elements = [
            self.local_elements(output.shape, placements)
            for output, placements in zip(signature.outputs, strategy.outputs, strict=True)
        ]
        key = (strategy.factor_sizes, *input_elements, *output_elements)
        if key not in known:
            known[key] = operator_times_ns(
                self.compute,
                signature,
                factor_sizes=strategy.factor_sizes,
                input_elements=input_elements,
                output_elements=output_elements,
                requires_gradient=needed,
            )
        return known[key]

    def _internal_ns(self, operator: Operator, strategy: Strategy, needed: tuple[bool, ...] | None = None) -> int:
        """Collectives inside an operator: forward's, or (given which operands need gradients) backward's."""
        rule = rule_of(operator.signature)
        total = 0
        for internal in rule.collectives:
            axes = strategy.axes_over(rule, internal.factor)
            if not axes:
                continue
            spread = [strategy.axes_over(rule, factor) for factor in range(len(rule.factors))]
            ranks = [math.prod(self.mesh_shape[axis] for axis in over) for over in spread]
            times = internal.times(ranks, needed)
            if times:
                source = operator.signature.inputs[0]
                assert source is not None
                elements = internal.num_elements(strategy.factor_sizes, ranks)
                payload = self.compute.tensor_bytes(source.dtype, elements)
                total += times * self.collectives.cost(internal.kind, axes, payload).ns
        return total

    def local_elements(self, shape: tuple[int, ...], placements: Placements) -> int:
        """Elements of the largest local part."""
        return local_elements(shape, placements, self.mesh_shape)

    def kept(self, operator: Operator) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Operands and outputs that the operator keeps for backward."""
        return kept_for_backward(record_of(operator.signature), self.requires_gradient(operator))

    # -- tensors -----------------------------------------------------------------------------------------------

    def tensor_bytes(self, tensor: Tensor, placements: Placements) -> int:
        """Bytes of the largest local part of a tensor."""
        return self.compute.tensor_bytes(tensor.type.dtype, self.local_elements(tensor.type.shape, placements))

    def table(self, tensor: TensorType) -> RedistributionTable:
        """Redistribution costs of tensors of one type."""
        if tensor not in self._tables:
            self._tables[tensor] = RedistributionTable(
                tensor, self.mesh_shape, self._options.get(tensor, frozenset()), self.collectives, self.compute
            )
        return self._tables[tensor]

    @cached_property
    def _options(self) -> Mapping[TensorType, frozenset[Placement]]:
        """Shard placements that any strategy gives to tensors of a type."""
        found: dict[TensorType, set[Placement]] = {}
        seen: set[int] = set()
        for index in self.index.skeleton:
            operator = self.graph.operators[index]
            space = self.operator(index)
            if id(space) in seen:
                continue
            seen.add(id(space))
            operands = (*operator.signature.inputs, *operator.signature.outputs)
            given = zip(*((*strategy.inputs, *strategy.outputs) for strategy in space.strategies), strict=True)
            for operand, placements in zip(operands, given, strict=True):
                if operand is not None:
                    found.setdefault(operand, set()).update(*(p for p in placements if p is not None))
        return {tensor: frozenset(p for p in options if p.is_shard) for tensor, options in found.items()}

    # -- parameters --------------------------------------------------------------------------------------------

    def trainable(self, parameter: str) -> bool:
        """Whether the optimizer updates the parameter."""
        return self._trainable[parameter]

    def parameter_states(self, parameter: str, shape: tuple[int, ...]) -> tuple[ParameterState, ...]:
        """Storage choices of a parameter that several operands read: R with an R or a P gradient, or a shard that
        some reader wants."""
        options: set[Placement] = set()
        for name in self.index.parameter_reads[parameter]:
            tensor = self.graph.tensors[name]
            assert tensor.read is not None
            slots = {(id(self.operator(index)), position): index for index, position in self.index.consumers[name]}
            for (_, position), index in slots.items():
                for strategy in self.operator(index).strategies:
                    placements = strategy.inputs[position]
                    assert placements is not None
                    options.update(p for p in stored_placements(tensor.read, placements) if p.is_shard)
        pairs: list[tuple[Placement, Placement]] = [(REPLICATE, REPLICATE)]
        if self._trainable[parameter] and self.graph.loss is not None:
            pairs.append((REPLICATE, PARTIAL))
        pairs.extend((p, p) for p in sorted(options, key=lambda p: (p.dim, p.blocks)))
        states: list[ParameterState] = [ParameterState(placement=(), gradient=())]
        for _ in self.mesh_shape:
            states = [
                ParameterState(placement=(*state.placement, p), gradient=(*state.gradient, g))
                for state in states
                for p, g in pairs
            ]
        return tuple(
            state
            for state in states
            if fits(shape, state.placement, self.mesh_shape)
            and self._filter.allows_storage(parameter, shape, state.placement)
        )


def storage_of_operand(read: ParameterRead, placements: Placements, gradient: Placements | None) -> ParameterState:
    """How a parameter with a single reader is stored: as its reader wants it (where that is P(sum): replicated)."""
    stored = stored_placements(read, placements)
    wanted = dual_placements(stored) if gradient is None else stored_placements(read, gradient)
    return ParameterState(
        placement=tuple(REPLICATE if p.is_partial else p for p in stored),
        gradient=tuple(REPLICATE if p.is_partial else g for p, g in zip(stored, wanted, strict=True)),
    )


__all__ = [
    "ModelSpace",
    "OperatorSpace",
    "ParameterState",
    "storage_of_operand",
]
