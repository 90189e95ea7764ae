"""The cost model of one graph on one mesh, cut into the parts that elimination works on.

Variables are numbered: operators by their index in the graph, then parameters that several operands read, then the
recompute settings of regions, their ZeRO settings, and set variables (exact stage). The *outer* part holds the
operators outside runs, the first occurrence of every run, and the boundary of the last one. The *link* part of a run
holds its second occurrence, between the boundary of the first and its own: all later occurrences are copies of it.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property

import numpy as np

from tap_planner.cluster import Cluster, Mesh
from tap_planner.cost import PriceList, StageShare
from tap_planner.search.constraints import StrategyFilter
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.places import Places
from tap_planner.search.space import ModelSpace, ParameterState
from tap_planner.search.storage import ParameterStorage
from tap_planner.search.tensor_terms import TensorTerms
from tap_planner.search.terms import Term
from tap_planner.sharding import Placements

MAX_BOUNDARY_STATES = 400
"""Boundary states of a block up to which its matrix is worth having."""


class PartKind(Enum):
    """Pieces that a model is cut into."""

    OUTER = "outer"
    """What lies outside the links."""
    LINK = "link"
    """A later occurrence of a run that is not its last one."""
    LAST = "last"
    """The last occurrence of a run: the same terms, but its activations count as a working set."""


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
    settings: tuple[int, ...]
    """Recompute variables of the first, second and last occurrence where the next occurrence sees them, else empty."""
    shared: tuple[int, ...]
    """Variables outside that every occurrence reads."""

    @property
    def first_boundary(self) -> tuple[int, ...]:
        """Boundary variables of the first occurrence."""
        return self._boundary_of(self.first, 0)

    @property
    def second_boundary(self) -> tuple[int, ...]:
        """Boundary variables of the second occurrence."""
        return self._boundary_of(self.second, 1)

    @property
    def last_boundary(self) -> tuple[int, ...]:
        """Boundary variables of the last occurrence."""
        return self._boundary_of(self.last, 2)

    def _boundary_of(self, occurrence: range, which: int) -> tuple[int, ...]:
        return (*(occurrence.start + offset for offset in self.boundary), *self.settings[which : which + 1])


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of the model: costs of single variables and terms."""

    variables: tuple[int, ...]
    """Variables whose own cost belongs here."""
    terms: tuple[Term, ...]


@dataclass(slots=True)
class _RunTerms:
    """Terms around a run."""

    inside: list[Term] = field(default_factory=list)
    """Those of its link: inside the second occurrence, or between the first and the second."""
    crossing: list[Term] = field(default_factory=list)
    """Those between the first and the second occurrence."""
    leaving: list[Term] = field(default_factory=list)
    """Those between a later occurrence and the outside."""


class Model:
    """Variables, own costs and terms of a graph on a mesh (before the configuration is looked at).

    Args:
        space: the graph on the mesh.
        places: where its operators are, if not as its repeats say.
    """

    def __init__(self, space: ModelSpace, places: Places | None = None) -> None:
        self.space = space
        self.graph = space.graph
        self.num_operators = len(space.graph.operators)
        self.runs_in_use = space.folded.runs
        self.places = space.index.places if places is None else places
        self.run_of = self.places.run_of
        self.occurrence_of = self.places.occurrence_of
        self.class_of = self.places.class_of
        self.region_of = self.places.region_of
        self._zero_groups: dict[int, int] = {}
        self.tables: dict[Hashable, object] = {}
        """Tables of terms that several configurations have in common, by whoever made them."""
        self.points: dict[Hashable, tuple[int, int]] = {}
        """Exact prices of terms."""
        self._num_masks = 1 << len(space.mesh_shape)
        self._first_setting = self.num_operators + len(space.graph.parameters)
        self.parameters = ParameterStorage(space, self.places)
        self._tensor_terms = TensorTerms(space, self.places, self.parameters)
        self._build()

    # -- places ------------------------------------------------------------------------------------------------

    def producer_of(self, tensor: str) -> int | None:
        """Index of the operator that makes a tensor."""
        return self.space.index.producers.get(tensor)

    def part(self, kind: PartKind, number: int) -> Part:
        """The outer part, or the link of run ``number``."""
        return self.outer if kind is PartKind.OUTER else self.links[number]

    def lies_in(self, index: int, kind: PartKind, number: int) -> bool:
        """Whether an operator lies in the outer part, or in the link of run ``number``."""
        run, occurrence = int(self.run_of[index]), int(self.occurrence_of[index])
        if kind is PartKind.OUTER:
            return run < 0 or occurrence == 0
        return run == number and occurrence == 1

    def lies_outside_links(self, index: int) -> bool:
        """Whether an operator lies in the outer part."""
        return self.lies_in(index, PartKind.OUTER, 0)

    def multiplicity(self, index: int) -> int:
        """How many operators one of the parts stands for; 0 for those that others stand for."""
        run, occurrence = int(self.run_of[index]), int(self.occurrence_of[index])
        if run < 0 or occurrence == 0:
            return 1
        return self.runs[run].num_links if occurrence == 1 else 0

    # -- variables ---------------------------------------------------------------------------------------------

    def class_of_variable(self, variable: int) -> int:
        """The variable whose domain and own cost a variable shares."""
        if variable < self.num_operators:
            return int(self.class_of[variable])
        if variable < self._first_setting:
            return self.parameters.class_of(variable)
        if self.is_recompute(variable):
            region = self.region_of_setting(variable)
            return self.recompute_variable(self.places.region_class.get(region, region))
        group, mask = self.group_of_setting(variable)
        return self.zero_variable(self.places.region_class.get(group, group), mask)

    @cached_property
    def classes_outside_runs(self) -> frozenset[int]:
        """Classes of which no variable lies in a run; none where there is no run."""
        if not self.links:
            return frozenset()
        inside = {self.class_of_variable(variable) for link in self.links for variable in link.variables}
        return frozenset(map(self.class_of_variable, self.outer.variables)) - inside

    # -- settings ----------------------------------------------------------------------------------------------

    def recompute_variable(self, region: int) -> int:
        """The recompute setting of a region."""
        return self._first_setting + region

    def is_setting(self, variable: int) -> bool:
        """Whether a variable is a recompute or a ZeRO setting."""
        return self.is_recompute(variable) or self.is_zero(variable)

    def is_recompute(self, variable: int) -> bool:
        """Whether a variable is the recompute setting of a region."""
        return 0 <= variable - self._first_setting < self.places.num_regions

    def region_of_setting(self, variable: int) -> int:
        """The region of a recompute setting."""
        return variable - self._first_setting

    def zero_variable(self, group: int, mask: int) -> int:
        """The ZeRO setting of the parameters of a group that have the same data axes.

        Args:
            group: see ``zero_group``.
            mask: the data axes, as bits.
        """
        return self._first_setting + self.places.num_regions + group * self._num_masks + mask

    def is_zero(self, variable: int) -> bool:
        """Whether a variable is a ZeRO setting."""
        return self.zero_variable(0, 0) <= variable < self.set_variable(0)

    def group_of_setting(self, variable: int) -> tuple[int, int]:
        """(group, data axes as bits) of a ZeRO setting."""
        return divmod(variable - self.zero_variable(0, 0), self._num_masks)

    def zero_group(self, variable: int) -> int:
        """The group of what is stored with a variable: its region, or a group of its own for a parameter that several
        regions read.

        Args:
            variable: an operator (with the parameters that only it reads), or a parameter that several read.
        """
        if variable < self.num_operators:
            return int(self.region_of[variable])
        if variable not in self._zero_groups:
            regions = self.parameters.regions_of(variable)
            own = self.places.num_regions + variable - self.num_operators
            self._zero_groups[variable] = regions[0] if len(regions) == 1 else own
        return self._zero_groups[variable]

    def domain(self, variable: int) -> int:
        """Number of values of a variable that is no setting."""
        if variable < self.num_operators:
            return len(self.space.operator(int(self.class_of[variable])).strategies)
        return len(self.states(self.parameter_of(self.class_of_variable(variable))))

    def set_variable(self, position: int) -> int:
        """The set variable of a shared term: the numbers after those of all settings."""
        return self.zero_variable(self.places.num_regions + len(self.graph.parameters), 0) + position

    @property
    def shared_parameters(self) -> Mapping[str, int]:
        """Variables of the parameters that several operands read."""
        return self.parameters.shared

    @property
    def parameter_variables(self) -> range:
        """Numbers of the variables of parameters."""
        return range(self.num_operators, self._first_setting)

    def parameter_of(self, variable: int) -> str:
        """Name of the parameter of a parameter variable."""
        return self.parameters.name_of(variable)

    @cached_property
    def num_strategies(self) -> int:
        """Strategies of all operators."""
        classes = zip(*np.unique(self.class_of, return_counts=True), strict=True)
        return sum(int(count) * len(self.space.operator(int(index)).strategies) for index, count in classes)

    @cached_property
    def num_entries(self) -> int:
        """Entries of the tables between the producer and every reader of each tensor: how large the model is."""
        parts = (self.outer, *self.links)
        return sum(
            (1 if term.producer is None else self.domain(term.producer)) * self.domain(slot.variable)
            for part in parts
            for term in part.terms
            for slot in term.slots
        )

    def states(self, parameter: str) -> tuple[ParameterState, ...]:
        """Values of a parameter variable."""
        return self.parameters.states(parameter)

    def stored(self, index: int, position: int, strategy: int) -> ParameterState:
        """Storage of a parameter with the single reader (operator, operand) under a strategy."""
        return self.parameters.stored(index, position, strategy)

    def state_index(self, name: str, placements: Placements) -> int:
        """State of a read under a storage; one past the last where the read cannot have it."""
        return self._tensor_terms.state_index(name, placements)

    def first_region(self, variable: int) -> int:
        """The region of an operator; of a parameter, that of its first reader."""
        if variable < self.num_operators:
            return int(self.region_of[variable])
        return int(self.region_of[self.parameters.first_use(variable)[0]])

    # -- parts -------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        outer: list[Term] = []
        around = tuple(_RunTerms() for _ in self.runs_in_use)
        self.shared_terms: list[Term] = []
        """Terms of tensors from outside that the occurrences of a run share."""
        for term, shared in self._tensor_terms.all():
            if shared:
                self.shared_terms.append(term)
            else:
                self._sort_in(term, outer, around)
        self.runs = tuple(self._run_parts(number, terms) for number, terms in enumerate(around))
        self.outer = Part(self._outer_variables(), tuple(outer))
        self.links = tuple(
            Part((*self.runs[number].second, *self._parameters_at(number)), tuple(terms.inside))
            for number, terms in enumerate(around)
        )

    def _outer_variables(self) -> tuple[int, ...]:
        operators = np.flatnonzero((self.run_of < 0) | (self.occurrence_of == 0)).tolist()
        parameters = (v for v in self.shared_parameters.values() if self.parameters.home(v) is None)
        return (*operators, *parameters)

    def _parameters_at(self, number: int) -> tuple[int, ...]:
        """Parameter variables of a run's second occurrence."""
        return tuple(v for v in self.shared_parameters.values() if self.parameters.home(v) == (number, 1))

    def _place(self, variable: int) -> tuple[int, int]:
        """(run, occurrence) of a variable; run -1 outside."""
        if variable < self.num_operators:
            return int(self.run_of[variable]), int(self.occurrence_of[variable])
        return self.parameters.home(variable) or (-1, 0)

    def _sort_in(self, term: Term, outer: list[Term], around: tuple[_RunTerms, ...]) -> None:
        """Put a term where it belongs; those inside third and later occurrences are copies and belong nowhere."""
        places = {self._place(v) for v in term.variables}
        inside = {place for place in places if place[0] >= 0}
        runs = {run for run, _ in inside}
        if len(runs) != 1 or inside != places:
            for run, occurrence in inside:
                if occurrence > 0:
                    around[run].leaving.append(term)
            outer.append(term)
            return
        (run,) = runs
        occurrences = {occurrence for _, occurrence in inside}
        if occurrences == {0}:
            outer.append(term)
        elif occurrences == {1}:
            around[run].inside.append(term)
        elif occurrences == {0, 1}:
            around[run].inside.append(term)
            around[run].crossing.append(term)

    def _run_parts(self, number: int, terms: _RunTerms) -> RunParts:
        run = self.runs_in_use[number]
        last_start = run.start + (run.count - 1) * run.period
        return RunParts(
            first=range(run.start, run.start + run.period),
            second=range(run.start + run.period, run.start + 2 * run.period),
            last=range(last_start, last_start + run.period),
            num_links=run.count - 1,
            boundary=tuple(sorted(self._boundary_offsets(number, terms, run.start, last_start))),
            settings=self._boundary_settings(number, terms),
            shared=tuple(dict.fromkeys(self._shared_producers(number))),
        )

    def _boundary_offsets(self, number: int, terms: _RunTerms, first_start: int, last_start: int) -> set[int]:
        offsets: set[int] = set()
        for term in terms.crossing:
            offsets.update(v - first_start for v in term.variables if self._place(v) == (number, 0))
        for term in terms.leaving:
            places = ((v, *self._place(v)) for v in term.variables)
            offsets.update(v - last_start for v, run, occurrence in places if run == number and occurrence > 0)
        return offsets

    def _boundary_settings(self, number: int, terms: _RunTerms) -> tuple[int, ...]:
        """Recompute variables of the first, second and last occurrence, where what leaves one depends on its own."""
        regions = self.places.run_regions[number]
        crosses = any(regions[0] in term.regions for term in terms.crossing)
        leaves = any(regions[-1] in term.regions for term in terms.leaving)
        if not crosses and not leaves:
            return ()
        return tuple(self.recompute_variable(region) for region in (regions[0], regions[1], regions[-1]))

    def _shared_producers(self, number: int) -> Iterable[int]:
        """Producers of the shared terms that a run reads."""
        for position in self.shared_terms_of(number):
            producer = self.shared_terms[position].producer
            if producer is not None:
                yield producer

    def shared_terms_of(self, number: int) -> Iterable[int]:
        """Positions of the shared terms that a run reads."""
        for position, term in enumerate(self.shared_terms):
            if any(self.run_of[slot.variable] == number for slot in term.slots):
                yield position

    def is_chain(self, number: int) -> bool:
        """Whether a run is a chain that the parts describe: all boundary operators lie inside an occurrence, what
        leaves the last occurrence also goes from each occurrence to the next, and the boundary has few states."""
        run = self.runs[number]
        if not all(0 <= offset < len(run.first) for offset in run.boundary):
            return False
        return math.prod(self.domain(run.first.start + offset) for offset in run.boundary) <= MAX_BOUNDARY_STATES


def build_model(
    index: GraphIndex,
    cluster: Cluster,
    mesh: Mesh,
    precision: str,
    strategy_filter: StrategyFilter,
    hints: Mapping[str, tuple[tuple[int, ...], ...]],
    prices: PriceList = PriceList.TIME,
    shares: tuple[StageShare, ...] = (),
) -> Model:
    """Variables and terms of a folded graph on a mesh; runs that are no chains are taken apart."""
    while True:
        model = Model(ModelSpace(index, cluster, mesh, precision, strategy_filter, hints, prices, shares))
        runs = index.folded.runs
        chains = tuple(run for number, run in enumerate(runs) if model.is_chain(number))
        if len(chains) == len(runs):
            return model
        index = GraphIndex(replace(index.folded, runs=chains))
