"""Options of the user -> what the search is asked: model and cluster read, the space laid out, rules worked out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import UsageError
from tap_planner.methods import check_method
from tap_planner.model_graphs import ModelGraphs, Space
from tap_planner.moments import check_moments, rounds_moments
from tap_planner.plan import AS_LIBRARY, RECOMPUTES, Constraint, Overlap, PlanOptions
from tap_planner.stages import axes_beside, check_pipeline, in_stages, numbers_of_stages
from tap_planner.yaml_entries import near_miss

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.cost import PriceList
    from tap_planner.graph import BindOptions, Graph
    from tap_planner.search import NoStrategyError, SearchRequest, Target, Variant

__all__ = [
    "PreparedSearch",
    "bind_options",
    "lay_out",
    "limit_bytes",
    "prepare",
    "read_model",
    "times_of",
    "with_options",
]

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
    check_method(options)
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

    _check_overlap(options, cluster)
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
    check_method(options)
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
                request = _request(space, cluster, options, kept, levels)
                found.extend(in_stages(request, options, lambda part: limit_bytes(part, options)))
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
    space: Space, cluster: Cluster, options: PlanOptions, meshes: tuple[Mesh, ...], zero_levels: tuple[int, ...]
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


# -- the space ---------------------------------------------------------------------------------------------------


def _check_axes(constraints: tuple[Constraint, ...], meshes: tuple[Mesh, ...]) -> None:
    known = sorted({axis.name for mesh in meshes for axis in mesh.axes})
    for constraint in constraints:
        if constraint.kind != "replicate" and constraint.axis not in known:
            raise UsageError(
                f"{constraint.shown} names axis {constraint.axis!r}, the axes are {', '.join(known)}"
                f"{near_miss(constraint.axis, known)}",
                hint="name an axis of --mesh",
            )


def _by_stages(meshes: tuple[Mesh, ...]) -> tuple[tuple[Mesh, ...], ...]:
    """Meshes in groups of one number of stages."""
    groups: dict[int, list[Mesh]] = {}
    for mesh in meshes:
        groups.setdefault(mesh.num_stages, []).append(mesh)
    return tuple(map(tuple, groups.values()))


def _meshes(cluster: Cluster, options: PlanOptions, target: Target | None, whole: Graph) -> tuple[Mesh, ...]:
    from tap_planner.cluster import enumerate_meshes, laid_otherwise, parse_mesh
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
    if options.cost != "volume" and options.objective != "communication":  # the same is sent however axes lie
        meshes = (*meshes, *laid_otherwise(cluster, meshes))
    keep_all = options.constraints or options.cost == "volume"  # rules name axes; volumes know of no links
    return meshes if keep_all else useful_meshes(cluster, meshes)


def _on_fewer(space: Space, cluster: Cluster, options: PlanOptions, conflict: NoStrategyError) -> NoStrategyError:
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


def _check_overlap(options: PlanOptions, cluster: Cluster) -> None:
    """What is hidden must be something that the library and the method can hide."""
    given = f"--overlap {options.overlap}"
    if options.overlap not in (AS_LIBRARY, *(overlap.value for overlap in Overlap)):
        known = ", ".join(overlap.value for overlap in Overlap)
        raise UsageError(f"{given}: expected {AS_LIBRARY}, {known}", hint="Leave --overlap out.")
    if cluster.library == "gloo" and options.overlap not in (AS_LIBRARY, Overlap.NONE.value):
        raise UsageError(
            f"{given}: the cluster's library is gloo, whose collectives need the cores that compute",
            hint="Leave --overlap out, or name a cluster with nccl or rccl.",
        )
    if options.method != "sharding" and options.overlap != AS_LIBRARY:
        raise UsageError(
            f"{given} with --method {options.method}: whole operators send nothing but transfers",
            hint="Leave --overlap out, or choose --method sharding.",
        )


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
