"""The graphs of a model, by microbatch count, and what rules say of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.plan import Auto, Constraint

if TYPE_CHECKING:
    from tap_planner.cluster import Mesh
    from tap_planner.folding import FoldedGraph
    from tap_planner.graph import BindOptions, Graph, ModelFile
    from tap_planner.search import NoStrategyError, Roles, SpaceRules, StrategyFilter, Target, Variant

__all__ = ["ModelGraphs", "Space"]

MAX_SPACES = 8
"""Sets of rules whose folded graphs are kept, those that were asked for last."""


class ModelGraphs:
    """The graphs of a model, by microbatch count, and what is found out about them: each once, whatever is asked.

    Args:
        model: the file.
        options: how it is bound.
        whole: bound with the global batch.
    """

    def __init__(self, model: ModelFile, options: BindOptions, whole: Graph) -> None:
        self._model = model
        self._options = options
        self._bound = {1: whole}
        self._spaces: dict[tuple[tuple[Constraint, ...], str | None, Variant | None], Space] = {}

    def __call__(self, microbatches: int) -> Graph:
        """The graph bound with the batch of one microbatch."""
        from tap_planner.graph import bind

        if microbatches not in self._bound:
            batch = self._bound[1].batch // microbatches
            self._bound[microbatches] = bind(self._model, replace(self._options, batch=batch))
        return self._bound[microbatches]

    def space(
        self, constraints: tuple[Constraint, ...] = (), target: Target | None = None, variant: Variant | None = None
    ) -> Space:
        """The graphs under rules, folded."""
        key = (constraints, None if target is None else target.name, variant)
        found = self._spaces.pop(key, None)
        self._spaces[key] = Space(self, constraints, target, variant) if found is None else found
        while len(self._spaces) > MAX_SPACES:
            self._spaces.pop(next(iter(self._spaces)))
        return self._spaces[key]

    @cached_property
    def _obstacles(self) -> tuple[str, ...]:
        """Operators at which the batch cannot be split."""
        from tap_planner.sharding import map_batch

        return map_batch(self(1)).obstacles

    def check_microbatches(self, microbatches: int | Auto) -> None:
        """Refuse a number in which the batch cannot be split.

        Raises:
            UsageError: says why.
        """
        if microbatches == "auto":
            return
        if self(1).batch % microbatches:
            raise UsageError(
                f"--microbatches {microbatches} does not divide the batch {self(1).batch}",
                hint="choose a divisor of the batch, or leave --microbatches to the search",
            )
        if microbatches > 1 and self._obstacles:
            raise UsageError(
                f"--microbatches {microbatches}: the batch cannot be split at operator {self._obstacles[0]!r}"
                + (f" and {len(self._obstacles) - 1} more" if len(self._obstacles) > 1 else ""),
                hint="use --microbatches 1",
            )


class Space:
    """Graphs of microbatches with what the rules say of them."""

    def __init__(
        self,
        graphs: Callable[[int], Graph],
        constraints: tuple[Constraint, ...],
        target: Target | None,
        variant: Variant | None,
    ) -> None:
        from tap_planner.search import MicrobatchGraphs

        self.whole = graphs(1)
        self.target = target
        self._graphs = graphs
        self._constraints = constraints
        self._variant = variant
        self._rules: dict[int, SpaceRules] = {}
        self.graphs = MicrobatchGraphs(self._fold)

    def _fold(self, microbatches: int) -> FoldedGraph:
        """The graph of one microbatch, in which operators under unlike rules do not stand for each other."""
        from tap_planner.folding import fold

        graph = self._graphs(microbatches)
        return fold(graph, self._rules_of(graph).tags)

    def strategy_filter(self, mesh: Mesh, graph: Graph) -> StrategyFilter:
        """The rules on a mesh."""
        from tap_planner.search import StrategyFilter

        return StrategyFilter(self._rules_of(graph), mesh.names, mesh.shape)

    def _rules_of(self, graph: Graph) -> SpaceRules:
        """By batch: the microbatch count is what graphs differ in."""
        from tap_planner.search import Roles, SpaceRules, merge_rules, target_rules

        if not self._constraints and self.target is None:
            return SpaceRules()
        if graph.batch not in self._rules:
            roles = Roles(graph, self.whole)
            rules = self._resolved(graph, roles)
            if self.target is not None and self._variant is not None:
                rules = merge_rules(rules, target_rules(self.target, self._variant, graph, roles))
            self._rules[graph.batch] = rules
        return self._rules[graph.batch]

    def _resolved(self, graph: Graph, roles: Roles) -> SpaceRules:
        """The user's rules; what a small microbatch lacks (one sample has no batch to split) is still asked of it."""
        from tap_planner.search import Roles, keep_demands, resolve

        constraints = self._constraints
        if graph.batch == self.whole.batch:
            return resolve(graph, constraints, roles)
        whole = resolve(self.whole, constraints, Roles(self.whole))
        return keep_demands(resolve(graph, constraints, roles, partly=True), whole)

    def keep_meshes(self, meshes: Sequence[Mesh], asked: int | Auto) -> tuple[tuple[Mesh, ...], NoStrategyError | None]:
        """The meshes on which the rules can be kept by so many microbatches (or any number), and, where some cannot,
        the first conflict."""
        from tap_planner.search import first_conflict

        if not self._constraints and self.target is None:
            return tuple(meshes), None
        microbatches = 1 if asked == "auto" else asked
        graph, hints = self.graphs.folded(microbatches).graph, self.graphs.hints(microbatches)
        kept: list[Mesh] = []
        conflict: NoStrategyError | None = None
        for mesh in meshes:
            if not self._is_wanted(mesh):
                continue
            found = self._lacks_axis(mesh) or first_conflict(graph, hints, self.strategy_filter(mesh, graph), mesh)
            conflict = conflict or found
            if found is None:
                kept.append(mesh)
        return tuple(kept), conflict

    def _lacks_axis(self, mesh: Mesh) -> NoStrategyError | None:
        """The conflict with a mesh that lacks an axis along which something must be split."""
        from tap_planner.search import NoStrategyError

        for constraint in self._constraints:
            if constraint.needs_axis and constraint.axis not in mesh.names:
                return NoStrategyError(
                    f"{constraint.shown} needs the axis {constraint.axis}, the mesh {mesh} has none",
                    hint=f"Name an axis {constraint.axis} in --mesh.",
                )
        return None

    def _is_wanted(self, mesh: Mesh) -> bool:
        from tap_planner.search.targets import AxisRole

        if self.target is None or self._variant is None or self._variant.tensor is None:
            return True
        return self._variant.tensor == (AxisRole.TENSOR in self.target.roles_of(mesh))
