"""The terms of a graph: what every tensor costs, over the strategies of its producer and consumers."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tap_planner.graph import TensorKind
from tap_planner.operators import CACHE_OPERAND, TensorType
from tap_planner.search.factors import INFINITE
from tap_planner.search.places import Places
from tap_planner.search.space import ModelSpace
from tap_planner.search.storage import ParameterStorage
from tap_planner.search.terms import Slot, Term
from tap_planner.sharding import Placements, dual_placements, read_placements

Readers = tuple[tuple[int, int], ...]
"""(operator, operand) pairs that read a tensor."""
MANY_READERS = 64
"""More operands than that are looked through for equal ones: terms take time in the square of their number."""


class TensorTerms:
    """Makes the terms of the tensors that the parts of a model need.

    Args:
        space: the graph on the mesh.
        places: where its operators are.
        parameters: variables and states of its parameters.
    """

    def __init__(self, space: ModelSpace, places: Places, parameters: ParameterStorage) -> None:
        self._space = space
        self._index = space.index
        self._graph = space.graph
        self._places = places
        self._parameters = parameters
        self._kept: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._slot_arrays: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._state_bytes: dict[TensorType, np.ndarray] = {}

    def all(self) -> Iterator[tuple[Term, bool]]:
        """Every term that some part needs, with whether occurrences of a run share it."""
        for name, readers, shared in self._index.couplings:
            tensor = self._graph.tensors[name]
            if tensor.kind is not TensorKind.PARAMETER:
                yield self._activation_term(name, readers), shared
                continue
            assert tensor.read is not None
            if tensor.read.parameter in self._parameters.shared:
                yield self._parameter_term(tensor.read.parameter, name, readers), shared
        for index in self._index.skeleton:
            yield from ((self._activation_term(name, ()), False) for name in self._kept_unread(index))

    def _kept_unread(self, index: int) -> Iterator[str]:
        """Outputs that an operator keeps for its backward although no operator reads them (all states of an LSTM)."""
        operator = self._graph.operators[index]
        for output in self._space.kept(operator)[1]:
            if output < len(operator.outputs) and operator.outputs[output] not in self._index.consumers:
                yield operator.outputs[output]

    def _activation_term(self, name: str, readers: Readers) -> Term:
        producer = self._index.maker(name)
        source = wanted = np.zeros(1, dtype=np.int64)
        keeps, region = False, -1
        if producer is not None and name in self._index.caches:
            source, _ = self._operand_states(producer, CACHE_OPERAND, name)
            wanted = source
            readers = tuple(reader for reader in readers if reader[0] != producer)
        elif producer is not None:
            operator = self._graph.operators[producer]
            output = operator.outputs.index(name)
            source, wanted = self._output_states(producer, output, name)
            keeps = output in self._space.kept(operator)[1]
            region = int(self._places.region_of[producer])
        return Term(
            tensor=name,
            producer=producer,
            producer_region=region,
            source=source,
            wanted=wanted,
            producer_keeps=keeps,
            is_activation=True,
            slots=self._distinct_slots(readers, name),
            cost_ns=self._space.table(self._graph.tensors[name].type).cost_ns,
            state_bytes=self._bytes(name),
            producer_rerun=producer is not None and bool(self._places.rerun[producer]),
        )

    def _distinct_slots(self, readers: Readers, name: str) -> tuple[Slot, ...]:
        """The operands that read a tensor; of very many, one for each operator and demand (the others cost nothing)."""
        slots = [self._slot(index, position, name) for index, position in readers]
        if len(slots) <= MANY_READERS:
            return tuple(slots)
        demands: dict[tuple[int, bytes, bytes, bool, bool], Slot] = {}
        for slot in slots:
            key = (slot.variable, slot.destination.tobytes(), slot.gradient.tobytes(), slot.kept, slot.rerun)
            demands.setdefault(key, slot)
        return tuple(demands.values())

    def _parameter_term(self, parameter: str, name: str, readers: Readers) -> Term:
        table = self._space.table(self._graph.tensors[name].type)
        variable = self._parameters.shared[parameter]
        states = self._parameters.states(self._parameters.name_of(self._parameters.class_of(variable)))
        return Term(
            tensor=name,
            producer=variable,
            producer_region=-1,
            source=np.array([self.state_index(name, state.placement) for state in states], dtype=np.int64),
            wanted=np.array([self.state_index(name, state.gradient) for state in states], dtype=np.int64),
            producer_keeps=False,
            is_activation=False,
            slots=tuple(self._slot(index, position, name) for index, position in readers),
            cost_ns=np.pad(table.cost_ns, (0, 1), constant_values=int(INFINITE) >> 4),
            state_bytes=np.zeros(len(table.states) + 1, dtype=np.int64),
        )

    def state_index(self, name: str, placements: Placements) -> int:
        """State of a read under a storage; one past the last where the read cannot have it."""
        tensor = self._graph.tensors[name]
        assert tensor.read is not None
        table = self._space.table(tensor.type)
        mapped = read_placements(tensor.read, placements)
        return len(table.states) if mapped is None else table.index.get(mapped, len(table.states))

    def _slot(self, index: int, position: int, name: str) -> Slot:
        representative = int(self._places.class_of[index])
        destination, gradient = self._operand_states(index, position, name)
        if representative not in self._kept:
            self._kept[representative] = self._space.kept(self._graph.operators[representative])
        is_parameter = self._graph.tensors[name].kind is TensorKind.PARAMETER
        return Slot(
            variable=index,
            destination=destination,
            gradient=gradient,
            kept=(position in self._kept[representative][0] and not is_parameter) or self._index.is_stored_input(name),
            region=int(self._places.region_of[index]),
            rerun=bool(self._places.rerun[index]),
        )

    def _operand_states(self, index: int, position: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """([strategies] state of an operand, [strategies] state of its gradient or -1)."""
        representative = int(self._places.class_of[index])
        key = (representative, position)
        if key not in self._slot_arrays:
            table = self._space.table(self._graph.tensors[name].type)
            strategies = self._space.operator(representative).strategies
            needed = self._space.requires_gradient(self._graph.operators[index])[position]
            self._slot_arrays[key] = (
                np.array([table.index[s.inputs[position]] for s in strategies], dtype=np.int64),  # type: ignore[index]
                np.array(
                    [table.index[s.input_gradients[position]] if needed else -1 for s in strategies],  # type: ignore[index]
                    dtype=np.int64,
                ),
            )
        return self._slot_arrays[key]

    def _output_states(self, producer: int, output: int, name: str) -> tuple[np.ndarray, np.ndarray]:
        """([strategies] state of an output, [strategies] state in which its gradient is wanted)."""
        representative = int(self._places.class_of[producer])
        key = (representative, -1 - output)
        if key not in self._slot_arrays:
            table = self._space.table(self._graph.tensors[name].type)
            placements = [s.outputs[output] for s in self._space.operator(representative).strategies]
            self._slot_arrays[key] = (
                np.array([table.index[p] for p in placements], dtype=np.int64),
                np.array([table.index[dual_placements(p)] for p in placements], dtype=np.int64),
            )
        return self._slot_arrays[key]

    def _bytes(self, name: str) -> np.ndarray:
        """[states] bytes of a tensor's largest local part."""
        tensor = self._graph.tensors[name]
        if tensor.type not in self._state_bytes:
            states = self._space.table(tensor.type).states
            self._state_bytes[tensor.type] = np.array(
                [self._space.tensor_bytes(tensor, state) for state in states], dtype=np.int64
            )
        return self._state_bytes[tensor.type]
