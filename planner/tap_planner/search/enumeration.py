"""The space of configurations: what the search enumerates, and what a certificate has to cover."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tap_planner.cluster import Mesh, part_of
from tap_planner.cost import PriceList
from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph import Graph
from tap_planner.search.capacity import least_ns, parameter_demand, tensor_demand, uncountable, unsendable
from tap_planner.search.configuration import Configuration, Recompute, Settings, zero_settings
from tap_planner.search.constraints import NO_RULES
from tap_planner.search.costing import CostedModel
from tap_planner.search.feasibility import first_conflict
from tap_planner.search.graphs import MicrobatchGraphs
from tap_planner.search.keeping import kept_model
from tap_planner.search.lean import lean_solver
from tap_planner.search.microbatches import BatchFactors, lost_strategies
from tap_planner.search.model import Model, build_model
from tap_planner.search.proof import Leaf, Proof, ProofKind, mesh_label
from tap_planner.search.request import SearchRequest, does_not_fit
from tap_planner.search.rooms import stage_rooms
from tap_planner.search.solver import Solver

__all__ = ["SearchSpace", "split_leaves", "split_ns"]

MAX_MICROBATCHES = 128
"""Largest microbatch count that the search tries by itself."""


def may_be_tried(microbatches: int, batch: int) -> bool:
    """Whether the search tries a microbatch count by itself: all divisors of the batch up to 16, then powers of two."""
    few = microbatches <= 16 or (microbatches <= MAX_MICROBATCHES and microbatches & (microbatches - 1) == 0)
    return few and batch % microbatches == 0


def counts_to_try(graphs: MicrobatchGraphs, *, training: bool) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Microbatch counts, ascending, that a search without stages looks at by itself, and why there are no more."""
    if not training:
        return (1,), ()
    graph = graphs.folded(1).graph
    if graph.is_batch_fixed:
        return (1,), (f"one microbatch only: the model has a fixed batch of {graph.batch}",)
    obstacles = graphs.batch(1).obstacles
    if obstacles:
        first, others = obstacles[0], len(obstacles) - 1
        more = f" and {others} more" if others else ""
        return (1,), (f"one microbatch only: the batch cannot be split at {first!r}{more}",)
    return tuple(k for k in range(1, MAX_MICROBATCHES + 1) if may_be_tried(k, graph.batch)), ()


def model_of(request: SearchRequest, mesh: Mesh, microbatches: int) -> Model:
    """The model of the graph of one microbatch on a mesh.

    Raises:
        UsageError: the rules leave an operator no strategy.
    """
    graphs = request.graphs

    def build() -> Model:
        return build_model(
            graphs.index(microbatches),
            request.cluster,
            mesh,
            request.precision,
            request.constraints(mesh, request.folded(microbatches).graph),
            graphs.hints(microbatches),
            request.prices,
            request.stage_shares,
        )

    return kept_model(request, mesh, microbatches, build)


def split_ns(request: SearchRequest) -> int:
    """What a pipeline takes at least, all stages together: operators split perfectly over a stage, and the bubble."""
    pipeline, count = request.pipeline, request.microbatches
    assert pipeline is not None and count is not None
    passes, of = pipeline.passes(count), request.graphs.least_of_stages
    where = (request.cluster, request.precision, pipeline.num_stages, request.stage_shares)
    own = count == request.batch  # one sample may need fewer operators
    forward_ns, backward_ns = of(count if own else 1, *where)
    return (passes.forward * forward_ns + passes.backward * backward_ns) // (1 if own else count)


def split_leaves(request: SearchRequest, bound_ns: int) -> tuple[Leaf, ...]:
    """The parts of a space of one microbatch count, of which nothing is known but what they take at least."""
    proof = Proof(kind=ProofKind.SPLIT, bound_ns=bound_ns)
    return tuple(
        Leaf(
            mesh=mesh_label(mesh),
            setting=number,
            room=None,
            microbatches=request.microbatches or 1,
            and_more=False,
            and_multiples=False,
            proof=proof,
            solver_ns=bound_ns,
        )
        for mesh in request.meshes
        for number in range(len(settings_of(request, mesh)))
    )


def settings_of(request: SearchRequest, mesh: Mesh) -> tuple[Settings, ...]:
    """What regions may choose from: everything, or one after the other where the whole plan must have the same."""
    zeros = zero_settings(request.zero_levels, len(mesh.axes), hybrid=request.hybrid_zero)
    recomputes = tuple(sorted(Recompute[name.upper()] for name in request.recomputes))
    if not request.uniform_settings:
        return (Settings(recomputes=recomputes, zeros=zeros),)
    return tuple(Settings(recomputes=(mode,), zeros=(zero,)) for zero in zeros for mode in recomputes)


class SearchSpace:
    """Meshes, settings and microbatch counts of a request, with the models that are built for them.

    Args:
        request: what to search.

    Raises:
        InfeasibleError: sizes leave no doubt that nothing fits.
        UnsupportedGraphError: sizes are beyond what can be counted.
    """

    def __init__(self, request: SearchRequest) -> None:
        self._request = request
        self._models: dict[tuple[int, int], Model] = {}
        self._allowed: dict[tuple[int, int], bool] = {}
        self._alike: dict[int, bool] = {}
        self._batches: dict[int, BatchFactors] = {}
        """By microbatch count, where the batch is."""
        self._lost: dict[tuple[int, int, int], Mapping[int, np.ndarray]] = {}
        """By mesh and microbatch counts, what the larger one lacks of what the smaller one has."""
        self._notes: list[str] = []
        self._least: dict[tuple[int, ...], int] = {}
        self.counts = self._microbatch_counts()
        """Microbatch counts, ascending."""
        self._check_sizes()

    @property
    def notes(self) -> tuple[str, ...]:
        """What there is to say of the space."""
        return tuple(self._notes)

    def _microbatch_counts(self) -> tuple[int, ...]:
        if self._request.microbatches is not None:
            return (self._request.microbatches,)
        counts, why = counts_to_try(self._request.graphs, training=self._request.training)
        self._notes.extend(why)
        return counts

    def _check_sizes(self) -> None:
        """Answer at once where sizes leave no doubt, and refuse what tables cannot count."""
        request = self._request
        graph, cluster = self.graph(1), request.cluster
        rooms = stage_rooms(cluster, request.num_stages, lambda part: part.usable_memory_bytes) or ()
        room = sum(rooms) // len(rooms)
        sizes = request.graphs.sizes
        excess = uncountable(sizes, cluster, request.precision)
        if excess is None and request.prices is PriceList.VOLUME:
            excess = unsendable(graph, cluster, request.precision)
        if request.limit_bytes is not None:
            demands = [tensor_demand(sizes, cluster, request.precision, self.counts[-1])]
            if excess is not None:  # else the search finds the least memory, which is more
                demands.append(parameter_demand(sizes, cluster, request.precision))
            least = max(demands, key=lambda demand: demand.num_bytes)
            if least.num_bytes > room:
                raise does_not_fit(request, least.num_bytes, room, f"{least.what} needs")
        if excess is not None:
            raise UnsupportedGraphError(
                f"{graph.name}: on one device the graph takes about 2^{excess.value.bit_length() - 1} {excess.what}, "
                f"expected at most 2^{excess.most.bit_length() - 1}",
                hint="bind smaller dims, or look for a wrong size in the model",
            )

    def graph(self, microbatches: int) -> Graph:
        """The graph of one microbatch."""
        return self._request.folded(microbatches).graph

    def is_like_first(self, microbatches: int) -> bool:
        """Whether the graph of one microbatch has the operators of that of the first count, which then tells of it: one
        sample may need fewer of them, such as those that expand what it has in common with others."""
        if self._request.batch > microbatches or microbatches == self.counts[0]:
            return True
        if microbatches not in self._alike:
            mine, first = self.graph(microbatches).operators, self.graph(self.counts[0]).operators
            self._alike[microbatches] = [(o.id, o.type) for o in mine] == [(o.id, o.type) for o in first]
        return self._alike[microbatches]

    @property
    def limit_bounds(self) -> bool:
        """Whether the memory limit may bound times: in a pipeline whose first stage holds more microbatches than others
        a plan may fit that would not if all held as many; the limit only guides the search there."""
        pipeline, count = self._request.pipeline, self.counts[0]
        return pipeline is None or pipeline.in_flight(count) == pipeline.least_in_flight(count)

    def is_allowed(self, mesh: int, microbatches: int) -> bool:
        """Whether the rules leave every operator a strategy: a smaller microbatch may no longer be split as they ask.

        For the first count that is sure: the meshes of a request are those on which it is so.
        """
        if microbatches == self.counts[0]:
            return True
        key = (mesh, microbatches)
        if key not in self._allowed:
            self._allowed[key] = self._keeps_rules(self._request.meshes[mesh], microbatches)
        return self._allowed[key]

    def _keeps_rules(self, mesh: Mesh, microbatches: int) -> bool:
        if self._request.constraints(mesh, self.graph(self.counts[0])).rules == NO_RULES:
            return True
        graph = self.graph(microbatches)
        rules = self._request.constraints(mesh, graph)
        return first_conflict(graph, self._request.graphs.hints(microbatches), rules, mesh) is None

    def model(self, mesh: int, microbatches: int) -> Model:
        """The model of the graph of one microbatch on a mesh (by its number)."""
        key = (mesh, microbatches)
        if key not in self._models:
            self._models[key] = model_of(self._request, self._request.meshes[mesh], microbatches)
        return self._models[key]

    def forget(self, mesh: int) -> None:
        """Free the tables of a mesh's models: what is needed again is made again."""
        for (number, _), model in self._models.items():
            if number == mesh:
                model.tables.clear()

    def settings(self, mesh: int) -> tuple[Settings, ...]:
        """What regions may choose from on a mesh (by its number)."""
        return settings_of(self._request, self._request.meshes[mesh])

    def least_ns(self, mesh: int) -> int:
        """What a mesh takes at least, with whatever number of microbatches whose graph is like that of the whole batch;
        0 bytes need to be sent."""
        request = self._request
        if request.prices is PriceList.VOLUME:
            return 0
        if request.pipeline is not None:
            return split_ns(request)
        devices = request.meshes[mesh].devices
        if devices not in self._least:
            part = part_of(request.cluster, request.meshes[mesh])
            self._least[devices] = least_ns(self.graph(1), part, request.precision)
        return self._least[devices]

    def tells_of_all_from(self, graph_of: int, microbatches: int) -> bool:
        """Whether the graph of one microbatch count tells of another and of all larger ones."""
        larger = [count for count in self.counts if count >= microbatches]
        return all(count % graph_of == 0 and self.is_like_first(count) for count in larger)

    def costed(
        self,
        mesh: int,
        settings: Settings,
        room: int | None,
        microbatches: int,
        *,
        graph_of: int | None = None,
        and_more: bool = False,
        least: bool = False,
    ) -> CostedModel:
        """The model of a configuration.

        Args:
            mesh: its number.
            settings: what regions may choose from.
            room: highest ZeRO level in runs, for which there is room; None: any, without room (a lower bound).
            microbatches: their number.
            graph_of: with the graph of so many microbatches (a divisor of theirs), and what is paid for parameters in
                each of them: a lower bound; None: with their own.
            and_more: whether it is to bound all larger counts as well (see ``tells_of_all_from``): what is paid in each
                microbatch is no less there.
            least: see ``CostedModel``; with their own graph only.
        """
        request = self._request
        configuration = Configuration(
            settings=settings if room is None else settings.up_to(room),
            microbatches=microbatches,
            optimizer=request.optimizer,
            precision=request.precision,
            training=request.training,
            optimizer_states=request.optimizer_states,
            pipeline=request.pipeline,
        )
        model = self.model(mesh, microbatches if graph_of is None else graph_of)
        if graph_of is None or graph_of == microbatches:
            return CostedModel(model, configuration, least=least)
        lost = self._lost_strategies(mesh, microbatches, graph_of)
        for count in self.counts if and_more else ():
            if count > microbatches:
                more = self._lost_strategies(mesh, count, graph_of)
                lost = {key: mask & more[key] for key, mask in lost.items() if key in more}
        return CostedModel(model, configuration, repeat=graph_of, lost=lost)

    def _lost_strategies(self, mesh: int, microbatches: int, graph_of: int) -> Mapping[int, np.ndarray]:
        """See ``lost_strategies``."""
        key = (mesh, microbatches, graph_of)
        if key not in self._lost:
            if graph_of not in self._batches:
                graphs = self._request.graphs
                self._batches[graph_of] = BatchFactors(self.graph(graph_of), graphs.batch(1).factors, self.graph(1))
            model, times = self.model(mesh, graph_of), microbatches // graph_of
            self._lost[key] = lost_strategies(model, self._batches[graph_of], times)
        return self._lost[key]

    def solver(self, costed: CostedModel) -> Solver:
        """A solver of a configuration, with all its values or (with its own graph) those of least memory only."""
        limit = self._request.limit_bytes
        if not self._request.lean or limit is None or not costed.has_own_graph:
            return Solver(costed)
        return lean_solver(costed, limit)
