"""From an assignment of strategies to the decisions that a plan holds."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from itertools import accumulate

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import CACHE_OPERAND, rule_of
from tap_planner.plan import (
    AxisDecision,
    BucketDecision,
    Decisions,
    LossDecision,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    RedistributionDecision,
    Region,
    bucketed,
)
from tap_planner.schedule import BucketKey
from tap_planner.search.choices import Assignment
from tap_planner.search.configuration import Configuration, ZeroSetting
from tap_planner.search.model import Model
from tap_planner.search.space import ParameterState
from tap_planner.sharding import Placements, Strategy, dual_placements, read_placements


def assemble(model: Model, configuration: Configuration, assignment: Assignment, loss_output: str | None) -> Decisions:
    """Write out an assignment.

    Args:
        model: the model that was searched.
        configuration: the settings of the whole plan.
        assignment: the strategies.
        loss_output: ONNX name of the output that the loss reads.
    """
    return _Assembly(model, configuration, assignment).decisions(loss_output)


class _Assembly:
    def __init__(self, model: Model, configuration: Configuration, assignment: Assignment) -> None:
        self._model = model
        self._space = model.space
        self._graph: Graph = model.graph
        self._configuration = configuration
        self._assignment = assignment
        self._strategies: tuple[Strategy, ...] = tuple(
            model.space.operator(int(model.class_of[index])).strategies[value]
            for index, value in enumerate(assignment.operators)
        )
        self._states = self._parameter_states()

    def decisions(self, loss_output: str | None) -> Decisions:
        configuration = self._configuration
        parameters, buckets = self._parameters()
        loss = None
        if configuration.training:
            kind = str(self._graph.operators[-1].signature.attribute("kind"))
            loss = LossDecision(kind=kind, output=loss_output or "")
        return Decisions(
            mode="train" if configuration.training else "infer",
            precision=configuration.precision,
            optimizer=configuration.optimizer if configuration.training else "",
            optimizer_states=configuration.optimizer_states,
            loss=loss,
            microbatches=configuration.microbatches,
            axes=tuple(
                AxisDecision(name=axis.name, size=axis.size, levels=levels)
                for axis, levels in zip(self._space.mesh.axes, self._space.axis_levels, strict=True)
            ),
            order=self._space.mesh.order,
            operators=tuple(self._operator(index) for index in range(len(self._strategies))),
            parameters=parameters,
            redistributions=tuple(self._redistributions()),
            buckets=buckets,
            regions=self._regions(),
        )

    def _needed(self, operator: Operator) -> tuple[bool, ...]:
        return self._space.requires_gradient(operator)

    def _operator(self, index: int) -> OperatorDecision:
        operator, strategy = self._graph.operators[index], self._strategies[index]
        needed = self._needed(operator)
        inputs: list[OperandDecision | None] = []
        for position, name in enumerate(operator.inputs):
            placements = strategy.inputs[position]
            if name is None or placements is None:
                inputs.append(None)
                continue
            gradient = strategy.input_gradients[position] if needed[position] else None
            inputs.append(OperandDecision(tensor=name, placement=placements, gradient=gradient))
        return OperatorDecision(
            id=operator.id,
            name=operator.name,
            type=operator.type,
            strategy=strategy.names(rule_of(operator.signature)),
            inputs=tuple(inputs),
            outputs=tuple(
                OutputDecision(tensor=name, shape=output.shape, placement=placements)
                for name, output, placements in zip(
                    operator.outputs, operator.signature.outputs, strategy.outputs, strict=True
                )
            ),
        )

    def _parameter_states(self) -> dict[str, ParameterState]:
        states: dict[str, ParameterState] = {}
        for name, variable in self._model.shared_parameters.items():
            values = self._model.states(self._model.parameter_of(self._model.class_of_variable(variable)))
            states[name] = values[self._assignment.parameters[variable]]
        for index, operator in enumerate(self._graph.operators):
            for position, name in enumerate(operator.inputs):
                read = None if name is None else self._graph.tensors[name].read
                if read is not None and read.parameter not in states:
                    states[read.parameter] = self._model.stored(index, position, self._assignment.operators[index])
        return states

    def _parameters(self) -> tuple[tuple[ParameterDecision, ...], tuple[BucketDecision, ...]]:
        first_region = self._first_regions()
        kept = [p for p in self._graph.parameters if p.name in self._states]
        keys: list[BucketKey | None] = []
        elements: list[int] = []
        for parameter in kept:
            state = self._states[parameter.name]
            trainable = parameter.trainable and self._configuration.training
            axes = state.data_axes if trainable else ()
            zero = self._zero(parameter.name, state)
            sharded = zero.sharded(axes)
            level = zero.level if sharded else 0
            group: Hashable = first_region[parameter.name] if level >= 2 else None
            dtype = parameter.type.dtype
            key = BucketKey(axes=axes, dtype=dtype, zero_level=level, zero_axes=sharded, group=group)
            keys.append(key if axes else None)
            elements.append(self._space.local_elements(parameter.type.shape, state.placement))
        numbers, buckets = bucketed(keys, elements, [p.name for p in kept], self._space.mesh_shape)
        decisions = tuple(
            ParameterDecision(
                name=parameter.name,
                shape=parameter.type.shape,
                dtype=parameter.type.dtype,
                trainable=parameter.trainable and self._configuration.training,
                placement=self._states[parameter.name].placement,
                gradient=self._states[parameter.name].gradient
                if parameter.trainable and self._configuration.training
                else None,
                zero_level=key.zero_level if key is not None else 0,
                zero_axes=key.zero_axes if key is not None else (),
                bucket=number,
            )
            for parameter, key, number in zip(kept, keys, numbers, strict=True)
        )
        return decisions, buckets

    def _zero(self, parameter: str, state: ParameterState) -> ZeroSetting:
        """What ZeRO does with a parameter."""
        variable = self._model.shared_parameters.get(parameter)
        if variable is None:
            variable = self._space.index.consumers[self._space.index.parameter_reads[parameter][0]][0][0]
        mask = sum(1 << axis for axis in state.data_axes)
        group = self._model.zero_group(variable)
        return self._configuration.settings.zeros[self._assignment.zero.get((group, mask), 0)]

    def _first_regions(self) -> dict[str, tuple[int, int]]:
        """Per parameter what tells the region (of the plan) that reads it first."""
        pieces = self._pieces()
        regions: dict[str, tuple[int, int]] = {}
        for index, operator in enumerate(self._graph.operators):
            for name in operator.inputs:
                read = None if name is None else self._graph.tensors[name].read
                if read is not None:
                    regions.setdefault(read.parameter, (int(self._model.region_of[index]), pieces[index]))
        return regions

    def _source(self, name: str) -> tuple[Placements, Placements] | None:
        """Placement of a tensor where it is made, and the placement wanted of its gradient; None for free tensors."""
        tensor = self._graph.tensors[name]
        if tensor.kind is TensorKind.PARAMETER:
            assert tensor.read is not None
            state = self._states[tensor.read.parameter]
            source, wanted = (read_placements(tensor.read, p) for p in (state.placement, state.gradient))
            assert source is not None and wanted is not None
            return source, wanted
        cache = self._space.index.caches.get(name)
        if cache is not None:
            stored = self._strategies[cache].inputs[CACHE_OPERAND]
            assert stored is not None
            return stored, dual_placements(stored)
        producer = self._model.producer_of(name)
        if producer is None:
            return None
        output = self._graph.operators[producer].outputs.index(name)
        source = self._strategies[producer].outputs[output]
        return source, dual_placements(source)

    def _redistributions(self) -> Iterator[RedistributionDecision]:
        order: dict[tuple[str, Placements, Placements | None], dict[str, None]] = {}
        for index, operator in enumerate(self._graph.operators):
            needed = self._needed(operator)
            for position, name in enumerate(operator.inputs):
                placements = self._strategies[index].inputs[position]
                if name is None or placements is None:
                    continue
                gradient = self._strategies[index].input_gradients[position] if needed[position] else None
                order.setdefault((name, placements, gradient), {})[operator.id] = None
        for (name, placements, gradient), consumers in order.items():
            made = self._source(name)
            if made is None:
                continue
            source, wanted = made
            if placements == source and (gradient is None or gradient == wanted):
                continue
            table = self._space.table(self._graph.tensors[name].type)
            yield RedistributionDecision(
                tensor=name,
                source=source,
                to=placements,
                gradient=gradient,
                forward=table.sequence(source, placements),
                backward=() if gradient is None else table.sequence(gradient, wanted),
                consumers=tuple(consumers),
            )

    def _regions(self) -> tuple[Region, ...]:
        pieces = self._pieces()
        members: dict[tuple[int, int], list[int]] = {}
        for index, region in enumerate(self._model.region_of.tolist()):
            members.setdefault((region, pieces[index]), []).append(index)
        options = self._configuration.settings.recomputes
        result: list[Region] = []
        for (region, _), indices in sorted(members.items()):
            run = int(self._model.run_of[indices[0]])
            result.append(
                Region(
                    operators=tuple(self._graph.operators[index].id for index in indices),
                    run=run if run >= 0 else None,
                    occurrence=int(self._model.occurrence_of[indices[0]]),
                    recompute=options[self._assignment.recompute.get(region, 0)].label
                    if self._configuration.training and run >= 0
                    else "none",
                )
            )
        return tuple(result)

    def _pieces(self) -> list[int]:
        """[num_operators] rises at both ends of every shared stretch between runs, so that equal ones are written
        once."""
        rises = [0] * (len(self._graph.operators) + 1)
        for start, stop in self._space.folded.stretches():
            rises[start] = rises[stop] = 1
        return list(accumulate(rises[:-1]))
