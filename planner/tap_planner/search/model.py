"""The cost model of one configuration on one mesh, cut into the parts that elimination works on.

Variables are numbered: operators by their index in the graph, then parameters that several operands read, then set
variables (exact stage). The *outer* part holds the operators outside runs, the first occurrence of every run, and the
boundary of the last one. The *link* part of a run holds its second occurrence, between the boundary of the first and
its own: all later occurrences are copies of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tap_planner.cost import optimizer_ns, parameter_memory
from tap_planner.graph import TensorKind
from tap_planner.search.elimination import INFINITE
from tap_planner.search.space import (
    ModelSpace,
    ParameterState,
    read_placements,
    storage_of_operand,
)
from tap_planner.search.terms import SCALE, RegionPolicy, Slot, Term
from tap_planner.sharding import Placements, dual_placements


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings that hold for the whole plan."""

    zero: int
    recompute: str
    microbatches: int
    optimizer: str
    precision: str
    training: bool


ParameterProfile = tuple[int, int, bool, tuple[int, ...]]
"""What a stored parameter's cost depends on: local elements, bytes of an element, trainable, data axes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunParts:
    """Where a run's variables are."""

    first: range
    second: range
    last: range
    num_links: int
    """Occurrences after the first."""
    boundary: tuple[int, ...]
    """Offsets inside an occurrence of the operators (variables) that the next occurrence or the outside sees."""
    shared: tuple[int, ...]
    """Variables outside that every occurrence reads."""


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the model: costs of single variables and terms."""

    variables: tuple[int, ...]
    """Variables whose own cost belongs here."""
    terms: tuple[Term, ...]


class Model:
    """Variables, own costs and terms of a graph on a mesh (before the configuration is looked at)."""

    def __init__(self, space: ModelSpace) -> None:
        self.space = space
        self.graph = space.graph
        self.num_operators = len(space.graph.operators)
        self.runs_in_use = tuple(run for run in space.folded.runs)
        self._parameter_number = {p.name: i for i, p in enumerate(space.graph.parameters)}
        self._produced_by = {
            name: index for index, operator in enumerate(self.graph.operators) for name in operator.outputs
        }
        self._locate()
        self._kept = {index: space.kept(self.graph.operators[index]) for index in space.skeleton}
        self._build()

    # -- places ------------------------------------------------------------------------------------------------

    def _locate(self) -> None:
        count = self.num_operators
        self.run_of = np.full(count, -1)
        self.occurrence_of = np.zeros(count, dtype=np.int64)
        self.class_of = np.arange(count)
        self.region_of = np.zeros(count, dtype=np.int64)
        region, position = 0, 0
        self.run_regions: list[list[int]] = []
        for number, run in enumerate(self.runs_in_use):
            if run.start > position:
                self.region_of[position : run.start] = region
                region += 1
            regions: list[int] = []
            for occurrence in range(run.count):
                begin = run.start + occurrence * run.period
                span = slice(begin, begin + run.period)
                self.run_of[span] = number
                self.occurrence_of[span] = occurrence
                self.class_of[span] = np.arange(run.start, run.start + run.period)
                self.region_of[span] = region
                regions.append(region)
                region += 1
            self.run_regions.append(regions)
            position = run.start + run.count * run.period
        self.region_of[position:] = region
        self.num_regions = region + 1

    def policy(self, configuration: Configuration) -> RegionPolicy:
        """Regions under the recompute setting."""
        if configuration.recompute == "none" or not configuration.training:
            return RegionPolicy(recomputed=frozenset(), working=frozenset())
        return RegionPolicy(
            recomputed=frozenset(region for regions in self.run_regions for region in regions),
            working=frozenset(regions[-1] for regions in self.run_regions),
        )

    # -- parameters --------------------------------------------------------------------------------------------

    @cached_property
    def shared_parameters(self) -> Mapping[str, int]:
        """Variables of the parameters that several operands read."""
        found: dict[str, int] = {}
        for parameter in self.graph.parameters:
            slots = sum(len(self.space.consumers[name]) for name in self.space.parameter_reads[parameter.name])
            if slots > 1:
                found[parameter.name] = self.num_operators + self._parameter_number[parameter.name]
        return found

    def parameter_of(self, variable: int) -> str:
        """Name of the parameter of a parameter variable."""
        return self.graph.parameters[variable - self.num_operators].name

    @cached_property
    def _states(self) -> dict[str, tuple[ParameterState, ...]]:
        return {}

    def states(self, parameter: str) -> tuple[ParameterState, ...]:
        """Values of a parameter variable."""
        if parameter not in self._states:
            shape = self.graph.parameters[self._parameter_number[parameter]].type.shape
            self._states[parameter] = self.space.parameter_states(parameter, shape)
        return self._states[parameter]

    def class_of_variable(self, variable: int) -> int:
        """The variable whose domain and own cost a variable shares."""
        if variable < self.num_operators:
            return int(self.class_of[variable])
        parameter = self.parameter_of(variable)
        index, position = self.space.consumers[self.space.parameter_reads[parameter][0]][0]
        first = int(self.class_of[index])
        if first == index:
            return variable
        name = self.graph.operators[first].inputs[position]
        assert name is not None
        read = self.graph.tensors[name].read
        assert read is not None
        return self.num_operators + self._parameter_number[read.parameter]

    def domain(self, variable: int) -> int:
        """Number of values of a variable."""
        if variable < self.num_operators:
            return len(self.space.operator(int(self.class_of[variable])).strategies)
        return len(self.states(self.parameter_of(self.class_of_variable(variable))))

    def stored(self, index: int, position: int, strategy: int) -> ParameterState:
        """Storage of a parameter with the single reader (operator, operand) under a strategy."""
        operator = self.graph.operators[index]
        name = operator.inputs[position]
        assert name is not None
        tensor = self.graph.tensors[name]
        chosen = self.space.operator(int(self.class_of[index])).strategies[strategy]
        placements, gradient = chosen.inputs[position], chosen.input_gradients[position]
        assert tensor.read is not None and placements is not None
        return storage_of_operand(tensor.read, placements, gradient if tensor.requires_gradient else None)

    def producer_of(self, tensor: str) -> int | None:
        """Index of the operator that makes a tensor."""
        return self._produced_by.get(tensor)

    def profile(self, parameter: str, state: ParameterState) -> ParameterProfile:
        """What the cost of a stored parameter depends on."""
        record = self.graph.parameters[self._parameter_number[parameter]]
        data_axes = tuple(
            axis
            for axis, (placement, gradient) in enumerate(zip(state.placement, state.gradient, strict=True))
            if placement.is_replicate and gradient.is_partial
        )
        elements = self.space.local_elements(record.type.shape, state.placement)
        return elements, self.space.compute.element_bytes(record.type.dtype), record.trainable, data_axes

    def stored_profiles(self, index: int) -> tuple[tuple[tuple[ParameterProfile, ...], np.ndarray], ...]:
        """For each parameter that only this operator reads: its profiles, and which of them each strategy has."""
        if index not in self._stored_profiles:
            found: list[tuple[tuple[ParameterProfile, ...], np.ndarray]] = []
            for position, name in enumerate(self.graph.operators[index].inputs):
                read = None if name is None else self.graph.tensors[name].read
                if read is None or read.parameter in self.shared_parameters:
                    continue
                numbers: dict[ParameterProfile, int] = {}
                inverse = [
                    numbers.setdefault(self.profile(read.parameter, self.stored(index, position, s)), len(numbers))
                    for s in range(len(self.space.operator(index).strategies))
                ]
                found.append((tuple(numbers), np.array(inverse, dtype=np.int64)))
            self._stored_profiles[index] = tuple(found)
        return self._stored_profiles[index]

    # -- terms -------------------------------------------------------------------------------------------------

    def _slot(self, index: int, position: int, name: str) -> Slot:
        tensor = self.graph.tensors[name]
        table = self.space.table(tensor.type)
        representative = int(self.class_of[index])
        key = (representative, position)
        if key not in self._slot_arrays:
            strategies = self.space.operator(representative).strategies
            needed = self.space.requires_gradient(self.graph.operators[index])[position]
            self._slot_arrays[key] = (
                np.array([table.index[s.inputs[position]] for s in strategies], dtype=np.int64),  # type: ignore[index]
                np.array(
                    [table.index[s.input_gradients[position]] if needed else -1 for s in strategies],  # type: ignore[index]
                    dtype=np.int64,
                ),
            )
        destination, gradient = self._slot_arrays[key]
        if representative not in self._kept:
            self._kept[representative] = self.space.kept(self.graph.operators[representative])
        return Slot(
            variable=index,
            destination=destination,
            gradient=gradient,
            kept=position in self._kept[representative][0] and tensor.kind is not TensorKind.PARAMETER,
            region=int(self.region_of[index]),
        )

    def _bytes(self, name: str) -> np.ndarray:
        tensor = self.graph.tensors[name]
        if tensor.type not in self._state_bytes:
            states = self.space.table(tensor.type).states
            self._state_bytes[tensor.type] = np.array(
                [self.space.tensor_bytes(tensor, state) for state in states], dtype=np.int64
            )
        return self._state_bytes[tensor.type]

    def _activation_term(self, name: str, slots: tuple[tuple[int, int], ...]) -> Term:
        tensor = self.graph.tensors[name]
        table = self.space.table(tensor.type)
        producer = self._produced_by.get(name)
        source = wanted = np.zeros(1, dtype=np.int64)
        keeps, region = False, -1
        if producer is not None:
            representative = int(self.class_of[producer])
            output = self.graph.operators[producer].outputs.index(name)
            key = (representative, -1 - output)
            if key not in self._slot_arrays:
                placements = [s.outputs[output] for s in self.space.operator(representative).strategies]
                self._slot_arrays[key] = (
                    np.array([table.index[p] for p in placements], dtype=np.int64),
                    np.array([table.index[dual_placements(p)] for p in placements], dtype=np.int64),
                )
            source, wanted = self._slot_arrays[key]
            keeps = output in self.space.kept(self.graph.operators[producer])[1]
            region = int(self.region_of[producer])
        return Term(
            tensor=name,
            producer=producer,
            producer_region=region,
            source=source,
            wanted=wanted,
            producer_keeps=keeps,
            is_activation=True,
            slots=tuple(self._slot(index, position, name) for index, position in slots),
            cost_ns=table.cost_ns,
            state_bytes=self._bytes(name),
        )

    def _parameter_term(self, parameter: str, name: str, slots: tuple[tuple[int, int], ...]) -> Term:
        tensor = self.graph.tensors[name]
        table = self.space.table(tensor.type)
        assert tensor.read is not None
        variable = self.shared_parameters[parameter]
        states = self.states(self.parameter_of(self.class_of_variable(variable)))
        source, wanted = (
            np.array([self._state_index(name, getattr(state, kind)) for state in states], dtype=np.int64)
            for kind in ("placement", "gradient")
        )
        return Term(
            tensor=name,
            producer=variable,
            producer_region=-1,
            source=source,
            wanted=wanted,
            producer_keeps=False,
            is_activation=False,
            slots=tuple(self._slot(index, position, name) for index, position in slots),
            cost_ns=np.pad(table.cost_ns, (0, 1), constant_values=int(INFINITE) >> 4),
            state_bytes=np.zeros(len(table.states) + 1, dtype=np.int64),
        )

    def _state_index(self, name: str, placements: Placements) -> int:
        """State of a read under a storage; one past the last where the read cannot have it."""
        tensor = self.graph.tensors[name]
        assert tensor.read is not None
        table = self.space.table(tensor.type)
        mapped = read_placements(tensor.read, placements)
        return len(table.states) if mapped is None else table.index.get(mapped, len(table.states))

    def _all_terms(self) -> list[tuple[Term, bool]]:
        """Terms of the tensors that the parts need, with whether they are shared by occurrences of a run."""
        skeleton = set(self.space.skeleton)
        found: list[tuple[Term, bool]] = []
        for name, slots in self.space.consumers.items():
            tensor = self.graph.tensors[name]
            if tensor.kind is TensorKind.CONSTANT:
                continue
            shared = self._is_shared(name, slots)
            if not shared and not any(index in skeleton for index, _ in slots):
                continue
            if tensor.kind is TensorKind.PARAMETER:
                assert tensor.read is not None
                if tensor.read.parameter in self.shared_parameters:
                    found.append((self._parameter_term(tensor.read.parameter, name, slots), shared))
            else:
                found.append((self._activation_term(name, slots), shared))
        return found

    def _is_shared(self, name: str, slots: tuple[tuple[int, int], ...]) -> bool:
        """Whether a tensor from outside is read by a later occurrence of some run."""
        producer = self._produced_by.get(name)
        return any(
            self.occurrence_of[index] > 0 and (producer is None or self.run_of[producer] != self.run_of[index])
            for index, _ in slots
        ) and (producer is not None or len({int(self.region_of[index]) for index, _ in slots}) > 1)

    def _build(self) -> None:
        self._stored_profiles: dict[int, tuple[tuple[tuple[ParameterProfile, ...], np.ndarray], ...]] = {}
        self._slot_arrays: dict[tuple[int, int], tuple[np.ndarray, np.ndarray]] = {}
        self._state_bytes: dict[object, np.ndarray] = {}
        outer: list[Term] = []
        links: list[list[Term]] = [[] for _ in self.runs_in_use]
        self.shared_terms: list[Term] = []
        crossing: list[list[Term]] = [[] for _ in self.runs_in_use]
        leaving: list[list[Term]] = [[] for _ in self.runs_in_use]
        for term, shared in self._all_terms():
            if shared:
                self.shared_terms.append(term)
                continue
            self._sort_in(term, outer, links, crossing, leaving)
        self.runs = tuple(
            self._run_parts(number, crossing[number], leaving[number]) for number in range(len(self.runs_in_use))
        )
        outer_variables = [
            index for index in range(self.num_operators) if self.run_of[index] < 0 or self.occurrence_of[index] == 0
        ]
        parameters = [v for name, v in self.shared_parameters.items() if self._home(v) is None]
        self.outer = Part((*outer_variables, *parameters), tuple(outer))
        self.links = tuple(
            Part(
                (*self.runs[number].second, *self._parameters_at(number)),
                tuple(links[number]),
            )
            for number in range(len(self.runs_in_use))
        )

    def _home(self, variable: int) -> tuple[int, int] | None:
        """(run, occurrence) of a parameter variable that lives in a later occurrence of a run, else None."""
        parameter = self.parameter_of(variable)
        places = {
            (int(self.run_of[index]), int(self.occurrence_of[index]))
            for name in self.space.parameter_reads[parameter]
            for index, _ in self.space.consumers[name]
        }
        if len(places) != 1:
            return None
        (place,) = places
        return place if place[0] >= 0 and place[1] > 0 else None

    def _parameters_at(self, number: int) -> tuple[int, ...]:
        return tuple(v for v in self.shared_parameters.values() if self._home(v) == (number, 1))

    def _place(self, variable: int) -> tuple[int, int]:
        if variable < self.num_operators:
            return int(self.run_of[variable]), int(self.occurrence_of[variable])
        return self._home(variable) or (-1, 0)

    def _sort_in(
        self,
        term: Term,
        outer: list[Term],
        links: list[list[Term]],
        crossing: list[list[Term]],
        leaving: list[list[Term]],
    ) -> None:
        places = [self._place(v) for v in term.variables]
        runs = {run for run, occurrence in places if run >= 0}
        inside = {place for place in places if place[0] >= 0}
        if len(runs) == 1 and len(inside) == len(set(places)):
            (run,) = runs
            occurrences = sorted(occurrence for _, occurrence in inside)
            if occurrences == [0, 1]:
                links[run].append(term)
                crossing[run].append(term)
                return
            if occurrences == [0]:
                outer.append(term)
                return
            if occurrences == [1]:
                links[run].append(term)
                return
            return
        for run, occurrence in inside:
            if occurrence > 0:
                leaving[run].append(term)
        outer.append(term)

    def _run_parts(self, number: int, crossing: list[Term], leaving: list[Term]) -> RunParts:
        run = self.runs_in_use[number]
        last_start = run.start + (run.count - 1) * run.period
        offsets: set[int] = set()
        for term in crossing:
            offsets.update(v - run.start for v in term.variables if self._place(v) == (number, 0))
        for term in leaving:
            for v in term.variables:
                if self._place(v)[0] == number and self._place(v)[1] > 0:
                    offsets.add(v - last_start)
        shared = tuple(
            dict.fromkeys(
                term.producer
                for term in self.shared_terms
                if term.producer is not None and any(self.run_of[slot.variable] == number for slot in term.slots)
            )
        )
        return RunParts(
            first=range(run.start, run.start + run.period),
            second=range(run.start + run.period, run.start + 2 * run.period),
            last=range(last_start, last_start + run.period),
            num_links=run.count - 1,
            boundary=tuple(sorted(offsets)),
            shared=shared,
        )

    def chainable(self) -> bool:
        """Whether every run is a chain that the parts describe: all boundary operators lie inside an occurrence and
        what leaves the last occurrence also goes from each occurrence to the next."""
        return all(0 <= offset < len(parts.first) for parts in self.runs for offset in parts.boundary)


class CostedModel:
    """A model under one configuration: own costs of variables, and how terms are weighted.

    Args:
        model: variables and terms.
        configuration: ZeRO level, recompute, microbatches, optimizer.
        repeat: how often the model's graph runs in a step; None: once per microbatch. 1 with the graph of the whole
            batch gives a lower bound: more microbatches never take less time.
    """

    def __init__(self, model: Model, configuration: Configuration, repeat: int | None = None) -> None:
        self.model = model
        self.configuration = configuration
        self.repeat = configuration.microbatches if repeat is None else repeat
        self.policy = model.policy(configuration)
        self._own: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._parameter_costs: dict[ParameterProfile, tuple[int, int]] = {}

    def own(self, variable: int) -> tuple[np.ndarray, np.ndarray]:
        """([values] ns, [values] bytes) of a variable by itself: compute, and the parameters stored with it."""
        key = self.model.class_of_variable(variable)
        if key not in self._own:
            is_operator = key < self.model.num_operators
            self._own[key] = self._operator_costs(key) if is_operator else self._shared_parameter_costs(key)
        return self._own[key]

    def _operator_costs(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        model = self.model
        space = model.space.operator(index)
        again = 2 if int(model.region_of[index]) in self.policy.recomputed else 1
        ns = (space.forward_ns * again + space.backward_ns) * self.repeat
        num_bytes = np.zeros_like(ns)
        for profiles, inverse in model.stored_profiles(index):
            costs = np.array([self._profile_cost(profile) for profile in profiles], dtype=np.int64)[inverse]
            ns = ns + costs[:, 0]
            num_bytes = num_bytes + costs[:, 1]
        return ns, num_bytes

    def _shared_parameter_costs(self, variable: int) -> tuple[np.ndarray, np.ndarray]:
        parameter = self.model.parameter_of(variable)
        profiles = [self.model.profile(parameter, state) for state in self.model.states(parameter)]
        costs = np.array([self._profile_cost(profile) for profile in profiles], dtype=np.int64)
        return costs[:, 0], costs[:, 1]

    def _profile_cost(self, profile: ParameterProfile) -> tuple[int, int]:
        """(ns, bytes) of a stored parameter: gradient reduction, ZeRO gathers, optimizer; and its memory."""
        if profile not in self._parameter_costs:
            elements, element_bytes, trainable, data_axes = profile
            trainable = trainable and self.configuration.training
            self._parameter_costs[profile] = self._parameter_cost(
                elements, element_bytes, trainable, data_axes if trainable else ()
            )
        return self._parameter_costs[profile]

    def _parameter_cost(
        self, elements: int, element_bytes: int, trainable: bool, data_axes: tuple[int, ...]
    ) -> tuple[int, int]:
        configuration = self.configuration
        space = self.model.space
        shards = 1
        for axis in data_axes:
            shards *= space.mesh_shape[axis]
        zero = configuration.zero if data_axes else 0
        memory = parameter_memory(
            elements,
            shards=shards,
            zero_level=zero,
            precision=configuration.precision,
            optimizer=configuration.optimizer or "sgd",
            trainable=trainable,
        )
        ns = 0
        if trainable:
            ns += optimizer_ns(
                elements,
                shards=shards,
                zero_level=zero,
                precision=configuration.precision,
                optimizer=configuration.optimizer,
                device=space.compute.device,
            )
            payload = elements * element_bytes
            for kind, count in reduction_calls(zero, configuration.microbatches):
                ns += count * space.collectives.rate_ns(kind, data_axes, payload) if data_axes else 0
        return ns, sum(memory)


def reduction_calls(zero: int, microbatches: int) -> tuple[tuple[str, int], ...]:
    """Collectives over a parameter's data axes per step: (kind, count)."""
    return {
        0: (("all_reduce", 1),),
        1: (("reduce_scatter", 1), ("all_gather", 1)),
        2: (("reduce_scatter", microbatches), ("all_gather", 1)),
        3: (("reduce_scatter", microbatches), ("all_gather", 2 * microbatches)),
    }[zero]


__all__ = ["SCALE", "Configuration", "CostedModel", "Model", "Part", "RunParts", "reduction_calls"]
