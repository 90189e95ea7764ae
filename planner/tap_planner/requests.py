"""Options of the user -> what the search is asked: model and cluster read, the space laid out, rules worked out."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.moments import check_moments, rounds_moments
from tap_planner.plan import RECOMPUTES, Auto, Constraint, PlanOptions
from tap_planner.stages import axes_beside, check_pipeline, in_stages, numbers_of_stages
from tap_planner.yaml_entries import near_miss

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.cost import PriceList
    from tap_planner.folding import FoldedGraph
    from tap_planner.graph import BindOptions, Graph, ModelFile
    from tap_planner.search import NoStrategyError, Roles, SearchRequest, SpaceRules, StrategyFilter, Target, Variant

__all__ = [
    "ModelGraphs",
    "PreparedSearch",
    "bind_options",
    "lay_out",
    "limit_bytes",
    "prepare",
    "read_model",
    "times_of",
    "with_options",
]

MAX_SPACES = 8
"""Sets of rules whose folded graphs are kept, those that were asked for last."""
_log = logging.getLogger("tap_planner")


@dataclass(frozen=True, kw_only=True)
class PreparedSearch:
    """A request with its model and cluster read: what ``search`` needs, and what the document says of the inputs."""

    graph: Graph
    """Bound with the global batch."""
    cluster: Cluster
    options: PlanOptions
    """With the bound batch filled in."""
    requests: tuple[SearchRequest, ...]
    """The parts of the space: one, but for some targets."""
    graphs: ModelGraphs
    """Microbatch count -> the graph bound with the batch of one microbatch."""

    @property
    def request(self) -> SearchRequest:
        """The space, or its first part."""
        return self.requests[0]

    @cached_property
    def loss_output(self) -> str | None:
        """ONNX name of the output that the loss reads."""
        return _loss_output(self.graph)


def prepare(path: Path, cluster: Cluster, options: PlanOptions) -> PreparedSearch:
    """Read and bind the model, and lay out the space.

    Raises:
        TapError: model or options are wrong.
    """
    _check_objective(options)
    check_moments(options)
    read = read_model(path, cluster, options)
    read.graphs.check_microbatches(read.options.microbatches)
    return with_options(read, read.options)


def read_model(path: Path, cluster: Cluster, options: PlanOptions) -> PreparedSearch:
    """Read and bind the model; which spaces there are is left open: ``lay_out`` makes one.

    Raises:
        TapError: the model, or an option that says how it is bound, is wrong.
    """
    from tap_planner.cost import unknown_operators
    from tap_planner.graph import bind, load_model

    model = load_model(path)
    whole = bind(model, bind_options(options))
    for warning in whole.warnings:
        _log.warning(warning)
    unknown = unknown_operators(whole, options.precision)
    if unknown is not None:
        _log.warning(unknown.warning)
    used = sorted((rule for rule in options.custom_rules if rule.type in whole.ruled), key=lambda rule: rule.type)
    options = replace(options, custom_rules=tuple(used), batch=whole.batch)
    graphs = ModelGraphs(model, bind_options(options), whole)
    return PreparedSearch(graph=whole, cluster=cluster, options=options, requests=(), graphs=graphs)


def lay_out(read: PreparedSearch, options: PlanOptions) -> PreparedSearch:
    """The space of options, checked as if the model were read with them.

    Args:
        read: the model, bound as these options ask.
        options: with the bound batch filled in.

    Raises:
        TapError: the options are wrong.
    """
    _check_objective(options)
    check_moments(options)
    read.graphs.check_microbatches(options.microbatches)
    return with_options(read, options)


def with_options(prepared: PreparedSearch, options: PlanOptions, cluster: Cluster | None = None) -> PreparedSearch:
    """The same model under other options that do not concern how it is bound, and on another cluster if one is given.

    Raises:
        UsageError: the options cannot be kept.
    """
    cluster = cluster or prepared.cluster
    requests = _requests(prepared.graphs, cluster, options)
    return replace(prepared, cluster=cluster, options=options, requests=requests)


def _requests(graphs: ModelGraphs, cluster: Cluster, options: PlanOptions) -> tuple[SearchRequest, ...]:
    from tap_planner.search import TARGETS

    target = None if options.target is None else TARGETS[options.target]
    meshes = _meshes(cluster, options, target, graphs(1))
    check_pipeline(options, cluster, meshes)
    _check_axes(options.constraints, meshes)
    variants = (None,) if target is None else target.variants()
    found: list[SearchRequest] = []
    conflicts: list[NoStrategyError] = []
    for variant in variants:
        space = graphs.space(options.constraints, target, variant)
        levels = _zero_levels(options, target, variant)
        for alike in _by_stages(meshes):
            kept, conflict = space.keep_meshes(alike, options.microbatches)
            if kept and levels:
                found.extend(in_stages(_request(space, cluster, options, kept, levels), options))
            elif conflict is not None:
                conflicts.append(conflict)
    if found:
        return tuple(found)
    if conflicts:
        raise _on_fewer(graphs.space(options.constraints, target, variants[0]), cluster, options, conflicts[0])
    if options.stages != 1:
        raise UsageError(
            f"--stages {options.stages}: a batch of {graphs(1).batch} cannot be cut in microbatches for any pipeline",
            hint="Choose --batch, --microbatches or another --schedule.",
        )
    raise UsageError(
        f"--target {options.target} with --zero {options.zero} has no mesh that keeps the rules",
        hint="Leave --zero to the search, or choose another --mesh.",
    )


def _request(
    space: _Space, cluster: Cluster, options: PlanOptions, meshes: tuple[Mesh, ...], zero_levels: tuple[int, ...]
) -> SearchRequest:
    from tap_planner.search import SearchRequest

    training = options.mode == "train"
    return SearchRequest(
        graphs=space.graphs,
        batch=space.whole.batch,
        cluster=cluster,
        meshes=meshes,
        precision=options.precision,
        optimizer=options.optimizer if training else "",
        training=training,
        zero_levels=zero_levels,
        recomputes=_recomputes(options, space.target),
        microbatches=None if options.microbatches == "auto" else options.microbatches,
        limit_bytes=limit_bytes(cluster, options),
        gap=Fraction(options.gap_basis_points, 10_000),
        constraints=space.strategy_filter,
        loss_output=_loss_output(space.whole),
        optimizer_states="bf16" if options.optimizer_states == "bf16" else "fp32",
        uniform_settings=space.target is not None and space.target.uniform_settings,
        hybrid_zero=space.target is None or space.target.hybrid_zero,
        prices=_price_list(options),
    )


def _price_list(options: PlanOptions) -> PriceList:
    """What the search adds up."""
    from tap_planner.cost import PriceList

    return PriceList.VOLUME if options.objective == "communication" else times_of(options)


def times_of(options: PlanOptions) -> PriceList:
    """By what times are priced, whatever the objective."""
    from tap_planner.cost import PriceList

    return PriceList.FLAT if options.cost == "volume" else PriceList.TIME


def bind_options(options: PlanOptions) -> BindOptions:
    """How the model is bound."""
    from tap_planner.graph import BindOptions, LossOptions

    return BindOptions(
        batch=options.batch,
        dims=dict(options.dims),
        shapes=dict(options.shapes),
        values=dict(options.values),
        batch_dim=options.batch_dim,
        training=options.mode == "train",
        ends=options.mode == "infer",
        loss=LossOptions(kind=options.loss, output=options.loss_output),  # type: ignore[arg-type]
        freeze=options.freeze,
        train=options.train,
        custom_rules=options.custom_rules,
    )


def limit_bytes(cluster: Cluster, options: PlanOptions) -> int | None:
    """The memory limit per device; None: there is none."""
    if options.max_memory_bytes == "none":
        return None
    return cluster.usable_memory_bytes if options.max_memory_bytes == "device" else options.max_memory_bytes


# -- rules -------------------------------------------------------------------------------------------------------


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
        self._spaces: dict[tuple[tuple[Constraint, ...], str | None, Variant | None], _Space] = {}

    def __call__(self, microbatches: int) -> Graph:
        """The graph bound with the batch of one microbatch."""
        from tap_planner.graph import bind

        if microbatches not in self._bound:
            batch = self._bound[1].batch // microbatches
            self._bound[microbatches] = bind(self._model, replace(self._options, batch=batch))
        return self._bound[microbatches]

    def space(
        self, constraints: tuple[Constraint, ...] = (), target: Target | None = None, variant: Variant | None = None
    ) -> _Space:
        """The graphs under rules, folded."""
        key = (constraints, None if target is None else target.name, variant)
        found = self._spaces.pop(key, None)
        self._spaces[key] = _Space(self, constraints, target, variant) if found is None else found
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


class _Space:
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


def _check_axes(constraints: tuple[Constraint, ...], meshes: tuple[Mesh, ...]) -> None:
    known = sorted({axis.name for mesh in meshes for axis in mesh.axes})
    for constraint in constraints:
        if constraint.kind != "replicate" and constraint.axis not in known:
            raise UsageError(
                f"{constraint.shown} names axis {constraint.axis!r}, the axes are {', '.join(known)}"
                f"{near_miss(constraint.axis, known)}",
                hint="name an axis of --mesh",
            )


# -- the space ---------------------------------------------------------------------------------------------------


def _by_stages(meshes: tuple[Mesh, ...]) -> tuple[tuple[Mesh, ...], ...]:
    """Meshes in groups of one number of stages."""
    groups: dict[int, list[Mesh]] = {}
    for mesh in meshes:
        groups.setdefault(mesh.num_stages, []).append(mesh)
    return tuple(map(tuple, groups.values()))


def _meshes(cluster: Cluster, options: PlanOptions, target: Target | None, whole: Graph) -> tuple[Mesh, ...]:
    from tap_planner.cluster import enumerate_meshes, parse_mesh
    from tap_planner.search import useful_meshes

    if options.mesh is not None:
        mesh = parse_mesh(options.mesh, cluster, allow_idle=options.allow_idle)
        if target is not None:
            target.roles_of(mesh)
        return (mesh,)
    if options.stages != 1:
        numbers = numbers_of_stages(options, cluster.num_devices, whole)
        most = {stages: options.max_axes if len(numbers) == 1 else axes_beside(stages, options) for stages in numbers}
        return tuple(mesh for stages in numbers for mesh in enumerate_meshes(cluster, most[stages], num_stages=stages))
    meshes = enumerate_meshes(cluster, options.max_axes, allow_idle=options.allow_idle)
    if target is not None:
        return target.name_meshes(meshes)
    keep_all = options.constraints or options.cost == "volume"  # rules name axes; volumes know of no links
    return meshes if keep_all else useful_meshes(cluster, meshes)


def _on_fewer(space: _Space, cluster: Cluster, options: PlanOptions, conflict: NoStrategyError) -> NoStrategyError:
    """The conflict; where rules can be kept on fewer devices, that there is no plan on all of them."""
    from tap_planner.search import NotOnAllError

    if options.allow_idle or options.mesh is not None:
        return conflict
    everywhere = _meshes(cluster, replace(options, allow_idle=True), space.target, space.whole)
    kept, _ = space.keep_meshes(everywhere, options.microbatches)
    if not kept:
        return conflict
    return NotOnAllError(
        f"no plan uses all {cluster.num_devices} devices: {conflict.message}",
        hint=f"{conflict.hint.rstrip('.')}; or add --allow-idle: the mesh {kept[0]} keeps the rules.",
    )


def _zero_levels(options: PlanOptions, target: Target | None, variant: Variant | None) -> tuple[int, ...]:
    """ZeRO levels of a part of the space; none where the target has not the one that was asked for."""
    if options.mode != "train":
        return (0,) if options.zero in ("auto", 0) else (int(options.zero),)
    asked = (0, 1, 2, 3) if options.zero == "auto" else (options.zero,)
    if target is None or variant is None:
        return asked
    known = {*target.zero_levels, *target.zero_levels_with_tensor}
    also = ""
    if options.optimizer_states == "bf16":
        known &= set(target.zero_levels_with_bf16_states)
        also = " with --optimizer-states bf16"
    if not known:
        raise UsageError(
            f"--optimizer-states bf16: --target {target.name} does not keep float32 master values beside such moments",
            hint="Leave --optimizer-states or --target out.",
        )
    if not known & set(asked):
        raise UsageError(
            f"--zero {options.zero}{also}: --target {target.name} has ZeRO {', '.join(map(str, sorted(known)))}{also}",
            hint="Leave --zero to the search.",
        )
    return tuple(level for level in asked if level in variant.zero_levels and level in known)


def _recomputes(options: PlanOptions, target: Target | None) -> tuple[str, ...]:
    if options.mode != "train":
        return ("none",)
    asked = RECOMPUTES if options.recompute == "auto" else (options.recompute,)
    if target is None:
        return asked
    kept = tuple(setting for setting in asked if setting in target.recomputes)
    if not kept:
        raise UsageError(
            f"--recompute {options.recompute}: --target {target.name} has {', '.join(target.recomputes)}",
            hint="Leave --recompute to the search.",
        )
    return kept


def _check_objective(options: PlanOptions) -> None:
    """What is left to be decided by time cannot be where another objective is asked for."""
    if options.objective == "communication" and options.cost != "topology":
        raise UsageError(
            f"--cost {options.cost} says what communication takes, the objective is how much is sent",
            hint="Leave --cost or --objective out.",
        )
    if options.objective != "time" and options.optimizer_states == "auto" and rounds_moments(options):
        raise UsageError(
            f"--optimizer-states auto weighs the time of a step, the objective is {options.objective}",
            hint="Choose --optimizer-states fp32 or bf16.",
        )


def _loss_output(graph: Graph) -> str | None:
    if graph.loss is None:
        return None
    source = graph.operators[-1].inputs[0]
    return next((name for name, tensor in zip(graph.output_names, graph.outputs, strict=True) if tensor == source), "")
