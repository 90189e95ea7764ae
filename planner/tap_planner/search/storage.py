"""Parameters: the variables of those that several operands read, and how all of them may be stored."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tap_planner.search.places import Places
from tap_planner.search.space import ModelSpace, ParameterState, storage_of_operand

ParameterProfile = tuple[int, str, bool, tuple[int, ...]]
"""What a stored parameter's cost depends on: local elements, element type, trainable, data axes."""
StoredProfiles = tuple[tuple[ParameterProfile, ...], np.ndarray]
"""Profiles of a parameter, and [num_strategies] which of them each strategy of its reader has."""


class ParameterStorage:
    """Parameters of a graph on a mesh.

    A parameter that several operands read is a variable; its values are its storage states. Any other is stored as its
    only reader wants it.

    Args:
        space: the graph on the mesh.
        places: where its operators are.
    """

    def __init__(self, space: ModelSpace, places: Places) -> None:
        self._space = space
        self._index = space.index
        self._graph = space.graph
        self._places = places
        self._number = {parameter.name: number for number, parameter in enumerate(space.graph.parameters)}
        self._states: dict[str, tuple[ParameterState, ...]] = {}
        self._stored_profiles: dict[int, tuple[StoredProfiles, ...]] = {}

    # -- variables ---------------------------------------------------------------------------------------------

    @cached_property
    def shared(self) -> Mapping[str, int]:
        """Variables of the parameters that several operands read."""
        return {name: self._places.num_operators + number for name, number in self._index.shared_parameters.items()}

    def _variable(self, parameter: str) -> int:
        return self._places.num_operators + self._number[parameter]

    def name_of(self, variable: int) -> str:
        """Name of the parameter of a parameter variable."""
        return self._graph.parameters[variable - self._places.num_operators].name

    def class_of(self, variable: int) -> int:
        """The parameter variable whose domain and own cost a parameter variable shares."""
        index, position = self.first_use(variable)
        first = int(self._places.class_of[index])
        return variable if first == index else self._variable(self._read_by(first, position))

    def at_occurrence(self, variable: int, occurrence: int) -> int:
        """The parameter variable of a later occurrence of a run that corresponds to one of the second."""
        index, position = self.first_use(variable)
        period = self._space.folded.runs[int(self._places.run_of[index])].period
        return self.shared[self._read_by(index + (occurrence - 1) * period, position)]

    def first_use(self, variable: int) -> tuple[int, int]:
        """(operator, operand) that reads a parameter variable first."""
        return self._index.consumers[self._index.parameter_reads[self.name_of(variable)][0]][0]

    def _read_by(self, index: int, position: int) -> str:
        """The parameter that an operand reads."""
        name = self._graph.operators[index].inputs[position]
        assert name is not None
        read = self._graph.tensors[name].read
        assert read is not None
        return read.parameter

    def home(self, variable: int) -> tuple[int, int] | None:
        """(run, occurrence) of a parameter variable that lives in a later occurrence of a run, else None."""
        places = {
            (int(self._places.run_of[index]), int(self._places.occurrence_of[index]))
            for name in self._index.parameter_reads[self.name_of(variable)]
            for index, _ in self._index.consumers[name]
        }
        if len(places) != 1:
            return None
        (place,) = places
        return place if place[0] >= 0 and place[1] > 0 else None

    def regions_of(self, variable: int) -> tuple[int, ...]:
        """Regions of the readers of a parameter, each once."""
        reads = self._index.parameter_reads[self.name_of(variable)]
        return tuple(
            dict.fromkeys(int(self._places.region_of[i]) for name in reads for i, _ in self._index.consumers[name])
        )

    # -- states ------------------------------------------------------------------------------------------------

    def states(self, parameter: str) -> tuple[ParameterState, ...]:
        """Values of a parameter variable."""
        if parameter not in self._states:
            shape = self._graph.parameters[self._number[parameter]].type.shape
            self._states[parameter] = self._space.parameter_states(parameter, shape)
        return self._states[parameter]

    def stored(self, index: int, position: int, strategy: int) -> ParameterState:
        """Storage of a parameter with the single reader (operator, operand) under a strategy."""
        name = self._graph.operators[index].inputs[position]
        assert name is not None
        tensor = self._graph.tensors[name]
        chosen = self._space.operator(int(self._places.class_of[index])).strategies[strategy]
        placements, gradient = chosen.inputs[position], chosen.input_gradients[position]
        assert tensor.read is not None and placements is not None
        return storage_of_operand(tensor.read, placements, gradient if tensor.requires_gradient else None)

    # -- what costs depend on ----------------------------------------------------------------------------------

    def profile(self, parameter: str, state: ParameterState) -> ParameterProfile:
        """What the cost of a stored parameter depends on."""
        record = self._graph.parameters[self._number[parameter]]
        elements = self._space.local_elements(record.type.shape, state.placement)
        return elements, record.type.dtype, record.trainable, state.data_axes

    def stored_profiles(self, index: int) -> tuple[StoredProfiles, ...]:
        """For each parameter that only this operator reads: its profiles, and which of them each strategy has."""
        if index not in self._stored_profiles:
            found: list[StoredProfiles] = []
            for position, name in enumerate(self._graph.operators[index].inputs):
                read = None if name is None else self._graph.tensors[name].read
                if read is not None and read.parameter not in self.shared:
                    found.append(self._profiles_of(index, position, read.parameter))
            self._stored_profiles[index] = tuple(found)
        return self._stored_profiles[index]

    def _profiles_of(self, index: int, position: int, parameter: str) -> StoredProfiles:
        numbers: dict[ParameterProfile, int] = {}
        known: dict[object, int] = {}
        """By what an operand's placements are: many strategies do not differ in them."""
        inverse: list[int] = []
        for number, strategy in enumerate(self._space.operator(int(self._places.class_of[index])).strategies):
            key = (strategy.inputs[position], strategy.input_gradients[position])
            if key not in known:
                profile = self.profile(parameter, self.stored(index, position, number))
                known[key] = numbers.setdefault(profile, len(numbers))
            inverse.append(known[key])
        return tuple(numbers), np.array(inverse, dtype=np.int64)
