"""An old plan in the variables of a model: its values where they exist, and what an assignment changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property

import numpy as np

from tap_planner.operators import rule_of
from tap_planner.search.changes import OldPlan, Stored
from tap_planner.search.choices import Assignment
from tap_planner.search.configuration import Configuration
from tap_planner.search.costing import CostedModel
from tap_planner.search.model import Model
from tap_planner.search.space import ParameterState

Described = tuple[ParameterState, int]
"""How a parameter is stored, and its data axes as bits."""
UNMATCHED = -2
"""The old plan has no such operator."""
GONE = -1
"""The old plan has the operator, but its strategy is no longer possible."""


class WidenedModel(CostedModel):
    """A model in which the ZeRO settings of an old plan stay possible, even those that others now always beat.

    Args:
        model: variables and terms.
        configuration: what regions may choose from.
        old: the old plan.
    """

    def __init__(self, model: Model, configuration: Configuration, old: OldPlan) -> None:
        super().__init__(model, configuration)
        self._used: dict[int, set[int]] = {}
        for parameter in old.decisions.parameters:
            mask = sum(1 << axis for axis in parameter.data_axes)
            place = self.zero_place(parameter.data_axes, parameter.zero_level, parameter.zero_axes)
            if place is not None:
                self._used.setdefault(mask, set()).add(place)

    def zero_place(self, data_axes: tuple[int, ...], level: int, axes: tuple[int, ...]) -> int | None:
        """Place of the first setting that shards so; None where there is none."""
        for place in range(len(self.zeros)):
            if self.sharding(data_axes, place) == (level, axes):
                return place
        return None

    def sharding(self, data_axes: tuple[int, ...], place: int) -> tuple[int, tuple[int, ...]]:
        """(level, axes) that a ZeRO setting gives to a parameter with these data axes."""
        sharded = self.zeros[place].sharded(data_axes)
        return (self.zeros[place].level if sharded else 0), sharded

    def zero_options(self, mask: int, *, inside: bool) -> np.ndarray:
        """Places of the ZeRO settings that are worth having, or were had."""
        known = super().zero_options(mask, inside=inside)
        possible = self.configuration.settings.places(inside=inside)
        used = self._used.get(mask, set()).intersection(possible) if mask else set()
        return known if used <= set(known.tolist()) else np.array(sorted(used.union(known.tolist())), dtype=np.int64)


class Distance:
    """How far assignments are from an old plan on the same mesh.

    Args:
        costed: the model.
        old: the old plan.
    """

    def __init__(self, costed: WidenedModel, old: OldPlan) -> None:
        self.costed = costed
        self.old = old
        self._model = costed.model
        self._space = costed.model.space
        self._stored: dict[tuple[int, int, int], Described] = {}
        self._states: dict[tuple[str, int], Described] = {}
        self.strategies = self._strategies()
        """[num_operators] value of every operator in the old plan, ``GONE`` or ``UNMATCHED``."""

    def _strategies(self) -> np.ndarray:
        found = np.full(self._model.num_operators, UNMATCHED, dtype=np.int64)
        places: dict[int, dict[tuple[str, ...], int]] = {}
        for index, operator in enumerate(self._model.graph.operators):
            wanted = self.old.strategies.get(operator.id)
            if wanted is None:
                continue
            key = int(self._model.class_of[index])
            if key not in places:
                rule = rule_of(operator.signature)
                strategies = self._space.operator(key).strategies
                places[key] = {strategy.names(rule): value for value, strategy in enumerate(strategies)}
            found[index] = places[key].get(wanted, GONE)
        return found

    @cached_property
    def recompute(self) -> Mapping[int, frozenset[str]]:
        """By region of a run, the settings that its operators had."""
        found: dict[int, set[str]] = {}
        for index, operator in enumerate(self._model.graph.operators):
            region = int(self._model.region_of[index])
            if self._model.places.recomputes(region) and operator.id in self.old.recompute:
                found.setdefault(region, set()).add(self.old.recompute[operator.id])
        return {region: frozenset(known) for region, known in found.items()}

    def place_of_recompute(self, region: int) -> int | None:
        """Place of a region's old setting among those that it may choose from; None where it has none."""
        known = self.recompute.get(region, frozenset())
        options = self.costed.options(region)
        return next((n for n, mode in enumerate(options) if known == {mode.label}), None)

    # -- parameters --------------------------------------------------------------------------------------------

    @cached_property
    def single_reads(self) -> Mapping[int, tuple[tuple[int, str], ...]]:
        """By operator, the (operand, parameter) pairs that only it reads."""
        shared = self._model.shared_parameters
        found: dict[int, tuple[tuple[int, str], ...]] = {}
        for index, operator in enumerate(self._model.graph.operators):
            reads = [
                (position, read.parameter)
                for position, name in enumerate(operator.inputs)
                if name is not None and (read := self._model.graph.tensors[name].read) is not None
                if read.parameter not in shared
            ]
            if reads:
                found[index] = tuple(reads)
        return found

    def _described(self, parameter: str, state: ParameterState) -> Described:
        profile = self._model.parameters.profile(parameter, state)
        trained = profile[2] and self.costed.configuration.training
        return state, sum(1 << axis for axis in profile[3]) if trained else 0

    def stored(self, index: int, position: int, value: int) -> Described:
        """How a parameter is stored that only one operand reads."""
        key = (int(self._model.class_of[index]), position, value)
        if key not in self._stored:
            name = self._model.graph.operators[key[0]].inputs[position]
            read = None if name is None else self._model.graph.tensors[name].read
            assert read is not None
            self._stored[key] = self._described(read.parameter, self._model.stored(*key))
        return self._stored[key]

    def state(self, variable: int, value: int) -> Described:
        """How a parameter is stored that several operands read."""
        name = self._model.parameter_of(self._model.class_of_variable(variable))
        if (name, value) not in self._states:
            self._states[name, value] = self._described(name, self._model.states(name)[value])
        return self._states[name, value]

    def differs(self, parameter: str, described: Described, zero: int) -> bool:
        """Whether a parameter is stored otherwise than in the old plan, under a ZeRO setting of its group."""
        old = self.old.parameters.get(parameter)
        return old is not None and self._as_decided(described, zero) != old

    def _as_decided(self, described: Described, zero: int) -> Stored:
        state, mask = described
        level, axes = self.costed.sharding(state.data_axes if mask else (), zero)
        return state.placement, level, axes

    # -- assignments -------------------------------------------------------------------------------------------

    def count(self, assignment: Assignment) -> int:
        """Decisions that an assignment changes, but the number of microbatches."""
        values = np.array(assignment.operators)
        changed = int(((self.strategies != UNMATCHED) & (self.strategies != values)).sum())
        for region, known in self.recompute.items():
            mode = self.costed.options(region)[assignment.recompute.get(region, 0)]
            changed += known != {mode.label}
        return changed + sum(
            self.differs(parameter, described, assignment.zero.get((group, described[1]), 0))
            for parameter, described, group in self.parameters(assignment)
        )

    def parameters(self, assignment: Assignment) -> Iterator[tuple[str, Described, int]]:
        """(name, how it is stored, ZeRO group) of all parameters."""
        for index, reads in self.single_reads.items():
            for position, parameter in reads:
                described = self.stored(index, position, assignment.operators[index])
                yield parameter, described, self._model.zero_group(index)
        for parameter, variable in self._model.shared_parameters.items():
            yield (
                parameter,
                self.state(variable, assignment.parameters[variable]),
                self._model.zero_group(variable),
            )

    def assignment(self, base: Assignment | None = None) -> Assignment | None:
        """The old plan as an assignment; None where something of it is missing and there is no base to take it from."""
        operators = list(self.strategies.tolist())
        for index, value in enumerate(operators):
            if value < 0:
                if base is None:
                    return None
                operators[index] = base.operators[index]
        parameters: dict[int, int] = {}
        for parameter, variable in self._model.shared_parameters.items():
            value = self.old_state(parameter, variable)
            if value is None:
                if base is None:
                    return None
                value = base.parameters[variable]
            parameters[variable] = value
        recompute = {
            region: place
            for regions in self._model.places.run_regions
            for region in regions
            if (place := self._recompute_of(region, base)) is not None
        }
        half = Assignment(operators=tuple(operators), parameters=parameters, recompute=recompute)
        zero = self.zero_settings(half, {} if base is None else base.zero)
        return Assignment(operators=half.operators, parameters=parameters, recompute=recompute, zero=zero)

    def _recompute_of(self, region: int, base: Assignment | None) -> int | None:
        place = self.place_of_recompute(region)
        return place if place is not None or base is None else base.recompute.get(region, 0)

    def old_state(self, parameter: str, variable: int) -> int | None:
        """Value of a parameter variable in the old plan."""
        decision = next((p for p in self.old.decisions.parameters if p.name == parameter), None)
        if decision is None:
            return None
        states = self._model.states(self._model.parameter_of(self._model.class_of_variable(variable)))
        same = [value for value, state in enumerate(states) if state.placement == decision.placement]
        exact = [value for value in same if decision.gradient in (None, states[value].gradient)]
        return next(iter((*exact, *same)), None)

    def zero_settings(
        self, assignment: Assignment, others: Mapping[tuple[int, int], int]
    ) -> dict[tuple[int, int], int]:
        """The ZeRO setting of every group under which the fewest of its parameters change."""
        votes: dict[tuple[int, int], Counter[int]] = {}
        for parameter, described, group in self.parameters(assignment):
            state, mask = described
            if not mask:
                continue
            found = votes.setdefault((group, mask), Counter())
            old = self.old.parameters.get(parameter)
            place = None if old is None else self.costed.zero_place(state.data_axes, old[1], old[2])
            if place is not None:
                found[place] += 1
        zero = dict(others)
        for key, found in votes.items():
            if found:
                zero[key] = min(found, key=lambda place: (-found[place], place))
            else:
                zero.setdefault(key, int(self.costed.zero_options(key[1], inside=self.costed.lies_in_run(key[0]))[0]))
        return zero
