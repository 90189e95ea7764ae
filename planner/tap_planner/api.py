"""The use cases: what the command line (or a program) asks of the planner.

Each function imports what it needs when it is called: planning needs no torch, applying needs no solver, comparing
plans needs neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import ApplyError, UsageError
from tap_planner.plan import (
    ApplyRequest,
    Certificate,
    CollectiveEntry,
    Constraint,
    Decisions,
    ModelInput,
    PlanDiff,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Predicted,
    Producer,
    build_document,
    check_digests,
    diff_plans,
    expand,
    idle_devices,
    read_plan,
)

if TYPE_CHECKING:
    from tap_planner.apply import ApplyResult, VerificationReport
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.folding import FoldedGraph
    from tap_planner.graph import BindOptions, Graph
    from tap_planner.program import Program
    from tap_planner.search import SearchRequest, SearchResult, StrategyRule
    from tap_planner.simulate import Price

__all__ = [
    "ApplyOutcome",
    "PreparedSearch",
    "apply_plan",
    "check_plan",
    "diff_plans",
    "lower_plan",
    "make_plan",
    "prepare_search",
]

_log = logging.getLogger("tap_planner")

NOT_IN_OBJECTIVE = ("bucket latency", "overlap", "transient memory")
"""What objective A leaves out; docs/cost-model.md says how each enters the prediction."""


# -- planning ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PreparedSearch:
    """A request with its model and cluster read: what ``search`` needs, and what the document says of the inputs."""

    graph: Graph
    """Bound with the global batch."""
    cluster: Cluster
    options: PlanOptions
    """With the bound batch filled in."""
    request: SearchRequest

    @cached_property
    def loss_output(self) -> str | None:
        """ONNX name of the output that the loss reads."""
        return _loss_output(self.graph)


def prepare_search(request: PlanRequest) -> PreparedSearch:
    """Read and bind the model, read the cluster, and lay out the space.

    Raises:
        TapError: model, cluster or options are wrong.
    """
    from tap_planner.cluster import load_cluster

    return _prepare(request.model, load_cluster(request.cluster), request.options)


def _prepare(path: Path, cluster: Cluster, options: PlanOptions) -> PreparedSearch:
    from tap_planner.cost import unknown_operators
    from tap_planner.folding import fold
    from tap_planner.graph import bind, load_model
    from tap_planner.search import SearchRequest

    model = load_model(path)
    bind_options = _bind_options(options)
    whole = bind(model, bind_options)
    for warning in whole.warnings:
        _log.warning(warning)
    unknown = unknown_operators(whole, options.precision)
    if unknown is not None:
        _log.warning(unknown.warning)
    used = sorted((rule for rule in options.custom_rules if rule.type in whole.ruled), key=lambda rule: rule.type)
    options = replace(options, custom_rules=tuple(used))

    @cache
    def folded(microbatches: int) -> FoldedGraph:
        graph = whole
        if microbatches > 1:
            graph = bind(model, replace(bind_options, batch=whole.batch // microbatches))
        return fold(graph)

    training = options.mode == "train"
    meshes = _meshes(cluster, options)
    _check_axes(options.constraints, meshes)
    if options.microbatches != "auto":
        _check_microbatches(options.microbatches, whole)
    search_request = SearchRequest(
        folded=folded,
        batch=whole.batch,
        cluster=cluster,
        meshes=meshes,
        precision=options.precision,
        optimizer=options.optimizer if training else "",
        training=training,
        zero_levels=(options.zero,) if options.zero != "auto" else ((0, 1, 2, 3) if training else (0,)),
        recomputes=_recomputes(options),
        microbatches=None if options.microbatches == "auto" else options.microbatches,
        limit_bytes=_limit_bytes(cluster, options),
        gap=Fraction(options.gap_basis_points, 10_000),
        constraints=_rules(options.constraints),
        loss_output=_loss_output(whole),
    )
    return PreparedSearch(
        graph=whole, cluster=cluster, options=replace(options, batch=whole.batch), request=search_request
    )


def _bind_options(options: PlanOptions) -> BindOptions:
    from tap_planner.graph import BindOptions, LossOptions

    return BindOptions(
        batch=options.batch,
        dims=dict(options.dims),
        shapes=dict(options.shapes),
        values=dict(options.values),
        batch_dim=options.batch_dim,
        training=options.mode == "train",
        loss=LossOptions(kind=options.loss, output=options.loss_output),  # type: ignore[arg-type]
        freeze=options.freeze,
        train=options.train,
        custom_rules=options.custom_rules,
    )


def _meshes(cluster: Cluster, options: PlanOptions) -> tuple[Mesh, ...]:
    from tap_planner.cluster import enumerate_meshes, parse_mesh

    if options.mesh is not None:
        return (parse_mesh(options.mesh, cluster),)
    return enumerate_meshes(cluster, options.max_axes)


def _recomputes(options: PlanOptions) -> tuple[str, ...]:
    if options.mode != "train":
        return ("none",)
    return ("none", "full") if options.recompute == "auto" else (options.recompute,)


def _limit_bytes(cluster: Cluster, options: PlanOptions) -> int | None:
    if options.max_memory_bytes == "none":
        return None
    return cluster.usable_memory_bytes if options.max_memory_bytes == "device" else options.max_memory_bytes


def _check_microbatches(microbatches: int, graph: Graph) -> None:
    from tap_planner.sharding import map_batch

    if graph.batch % microbatches:
        raise UsageError(
            f"--microbatches {microbatches} does not divide the batch {graph.batch}",
            hint="choose a divisor of the batch, or leave --microbatches to the search",
        )
    obstacles = map_batch(graph).obstacles
    if microbatches > 1 and obstacles:
        raise UsageError(
            f"--microbatches {microbatches}: the batch cannot be split at operator {obstacles[0]!r}"
            + (f" and {len(obstacles) - 1} more" if len(obstacles) > 1 else ""),
            hint="use --microbatches 1",
        )


def _check_axes(constraints: tuple[Constraint, ...], meshes: tuple[Mesh, ...]) -> None:
    known = sorted({axis.name for mesh in meshes for axis in mesh.axes})
    for constraint in constraints:
        if constraint.axis not in known:
            raise UsageError(
                f"--constraint '{constraint}' names axis {constraint.axis!r}, the axes are {', '.join(known)}",
                hint="name an axis of --mesh",
            )


def _rules(constraints: tuple[Constraint, ...]) -> Callable[[Mesh], tuple[StrategyRule, ...]]:
    from tap_planner.search import StrategyRule

    def for_mesh(mesh: Mesh) -> tuple[StrategyRule, ...]:
        names = [axis.name for axis in mesh.axes]
        return tuple(
            StrategyRule(
                pattern=None if constraint.kind == "batch" else constraint.pattern,
                axis=names.index(constraint.axis),
                factor=None if constraint.kind == "batch" else constraint.value,
                forbid=constraint.forbid,
            )
            for constraint in constraints
            if constraint.axis in names
        )

    return for_mesh


def _loss_output(graph: Graph) -> str | None:
    if graph.loss is None:
        return None
    source = graph.operators[-1].inputs[0]
    return next((name for name, tensor in zip(graph.output_names, graph.outputs, strict=True) if tensor == source), "")


def make_plan(request: PlanRequest) -> PlanDocument:
    """Find the best plan and prove how good it is.

    Raises:
        InfeasibleError: no plan fits the memory limit.
        TapError: model, cluster or options are wrong.
    """
    return _plan(prepare_search(request))


def _plan(prepared: PreparedSearch) -> PlanDocument:
    from tap_planner.search import search

    result = search(prepared.request)
    for note in result.notes:
        _log.info(note)
    for obstacle in result.obstacles:  # a mesh that was asked for deserves the reason why it is not used
        _log.log(logging.INFO if prepared.options.mesh is None else logging.WARNING, "%s", obstacle)
    return document_of(prepared, result)


def document_of(prepared: PreparedSearch, result: SearchResult) -> PlanDocument:
    """The document of a search result; its objective and collectives are counted from the lowered Program."""
    from tap_planner.program import lower
    from tap_planner.simulate import price_program

    graph = result.folded.graph
    program = lower(graph, result.decisions)
    price = price_program(program, prepared.cluster)
    if (price.objective_ns, price.memory_bytes) != (result.objective_ns, result.memory_bytes):
        raise AssertionError(
            f"the search priced the plan at {result.objective_ns} ns and {result.memory_bytes} bytes, "
            f"its program costs {price.objective_ns} ns and {price.memory_bytes} bytes"
        )
    collectives = _collective_entries(program, prepared.cluster, result.mesh)
    return build_document(
        producer=_producer(),
        model=ModelInput(
            name=prepared.graph.name,
            file_sha256=prepared.graph.file_sha256,
            graph_digest=prepared.graph.digest,
            dims=dict(prepared.graph.dims),
            batch=prepared.graph.batch,
        ),
        cluster=prepared.cluster.to_json(),
        options=prepared.options,
        decisions=result.decisions,
        reads={name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None},
        ranks=prepared.cluster.places(),
        collectives=collectives,
        predicted=_predicted(price, collectives),
        certificate=_certificate(result),
        idle=idle_devices(result.decisions, {name: tensor.type.shape for name, tensor in graph.tensors.items()}),
    )


def _producer() -> Producer:
    from importlib.metadata import version

    return Producer(version=version("tap-planner"), ortools=version("ortools"))


def _collective_entries(program: Program, cluster: Cluster, mesh: Mesh) -> tuple[CollectiveEntry, ...]:
    from tap_planner.cost import CollectiveModel, ComputeModel
    from tap_planner.program import collectives

    model = CollectiveModel(cluster, mesh)
    compute = ComputeModel(cluster.device, program.decisions.precision)
    entries: list[CollectiveEntry] = []
    for collective in collectives(program):
        payload = compute.tensor_bytes(collective.dtype, collective.elements)
        cost = model.cost(collective.kind, collective.axes, payload)
        entries.append(
            CollectiveEntry(
                phase=collective.phase.value,
                kind=collective.kind,
                axes=tuple(mesh.axes[axis].name for axis in collective.axes),
                algorithm=cost.algorithm,
                elements=collective.elements,
                bytes=payload,
                count=collective.count,
                time_ns=cost.ns,
            )
        )
    return tuple(entries)


def _predicted(price: Price, collectives: tuple[CollectiveEntry, ...]) -> Predicted:
    """The step without overlap, with the latency of the gradient buckets."""
    compute_ns = price.compute_ns + price.optimizer_ns
    communication_ns = sum(entry.time_ns * entry.count for entry in collectives)
    return Predicted(
        step_ns=compute_ns + communication_ns,
        compute_ns=compute_ns,
        communication_ns=communication_ns,
        hidden_ns=0,
        memory_bytes={
            "parameters": price.parameter_bytes,
            "gradients": price.gradient_bytes,
            "optimizer": price.optimizer_bytes,
            "activations": price.activation_bytes,
            "workspace": 0,
        },
    )


def _certificate(result: SearchResult) -> Certificate:
    gap = result.objective_ns - result.bound_ns
    statistics = result.statistics
    return Certificate(
        objective_ns=result.objective_ns,
        bound_ns=result.bound_ns,
        gap_basis_points=-(-gap * 10_000 // max(result.bound_ns, 1)),
        status="optimal" if gap == 0 else "feasible",
        space={
            "meshes": statistics.meshes,
            "configurations": statistics.configurations,
            "solved": statistics.solved,
            "pruned": statistics.pruned,
            "strategies": statistics.strategies,
        },
        not_in_objective=NOT_IN_OBJECTIVE,
    )


# -- plans that exist --------------------------------------------------------------------------------------------


def check_plan(old: PlanDocument, model: Path, cluster: str) -> PlanDiff:
    """Plan again with the options that a plan stores, and compare.

    Args:
        old: the plan.
        model: ONNX file.
        cluster: path or shorthand.

    Raises:
        InfeasibleError: with this model and cluster nothing fits any more.
    """
    return diff_plans(old, make_plan(PlanRequest(model=model, cluster=cluster, options=old.options)))


def _part_graph(document: PlanDocument, decisions: Decisions, model: Path) -> Graph:
    """The graph of one microbatch, after checking that the plan is about this model."""
    from tap_planner.graph import bind, load_model

    loaded = load_model(model)
    options = _bind_options(document.options)
    whole = bind(loaded, options)
    if whole.digest != document.model.graph_digest:
        raise ApplyError(
            f"{model.name} gives graph {whole.digest[:12]}, the plan was made for {document.model.graph_digest[:12]}",
            hint="give the model that the plan was made from with --model, or plan this one anew",
        )
    if loaded.sha256 != document.model.file_sha256:
        _log.warning("%s is not the file that was planned, but its graph is the same (new weights?)", model.name)
    if decisions.microbatches == 1:
        return whole
    return bind(loaded, replace(options, batch=whole.batch // decisions.microbatches))


def lower_plan(document: PlanDocument, model: Path) -> Program:
    """The Program of a plan.

    Raises:
        ApplyError: the plan is about another model.
    """
    from tap_planner.program import lower

    decisions = expand(document)
    return lower(_part_graph(document, decisions, model), decisions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyOutcome:
    """What applying a plan gave."""

    result: ApplyResult | None
    """None on processes other than the first."""

    @property
    def report(self) -> VerificationReport | None:
        """The comparison with single-process execution, where it was asked for."""
        return None if self.result is None else self.result.report

    @property
    def passed(self) -> bool:
        """Whether nothing differs from what the plan says."""
        return self.report is None or self.report.passed

    def lines(self) -> tuple[str, ...]:
        """A summary for people."""
        if self.result is None:
            return ()
        if self.report is not None:
            return tuple(self.report.lines())
        losses = tuple(f"step {step}: loss {loss:.8g}" for step, loss in enumerate(self.result.losses))
        return (*losses, f"{self.result.num_ranks} ranks, {self.result.num_collectives} collectives per rank")


def apply_plan(request: ApplyRequest) -> ApplyOutcome:
    """Run a plan: local processes, a launcher's job, or all ranks in this process.

    Raises:
        ApplyError: the plan is refused, or its execution fails.
    """
    try:
        from tap_planner.apply import ApplyJob, apply_job
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ApplyError("tap-apply needs torch", hint="pip install 'tap-planner[apply]'") from error

    document = read_plan(request.plan)
    check_digests(document)
    job = ApplyJob(
        model=request.model,
        options=_bind_options(document.options),
        decisions=expand(document),
        graph_digest=document.model.graph_digest,
        random_weights=request.init_random,
        seed=request.seed,
        inputs=request.inputs,
        steps=request.steps,
        verify=request.verify,
        custom_ops=request.custom_ops,
    )
    return ApplyOutcome(result=apply_job(job, num_processes=request.nproc, backend=request.backend))
