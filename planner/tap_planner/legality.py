"""Do the decisions of a plan follow from its strategies? Checked anew from the graph, without the search.

Strategies and the placements of parameters are choices; everything else follows from them: placements and gradients of
operands, which redistributions there are, forward and backward, and what is reduced together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from tap_planner.operators import CACHE_OPERAND, rule_of
from tap_planner.schedule import BucketKey, assign_buckets, made_gradients
from tap_planner.sharding import (
    Strategy,
    apply_step,
    axis_choices,
    block_hints,
    dual_placements,
    fits,
    local_elements,
    make_step,
    make_strategy,
    parse_choice,
    read_placements,
)

if TYPE_CHECKING:
    from tap_planner.graph import Graph, Operator
    from tap_planner.plan import Decisions, OperatorDecision, ParameterDecision, RedistributionDecision
    from tap_planner.sharding import Placements, Step

__all__ = ["strategy_of", "unfounded"]


def unfounded(graph: Graph, decisions: Decisions) -> Iterator[str]:
    """What of the decisions does not follow from strategies and parameters; the program was lowered from them.

    Args:
        graph: the model bound with the batch of one microbatch.
        decisions: of a plan about it.
    """
    checking = _Checking(graph, decisions)
    yield from checking.operators()
    wrong = list(checking.parameters())
    yield from wrong
    if not wrong:
        yield from checking.redistributions()
        yield from checking.buckets()


def strategy_of(operator: Operator, names: Sequence[str], mesh_shape: tuple[int, ...]) -> Strategy | None:
    """The strategy that a plan calls so; None if the operator has none of these names, or its sizes forbid it."""
    rule = rule_of(operator.signature)
    try:
        choices = tuple(parse_choice(rule, name) for name in names)
    except ValueError:
        return None
    return make_strategy(operator.signature, rule, choices, mesh_shape)


class _Checking:
    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        self._graph = graph
        self._decisions = decisions
        self._mesh_shape = decisions.mesh_shape
        self._training = decisions.mode == "train"
        self._strategies: dict[object, Strategy | None] = {}
        self._made_at = {output.tensor: output.placement for o in decisions.operators for output in o.outputs}
        self._stored = {parameter.name: parameter for parameter in decisions.parameters}

    # -- operators ---------------------------------------------------------------------------------------------

    @cached_property
    def _hints(self) -> Mapping[str, tuple[tuple[int, ...], ...]]:
        return block_hints(self._graph)

    def operators(self) -> Iterator[str]:
        """Placements and gradients that are not those of the strategy, and strategies that the space lacks."""
        for operator, decision in zip(self._graph.operators, self._decisions.operators, strict=True):
            where, named = f"operators: {operator.id}", ", ".join(decision.strategy)
            strategy = self._strategy(operator, decision.strategy)
            outputs = tuple((output.tensor, output.placement) for output in decision.outputs)
            expected = () if strategy is None else tuple(zip(operator.outputs, strategy.outputs, strict=True))
            inputs = tuple(
                None if operand is None else (operand.tensor, operand.placement) for operand in decision.inputs
            )
            if strategy is None or (inputs, outputs) != (_operands(operator, strategy), expected):
                yield f"{where}: its placements are not those of strategy {named}"
            elif not self._is_choice(operator, strategy):
                yield f"{where}: strategy {named} is not in the space"
            elif self._gradients(decision) != _wanted_gradients(strategy, made_gradients(self._graph, operator)):
                yield f"{where}: the gradients of its operands are not those of strategy {named}"

    def _strategy(self, operator: Operator, names: tuple[str, ...]) -> Strategy | None:
        key = (operator.signature, names)
        if key not in self._strategies:
            self._strategies[key] = strategy_of(operator, names, self._mesh_shape)
        return self._strategies[key]

    def _is_choice(self, operator: Operator, strategy: Strategy) -> bool:
        kinds = (None if name is None else self._graph.tensors[name].kind.name for name in operator.inputs)
        partial = tuple(kind == "ACTIVATION" for kind in kinds)
        allowed = axis_choices(rule_of(operator.signature), self._hints[operator.id], partial)
        return all(choice in allowed for choice in strategy.choices)

    def _gradients(self, decision: OperatorDecision) -> tuple[Placements | None, ...]:
        return tuple(None if operand is None else operand.gradient for operand in decision.inputs)

    # -- parameters --------------------------------------------------------------------------------------------

    def parameters(self) -> Iterator[str]:
        """Parameters that are not those of the graph, or stored as none can be."""
        read = {t.read.parameter for name in self._reading() if (t := self._graph.tensors[name]).read is not None}
        if read != self._stored.keys():
            names = sorted(read ^ self._stored.keys())
            yield f"parameters: {names[0]}: " + ("is missing" if names[0] in read else "is read by no operator")
        for known in self._graph.parameters:
            parameter = self._stored.get(known.name)
            if parameter is None:
                continue
            where, trained = f"parameters: {known.name}", known.trainable and self._training
            if (parameter.shape, parameter.dtype) != (known.type.shape, known.type.dtype):
                yield f"{where}: {parameter.dtype} of shape {parameter.shape}, the model has another"
            elif parameter.trainable != trained:
                yield f"{where}: is {'not ' if trained else ''}trained, the model says otherwise"
            elif not self._can_be_stored(parameter):
                yield f"{where}: its placement, or that of its gradient, is none that a parameter can have"
            elif bool(parameter.zero_level) != bool(parameter.zero_axes):
                yield f"{where}: ZeRO level {parameter.zero_level} over {len(parameter.zero_axes)} axes"

    def _reading(self) -> Iterator[str]:
        for operator in self._graph.operators:
            yield from (name for name in operator.inputs if name is not None)

    def _can_be_stored(self, parameter: ParameterDecision) -> bool:
        """Whole or in parts, the gradient alike, or to be summed where the parameter is whole."""
        if any(p.is_partial for p in parameter.placement):
            return False
        if not fits(parameter.shape, parameter.placement, self._mesh_shape):
            return False
        if parameter.gradient is None or not parameter.trainable:
            return parameter.gradient is None and not parameter.trainable
        pairs = zip(parameter.placement, parameter.gradient, strict=True)
        return all(made == kept or (kept.is_replicate and made.is_partial) for kept, made in pairs)

    # -- redistributions ---------------------------------------------------------------------------------------

    def redistributions(self) -> Iterator[str]:
        """Operands that nothing brings to where they are read, gradients that nothing brings back, and steps that do
        not do what they say."""
        edges = {(r.tensor, r.to, r.gradient): r for r in self._decisions.redistributions}
        if len(edges) != len(self._decisions.redistributions):
            yield "redistributions: one is listed twice"
        readers = self._readers()
        for key, consumers in readers.items():
            edge = edges.get(key)
            source = self._source(key[0])
            if source is None:
                if edge is not None:
                    yield f"redistributions: {key[0]} needs none, it is there in every placement"
            elif edge is not None:
                yield from self._wrong(edge, source, consumers)
            elif key[1] != source[0]:
                yield f"redistributions: nothing brings {key[0]} to where {consumers[0]} reads it"
            elif key[2] not in (None, source[1]):
                yield f"redistributions: nothing brings the gradient of {key[0]} back from {consumers[0]}"
        for tensor, _, _ in edges.keys() - readers.keys():
            yield f"redistributions: no operator reads {tensor} so"

    def _readers(self) -> dict[tuple[str, Placements, Placements | None], list[str]]:
        """By (tensor, placement, gradient) the operators that read it so, in order."""
        found: dict[tuple[str, Placements, Placements | None], list[str]] = {}
        for decision in self._decisions.operators:
            for operand in decision.inputs:
                if operand is not None:
                    consumers = found.setdefault((operand.tensor, operand.placement, operand.gradient), [])
                    if decision.id not in consumers:
                        consumers.append(decision.id)
        return found

    def _source(self, name: str) -> tuple[Placements | None, Placements | None] | None:
        """Where a tensor is made or stored, and where its gradient is wanted; None for what every rank can make, None
        of a pair where a parameter is stored so that it cannot be read."""
        tensor = self._graph.tensors[name]
        if name in self._made_at:
            return self._made_at[name], dual_placements(self._made_at[name])
        if tensor.read is not None:
            stored = self._stored[tensor.read.parameter]
            wanted = stored.gradient or stored.placement
            return read_placements(tensor.read, stored.placement), read_placements(tensor.read, wanted)
        if name in self._graph.caches:
            operand = self._decisions.operators[self._graph.caches[name]].inputs[CACHE_OPERAND]
            assert operand is not None
            return operand.placement, dual_placements(operand.placement)
        return None

    def _wrong(
        self,
        edge: RedistributionDecision,
        source: tuple[Placements | None, Placements | None],
        consumers: Sequence[str],
    ) -> Iterator[str]:
        made, wanted = source
        if edge.source != made:
            yield f"redistributions: {edge.tensor} is not made where a redistribution reads it"
        elif edge.to == made and edge.gradient in (None, wanted):
            yield f"redistributions: {edge.tensor} is where it is wanted, and so is its gradient"
        elif self._after(edge.tensor, edge.source, edge.forward) != edge.to:
            yield f"redistributions: the steps of {edge.tensor} do not lead to their destination"
        elif edge.gradient is None and edge.backward:
            yield f"redistributions: {edge.tensor} has steps for a gradient that nobody makes"
        elif edge.gradient is not None and self._after(edge.tensor, edge.gradient, edge.backward) != wanted:
            yield f"redistributions: the backward steps of {edge.tensor} do not lead to where its gradient is wanted"
        elif edge.consumers != tuple(consumers):
            yield f"redistributions: {edge.tensor} is not read so by the operators that are listed"

    def _after(self, name: str, placements: Placements, steps: Sequence[Step]) -> Placements | None:
        """Where steps lead; None where one of them is no step that can be done there, or not of the kind it says."""
        tensor = self._graph.tensors[name].type
        for step in steps:
            if make_step(tensor.shape, placements, self._mesh_shape, step.axis, step.target) != step:
                return None
            if step.target.is_partial and not tensor.is_float:
                return None
            placements = apply_step(placements, step)
            if not fits(tensor.shape, placements, self._mesh_shape):
                return None
        return placements

    # -- buckets -----------------------------------------------------------------------------------------------

    def buckets(self) -> Iterator[str]:
        """Gradients that are not reduced, or not with those that they belong to."""
        kept = [self._stored[known.name] for known in self._graph.parameters if known.name in self._stored]
        region_of = {name: n for n, region in enumerate(self._decisions.regions) for name in region.operators}
        first: dict[str, int] = {}
        for operator in self._graph.operators:
            for name in operator.inputs:
                read = None if name is None else self._graph.tensors[name].read
                if read is not None:
                    first.setdefault(read.parameter, region_of[operator.id])
        keys = [_bucket_key(parameter, first[parameter.name]) for parameter in kept]
        sizes = [local_elements(p.shape, p.placement, self._mesh_shape) for p in kept]
        numbers = assign_buckets(keys, sizes)
        for parameter, number in zip(kept, numbers, strict=True):
            if parameter.bucket != number:
                yield f"parameters: {parameter.name}: bucket {parameter.bucket}, its gradient belongs to {number}"
        members: dict[int, list[int]] = {}
        for position, number in enumerate(numbers):
            if number is not None:
                members.setdefault(number, []).append(position)
        listed = {bucket.id: bucket for bucket in self._decisions.buckets}
        if listed.keys() != members.keys() or len(listed) != len(self._decisions.buckets):
            yield f"buckets: {len(self._decisions.buckets)} are listed, gradients are reduced in {len(members)}"
            return
        for number, positions in members.items():
            key, bucket = keys[positions[0]], listed[number]
            assert key is not None
            shards = 1
            for axis in key.zero_axes:
                shards *= self._mesh_shape[axis]
            elements = -(-sum(sizes[position] for position in positions) // shards) * shards
            names = tuple(kept[position].name for position in positions)
            found = (bucket.axes, bucket.dtype, bucket.zero_level, bucket.zero_axes, bucket.parameters, bucket.elements)
            if found != (key.axes, key.dtype, key.zero_level, key.zero_axes, names, elements):
                yield f"buckets: {number} is not what its parameters make of it"


def _operands(operator: Operator, strategy: Strategy) -> tuple[object, ...]:
    pairs = zip(operator.inputs, strategy.inputs, strict=True)
    return tuple(None if name is None or placement is None else (name, placement) for name, placement in pairs)


def _wanted_gradients(strategy: Strategy, needed: Sequence[bool]) -> tuple[Placements | None, ...]:
    pairs = zip(strategy.inputs, strategy.input_gradients, needed, strict=True)
    return tuple(gradient if made and placement is not None else None for placement, gradient, made in pairs)


def _bucket_key(parameter: ParameterDecision, first_region: int) -> BucketKey | None:
    if not parameter.data_axes:
        return None
    return BucketKey(
        axes=parameter.data_axes,
        dtype=parameter.dtype,
        zero_level=parameter.zero_level,
        zero_axes=parameter.zero_axes,
        group=first_region if parameter.zero_level >= 2 else None,
    )
