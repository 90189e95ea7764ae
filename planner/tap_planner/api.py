"""The use cases: what the command line (or a program) asks of the planner.

Each function imports what it needs when it is called: planning needs no torch, applying needs no solver, comparing
plans needs neither.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tap_planner.alternatives import Alternative, best_on_other_meshes
from tap_planner.choosing import choose_states, with_states
from tap_planner.errors import ApplyError, InfeasibleError, UsageError
from tap_planner.logs import NOTE
from tap_planner.plan import (
    ApplyRequest,
    Certificate,
    CollectiveEntry,
    Decisions,
    IdlePlaces,
    ModelInput,
    PlanDiff,
    PlanDocument,
    PlanRequest,
    Predicted,
    Producer,
    build_document,
    check_digests,
    diff_plans,
    expand,
    gap_basis_points,
    idle_devices,
    read_plan,
)
from tap_planner.remedies import diagnose
from tap_planner.requests import PreparedSearch, bind_options, limit_bytes, prepare
from tap_planner.staying import check_old_plan, near_result
from tap_planner.verification import CertificateReport, lagrangian_bound, proof_entries, verify

if TYPE_CHECKING:
    from tap_planner.apply import ApplyResult, VerificationReport
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.graph import Graph
    from tap_planner.program import Program
    from tap_planner.search import SearchResult
    from tap_planner.simulate import Prediction, Price

__all__ = [
    "Alternative",
    "ApplyOutcome",
    "CertificateReport",
    "PreparedSearch",
    "alternatives",
    "apply_plan",
    "check_plan",
    "diff_plans",
    "lower_plan",
    "make_plan",
    "prepare_search",
    "simulate_plan",
    "verify_certificate",
]

_log = logging.getLogger("tap_planner")

NOT_IN_OBJECTIVE = ("bucket latency", "overlap", "transient memory")
"""What objective A and memory model M leave out; docs/cost-model.md says how each enters the prediction."""
NOT_IN_OBJECTIVE_OF_INFERENCE = ("overlap", "live activations", "transient memory")
"""The same in inference."""
NOT_IN_SENT_BYTES = ("bucket padding", "algorithms that send more", "transient memory")
"""What sent bytes and memory model M leave out, where these are the objective."""
NOT_IN_SENT_BYTES_OF_INFERENCE = ("algorithms that send more", "live activations", "transient memory")
"""The same in inference."""
MANY_TIMES = 2
"""A plan of the least communication whose operators take so many times as long as they must is worth a warning."""


# -- planning ----------------------------------------------------------------------------------------------------


def prepare_search(request: PlanRequest) -> PreparedSearch:
    """Read and bind the model, read the cluster, and lay out the space.

    Raises:
        TapError: model, cluster or options are wrong.
    """
    from tap_planner.cluster import load_cluster

    return prepare(request.model, load_cluster(request.cluster), request.options)


def make_plan(request: PlanRequest, old: PlanDocument | None = None) -> PlanDocument:
    """Find the best plan and prove how good it is.

    Args:
        request: what is asked.
        old: a plan to stay near to, within the regret that the options allow.

    Raises:
        InfeasibleError: no plan fits the memory limit.
        TapError: model, cluster or options are wrong.
    """
    return _plan(prepare_search(request), old)


def alternatives(request: PlanRequest, document: PlanDocument, count: int) -> tuple[Alternative, ...]:
    """The best plans on other meshes than that of a plan, the fastest first; fewer where nothing else fits.

    Args:
        request: what was asked.
        document: the answer.
        count: how many.

    Raises:
        TapError: model, cluster or options are wrong.
    """
    shape = tuple(axis.size for axis in document.mesh.axes)
    prepared = with_states(prepare_search(request), document.optimizer_states)
    return best_on_other_meshes(prepared, shape, count, _search_all)


def _plan(prepared: PreparedSearch, old: PlanDocument | None) -> PlanDocument:
    objective = prepared.options.objective
    if old is not None and objective != "time":
        raise UsageError(
            f"--stay-near allows a regret of time, the objective is {objective}",
            hint="Leave --stay-near or --objective out.",
        )
    if old is not None:
        check_old_plan(prepared, old)
    prepared, result = _search(prepared, old)
    if old is not None:
        result = near_result(prepared, result, old)
    elif objective != "communication":
        result = _fastest_predicted(prepared, result)
    for note in result.notes:
        _log.info(note)
    for obstacle in result.obstacles:  # a mesh that was asked for deserves the reason why it is not used
        _log.log(logging.INFO if prepared.options.mesh is None else logging.WARNING, "%s", obstacle)
    _note_fewer(prepared, result)
    return document_of(prepared, result)


def _fastest_predicted(prepared: PreparedSearch, result: SearchResult) -> SearchResult:
    """Of the plans within the gap the one whose prediction, with overlap and latencies, is fastest."""
    from tap_planner.cluster import part_of
    from tap_planner.program import lower
    from tap_planner.simulate import predict

    if not result.runners_up:
        return result
    candidates = (result, *result.runners_up)
    steps = [
        predict(lower(found.folded.graph, found.decisions), part_of(prepared.cluster, found.mesh)).step_ns
        for found in candidates
    ]
    chosen = candidates[steps.index(min(steps))]
    if chosen is not result:
        _log.info(
            f"of {len(candidates)} plans within the gap, {chosen.mesh} with {chosen.decisions.microbatches} "
            f"microbatches is predicted fastest: {min(steps) / 1e6:.3f} ms a step, the one of least objective "
            f"{steps[0] / 1e6:.3f} ms"
        )
    statistics = replace(result.statistics, strategies=chosen.statistics.strategies)
    return replace(
        chosen, bound_ns=result.bound_ns, leaves=result.leaves, statistics=statistics, smallest=result.smallest
    )


def _search_all(prepared: PreparedSearch) -> SearchResult:
    """Search all parts of the space."""
    from tap_planner.search import search_by_room, search_parts, search_smallest

    def limit(cluster: Cluster) -> int | None:
        return limit_bytes(cluster, prepared.options)

    if prepared.options.objective == "memory":
        return search_smallest(prepared.requests, limit)
    return search_parts(prepared.requests, lambda request: search_by_room(request, limit))


def _search(prepared: PreparedSearch, old: PlanDocument | None) -> tuple[PreparedSearch, SearchResult]:
    """The space that the plan is of (moments may be left open), and the best plan."""
    try:
        return choose_states(prepared, _search_all, None if old is None else old.optimizer_states)
    except InfeasibleError as failure:
        raise diagnose(prepared, failure) from failure


def _note_fewer(prepared: PreparedSearch, result: SearchResult) -> None:
    """Say so if fewer devices are proven faster, unless the user has chosen: idle devices, a mesh, rules, a target; or
    another objective than time."""
    from tap_planner.search import fewer_devices

    options, devices = prepared.options, prepared.cluster.num_devices
    chosen = options.mesh is not None or options.constraints or options.target is not None
    fixed = chosen or options.objective != "time"
    if options.allow_idle or fixed or devices == 1:
        return
    fewer = fewer_devices(prepared.request, result)
    if fewer is not None:
        _log.log(
            NOTE,
            f"{fewer.num_devices} of the {devices} devices are proven faster: {fewer.objective_ns / 1e6:.3f} ms a "
            f"step; all of them take at least {result.bound_ns / 1e6:.3f} ms; --allow-idle uses fewer",
        )


def document_of(prepared: PreparedSearch, result: SearchResult) -> PlanDocument:
    """The document of a search result; its objective and collectives are counted from the lowered Program."""
    from tap_planner.cluster import idle_boxes, mesh_places, part_of
    from tap_planner.program import lower
    from tap_planner.simulate import price_program, sent_by_program

    graph = result.folded.graph
    program = lower(graph, result.decisions)
    used = part_of(prepared.cluster, result.mesh)
    price = price_program(program, used)
    sent = prepared.options.objective == "communication"
    objective = sent_by_program(program, used) if sent else price.objective_ns
    if (objective, price.memory_bytes) != (result.objective_ns, result.memory_bytes):
        unit = "bytes sent" if sent else "ns"
        raise AssertionError(
            f"the search priced the plan at {result.objective_ns} {unit} and {result.memory_bytes} bytes, "
            f"its program costs {objective} {unit} and {price.memory_bytes} bytes"
        )
    if sent:
        _warn_of_repeated_work(prepared, price, used, objective)
    collectives = _collective_entries(program, used, result.mesh)
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
        ranks=mesh_places(prepared.cluster, result.mesh),
        left_out=tuple(IdlePlaces(first=f, last=last) for f, last in idle_boxes(prepared.cluster, result.mesh)),
        collectives=collectives,
        predicted=_predicted(program, price, used),
        certificate=_certificate(result, price, prepared.options.objective),
        idle=idle_devices(result.decisions, {name: tensor.type.shape for name, tensor in graph.tensors.items()}),
    )


def _warn_of_repeated_work(prepared: PreparedSearch, price: Price, used: Cluster, sent_bytes: int) -> None:
    """Devices that all repeat the work have nothing to send: say so where that is the plan of least communication."""
    from tap_planner.search import least_ns

    least = least_ns(prepared.graph, used, prepared.options.precision)
    if price.compute_ns >= MANY_TIMES * max(least, 1):
        _log.warning(
            f"a device sends {sent_bytes} bytes, but a step takes {price.objective_ns / 1e6:.3f} ms (objective A): its "
            f"operators take {price.compute_ns / least:.1f} times as long as split over all devices, as devices repeat "
            "work instead of sharing results; --objective time finds the fastest plan"
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


def _predicted(program: Program, price: Price, cluster: Cluster) -> Predicted:
    """The step with the latency of every collective, less what is hidden behind compute."""
    from tap_planner.simulate import predict

    prediction = predict(program, cluster)
    return Predicted(
        step_ns=prediction.step_ns,
        compute_ns=prediction.compute_ns,
        communication_ns=prediction.communication_ns,
        hidden_ns=prediction.hidden_ns,
        memory_bytes=_memory_by_kind(price, program.decisions.mode),
        tokens=_tokens(program),
    )


def _memory_by_kind(price: Price, mode: str) -> dict[str, int]:
    if mode == "infer":
        return {
            "parameters": price.parameter_bytes,
            "caches": price.cache_bytes,
            "inputs": price.input_bytes,
            "outputs": price.output_bytes,
        }
    return {
        "parameters": price.parameter_bytes,
        "gradients": price.gradient_bytes,
        "optimizer": price.optimizer_bytes,
        "activations": price.activation_bytes,
        **({"unsharded": price.unsharded_bytes} if price.unsharded_bytes else {}),
        "workspace": 0,
    }


def _tokens(program: Program) -> int | None:
    """New tokens of a step over the whole batch, where a decoder's caches say how many each sequence gets."""
    new = program.graph.new_positions
    return None if new is None else new * program.graph.batch * program.decisions.microbatches


def _certificate(result: SearchResult, price: Price, objective: str) -> Certificate:
    proof = proof_entries(result.leaves)
    lagrangian = lagrangian_bound(proof, result.objective_ns)
    bound = max(result.bound_ns, lagrangian)
    gap = gap_basis_points(result.objective_ns, bound)
    training, statistics = result.decisions.mode == "train", result.statistics
    left_out = NOT_IN_OBJECTIVE if training else NOT_IN_OBJECTIVE_OF_INFERENCE
    proven: dict[str, Any] = {"bound_ns": bound, "lagrangian_bound_ns": lagrangian, "gap_basis_points": gap}
    optimal = result.objective_ns == bound
    if objective == "communication":
        left_out = NOT_IN_SENT_BYTES if training else NOT_IN_SENT_BYTES_OF_INFERENCE
        proven = {"objective_bytes": result.objective_ns, "bound_bytes": bound, "lagrangian_bound_bytes": lagrangian}
        proven["gap_basis_points"] = gap
    elif objective == "memory":
        assert result.smallest is not None
        least = min(result.smallest.bound_bytes, result.memory_bytes)
        optimal = optimal and least == result.memory_bytes
        proven |= {"objective_bytes": result.memory_bytes, "bound_bytes": least, "time_gap_basis_points": gap}
        proven["gap_basis_points"] = gap_basis_points(result.memory_bytes, least)
        proven["memory_proof"] = proof_entries(result.smallest.leaves)
    return Certificate(
        objective_ns=price.objective_ns,
        proof=proof,
        status="optimal" if optimal else "feasible",
        **proven,
        space={
            "meshes": statistics.meshes,
            "configurations": statistics.configurations,
            "solved": statistics.solved,
            "pruned": statistics.pruned,
            "strategies": statistics.strategies,
        },
        not_in_objective=left_out,
        near=result.near,
        states=result.states,
    )


# -- plans that exist --------------------------------------------------------------------------------------------


def check_plan(old: PlanDocument, model: Path, cluster: str) -> PlanDiff:
    """Plan again with the options that a plan stores, and compare; one that stays near to an old plan has itself for
    the old one.

    Args:
        old: the plan.
        model: ONNX file.
        cluster: path or shorthand.

    Raises:
        InfeasibleError: with this model and cluster nothing fits any more.
    """
    near = None if old.options.max_regret_basis_points is None else old
    return diff_plans(old, make_plan(PlanRequest(model=model, cluster=cluster, options=old.options), near))


def verify_certificate(
    document: PlanDocument, model: Path, *, replay: bool = False, old: PlanDocument | None = None
) -> CertificateReport:
    """Check what a plan's certificate claims: its price, that the proof covers the space, and every bound of it.

    Args:
        document: the plan; it holds cluster and options.
        model: ONNX file.
        replay: whether to prove the solver's bounds again, too.
        old: the plan that it stays near to, to count again what it changes.

    Raises:
        ApplyError: the plan is about another model.
    """
    return verify(document, model, replay=replay, old=old)


def _part_graph(document: PlanDocument, decisions: Decisions, model: Path) -> Graph:
    """The graph of one microbatch, after checking that the plan is about this model."""
    from tap_planner.graph import bind, load_model

    loaded = load_model(model)
    options = bind_options(document.options)
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


def simulate_plan(document: PlanDocument, model: Path) -> Prediction:
    """The predicted step of a plan, from its Program and the devices that it uses.

    Raises:
        ApplyError: the plan is about another model.
    """
    from tap_planner.cluster import Cluster, restricted
    from tap_planner.simulate import predict

    used = restricted(Cluster.from_json(document.cluster), _devices(document))
    return predict(lower_plan(document, model), used)


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
        options=bind_options(document.options),
        decisions=expand(document),
        graph_digest=document.model.graph_digest,
        random_weights=request.init_random,
        seed=request.seed,
        inputs=request.inputs,
        steps=request.steps,
        verify=request.verify,
        custom_ops=request.custom_ops,
        devices=_devices(document) if document.mesh.idle_devices else (),
        num_devices=len(document.mesh.ranks) + document.mesh.num_left_out,
    )
    return ApplyOutcome(result=apply_job(job, num_processes=request.nproc, backend=request.backend))


def _devices(document: PlanDocument) -> tuple[int, ...]:
    """Number of each rank's device among those of the cluster."""
    from tap_planner.cluster import Cluster

    numbers = {place: number for number, place in enumerate(Cluster.from_json(document.cluster).places())}
    missing = next((place for place in document.mesh.ranks if place not in numbers), None)
    if missing is not None:
        raise ApplyError(f"mesh.ranks: the cluster of the plan has no device {list(missing)}")
    return tuple(numbers[place] for place in document.mesh.ranks)
