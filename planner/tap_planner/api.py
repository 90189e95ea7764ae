"""The use cases: what the command line (or a program) asks of the planner.

Each function imports what it needs when it is called: planning needs no torch, applying needs no solver, comparing
plans needs neither.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.alternatives import Alternative, best_on_other_meshes
from tap_planner.calibrating import CalibrateRequest, Progress, calibrate
from tap_planner.choosing import choose_states, with_states
from tap_planner.documents import LoweredResult, document_of, lower_result
from tap_planner.errors import ApplyError, InfeasibleError, LimitReachedError, TapError, UsageError
from tap_planner.logs import NOTE
from tap_planner.methods import check_method
from tap_planner.moments import check_moments
from tap_planner.placement_documents import placement_document
from tap_planner.placement_proofs import PlacementReport, verify_placement
from tap_planner.placements import find_placement
from tap_planner.plan import (
    ApplyRequest,
    Decisions,
    Overlap,
    PlanDiff,
    PlanDocument,
    PlanRequest,
    check_digests,
    diff_plans,
    expand,
    overlap_of,
    read_plan,
)
from tap_planner.remedies import diagnose
from tap_planner.requests import PreparedSearch, bind_options, lay_out, limit_bytes, prepare, read_model
from tap_planner.staging import is_staged, search_stages
from tap_planner.staying import check_old_plan, near_result
from tap_planner.verification import CertificateReport, check_model, verify

if TYPE_CHECKING:
    from tap_planner.apply import ApplyResult, VerificationReport
    from tap_planner.cluster import Calibration, Cluster
    from tap_planner.graph import Graph
    from tap_planner.program import Program
    from tap_planner.search import SearchRequest, SearchResult
    from tap_planner.simulate import Prediction, Timeline
    from tap_planner.sweep import Sweep, SweepRequest

__all__ = [
    "Alternative",
    "ApplyOutcome",
    "CalibrateRequest",
    "CertificateReport",
    "PreparedSearch",
    "Progress",
    "alternatives",
    "apply_plan",
    "calibrate_cluster",
    "check_plan",
    "diff_plans",
    "lower_plan",
    "make_plan",
    "prepare_search",
    "prepare_sweep",
    "simulate_plan",
    "simulate_program",
    "verify_certificate",
]

_log = logging.getLogger("tap_planner")
_MUCH_FASTER = 0.02
"""A prediction that is shorter by this part is worth a note."""
_ENOUGH_STEPS = 3
"""Of fewer no time is told: the first one is slower than the others."""

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
    if request.options.method == "sharding":
        return _plan(prepare_search(request), old)
    from tap_planner.cluster import load_cluster

    check_method(request.options)
    check_moments(request.options)
    if old is not None:
        raise UsageError(
            f"an old plan to stay near to, with --method {request.options.method}", hint="Leave one of them out."
        )
    read = read_model(request.model, load_cluster(request.cluster), request.options)
    if request.options.method == "device-placement":
        return placement_document(find_placement(read))
    return _faster_of_both(read)


def _faster_of_both(read: PreparedSearch) -> PlanDocument:
    """The plan that is predicted faster: of split operators, or of whole ones on devices."""
    documents: list[PlanDocument] = []
    failures: list[TapError] = []
    for make in (lambda: _plan(lay_out(read, read.options), None), lambda: placement_document(find_placement(read))):
        try:
            documents.append(make())
        except (InfeasibleError, LimitReachedError) as failure:
            failures.append(failure)
    if not documents:
        raise failures[0]
    best = min(documents, key=lambda document: document.predicted.step_ns)
    times = {
        "device placement" if document.placement else "sharding": f"{document.predicted.step_ns / 1e6:.3f} ms a step"
        for document in documents
    }
    outcome = ", ".join(f"{name} {text}" for name, text in times.items())
    why = f"; the other: {failures[0].message}" if failures else ""
    _log.log(NOTE, f"{'device placement' if best.placement else 'sharding'} is taken: {outcome}{why}")
    return best


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


def prepare_sweep(request: SweepRequest) -> Sweep:
    """Read the model and list the combinations of a grid; ``Sweep.run`` plans them, each as ``make_plan`` would.

    Raises:
        TapError: model, cluster or options are wrong.
    """
    from tap_planner.cluster import load_cluster
    from tap_planner.sweep import prepare_sweep as prepare

    if request.options.method != "sharding":
        raise UsageError(
            f"--method {request.options.method} with a grid, which is about split operators",
            hint="Leave one of them out.",
        )
    return prepare(request, load_cluster(request.cluster), _plan_of_sweep)


def _plan(prepared: PreparedSearch, old: PlanDocument | None) -> PlanDocument:
    objective = prepared.options.objective
    if old is not None and objective != "time":
        raise UsageError(
            f"--stay-near allows a regret of time, the objective is {objective}",
            hint="Leave --stay-near or --objective out.",
        )
    if old is not None:
        check_old_plan(prepared, old)
    try:
        prepared, lowered = _best(prepared, old)
    except InfeasibleError as failure:
        raise diagnose(prepared, failure) from failure
    result = lowered.result
    for note in result.notes:
        _log.info(note)
    for obstacle in result.obstacles:  # a mesh that was asked for deserves the reason why it is not used
        _log.log(logging.INFO if prepared.options.mesh is None else logging.WARNING, "%s", obstacle)
    _note_fewer(prepared, result)
    _note_contenders(prepared, lowered)
    return document_of(prepared, lowered)


def _best(prepared: PreparedSearch, old: PlanDocument | None) -> tuple[PreparedSearch, LoweredResult]:
    """The space that the plan is of (moments may be left open), and the best plan."""
    if is_staged(prepared):
        return _best_in_stages(prepared)
    options = prepared.options
    prepared, result = choose_states(prepared, _search_all, None if old is None else old.optimizer_states)
    if old is not None:
        result = near_result(prepared, result, old)
    if old is not None or options.objective == "communication" or options.cost == "volume":
        return prepared, lower_result(result, prepared.cluster, prepared.options.overlap)
    return prepared, _fastest_predicted(prepared, result)


def _best_in_stages(prepared: PreparedSearch) -> tuple[PreparedSearch, LoweredResult]:
    """The same of a space with pipelines."""

    def plain(request: SearchRequest) -> SearchResult:
        return _search_all(replace(prepared, requests=(request,)))

    def lower(space: PreparedSearch, result: SearchResult) -> LoweredResult:
        if result.pipeline is None and space.options.cost != "volume":
            return _fastest_predicted(space, result)
        return lower_result(result, space.cluster, space.options.overlap)

    prepared, found = choose_states(prepared, lambda space: search_stages(space, lower, plain))
    result = replace(found.lowered.result, states=found.states)
    return prepared, replace(found.lowered, result=result)


def _plan_of_sweep(prepared: PreparedSearch) -> PlanDocument:
    """The plan that ``make_plan`` makes, without what else there is to say of it or of why there is none."""
    return document_of(*_best(prepared, None))


def _fastest_predicted(prepared: PreparedSearch, result: SearchResult) -> LoweredResult:
    """Of the plans within the gap the one whose prediction, with overlap and latencies, is fastest."""
    best = first = lower_result(result, prepared.cluster, prepared.options.overlap)
    for found in result.runners_up:
        waits = prepared.options.mode == "infer" and prepared.options.overlap != Overlap.ALL.value
        if waits and found.objective_ns >= best.prediction.step_ns:
            continue  # nothing overlaps then: the prediction is no less than the objective
        lowered = lower_result(found, prepared.cluster, prepared.options.overlap)
        if lowered.prediction.step_ns < best.prediction.step_ns:
            best = lowered
    chosen = best.result
    if best is not first:
        _log.info(
            f"of {1 + len(result.runners_up)} plans within the gap, {chosen.mesh} with "
            f"{chosen.decisions.microbatches} microbatches is predicted fastest: "
            f"{best.prediction.step_ns / 1e6:.3f} ms a step, the one of least objective "
            f"{first.prediction.step_ns / 1e6:.3f} ms"
        )
    return best.certified_by(result)


def _search_all(prepared: PreparedSearch) -> SearchResult:
    """Search all parts of the space."""
    from tap_planner.search import search_by_room, search_parts, search_smallest

    def limit(cluster: Cluster) -> int | None:
        return limit_bytes(cluster, prepared.options)

    if prepared.options.objective == "memory":
        return search_smallest(prepared.requests, limit)
    return search_parts(prepared.requests, lambda request: search_by_room(request, limit))


def _note_fewer(prepared: PreparedSearch, result: SearchResult) -> None:
    """Say so if fewer devices are proven faster, unless the user has chosen: idle devices, a mesh, rules, a target; or
    another objective or cost than the usual."""
    from tap_planner.search import fewer_devices

    options, devices = prepared.options, prepared.cluster.num_devices
    chosen = options.mesh is not None or options.constraints or options.target is not None
    fixed = chosen or options.objective != "time" or options.cost != "topology"
    if options.allow_idle or fixed or devices == 1 or is_staged(prepared):
        return
    fewer = fewer_devices(prepared.request, result)
    if fewer is not None:
        _log.log(
            NOTE,
            f"{fewer.num_devices} of the {devices} devices are proven faster: {fewer.objective_ns / 1e6:.3f} ms a "
            f"step; all of them take at least {result.bound_ns / 1e6:.3f} ms; --allow-idle uses fewer",
        )


def _note_contenders(prepared: PreparedSearch, chosen: LoweredResult) -> None:
    """Say so if a plan beyond the gap is predicted much faster: the objective knows no overlap."""
    options = prepared.options
    if options.objective != "time" or options.cost != "topology" or is_staged(prepared):
        return
    step_ns = chosen.prediction.step_ns
    lowered = [lower_result(found, prepared.cluster, options.overlap) for found in chosen.result.contenders]
    best = min(lowered, key=lambda other: other.prediction.step_ns, default=chosen)
    ns, mesh = best.prediction.step_ns, best.result.mesh
    if ns < step_ns * (1 - _MUCH_FASTER):
        more = best.result.objective_ns / chosen.result.objective_ns - 1
        _log.log(
            NOTE,
            f"a plan on the mesh {mesh} is predicted {1 - ns / step_ns:.1%} faster, {ns / 1e6:.3f} ms a step, though "
            f"its objective, which knows no overlap, is {more:.1%} larger; see --mesh {mesh}",
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
) -> CertificateReport | PlacementReport:
    """Check what a plan's certificate claims: its price, that the proof covers the space, and every bound of it.

    Args:
        document: the plan; it holds cluster and options.
        model: ONNX file.
        replay: whether to prove the solver's bounds again, too.
        old: the plan that it stays near to, to count again what it changes.

    Raises:
        ApplyError: the plan is about another model.
    """
    if document.placement is not None:
        return verify_placement(document, model, replay=replay)
    return verify(document, model, replay=replay, old=old)


def _part_graph(document: PlanDocument, decisions: Decisions, model: Path) -> Graph:
    """The graph of one microbatch, after checking that the plan is about this model."""
    from tap_planner.graph import bind, load_model

    loaded = load_model(model)
    options = bind_options(document.options)
    whole = bind(loaded, options)
    check_model(document, whole, model)
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
    from tap_planner.program import lower_plan as lower_decisions

    decisions = expand(document)
    return lower_decisions(_part_graph(document, decisions, model), decisions)


def simulate_program(document: PlanDocument, program: Program) -> Timeline:
    """One step of a plan's Program in time, on the devices that the plan uses; ``lower_plan`` makes the Program."""
    from tap_planner.simulate import simulate

    if document.placement is not None:
        return simulate(program, _cluster(document), devices=_devices(document))
    return simulate(program, _used_cluster(document), overlap=_overlap(document))


def simulate_plan(document: PlanDocument, model: Path) -> Prediction:
    """The predicted step of a plan, from its Program and the devices that it uses.

    Raises:
        ApplyError: the plan is about another model.
    """
    from tap_planner.simulate import predict

    if document.placement is not None:
        return predict(lower_plan(document, model), _cluster(document), _devices(document))
    return predict(lower_plan(document, model), _used_cluster(document), overlap=_overlap(document))


def _overlap(document: PlanDocument) -> Overlap:
    """What the runtime that is to run a plan hides."""
    return overlap_of(document.options.overlap, _cluster(document).library)


def _cluster(document: PlanDocument) -> Cluster:
    from tap_planner.cluster import cluster_from_json

    return cluster_from_json(document.cluster)


def _used_cluster(document: PlanDocument) -> Cluster:
    """The part of the plan's cluster that its mesh uses."""
    from tap_planner.cluster import restricted

    return restricted(_cluster(document), sorted(_devices(document)))


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
        times = self.result.step_ns
        shown = f"step time: {statistics.median(times) / 1e6:.3f} ms (median of {len(times)})"
        return (
            *losses,
            *((shown,) if len(times) >= _ENOUGH_STEPS else ()),
            f"{self.result.num_ranks} ranks, {self.result.num_collectives} collectives per rank",
        )


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
        devices=_devices(document) if document.mesh.idle_devices or document.mesh.order else (),
        num_devices=len(document.mesh.ranks) + document.mesh.num_left_out,
    )
    return ApplyOutcome(result=apply_job(job, num_processes=request.nproc, backend=request.backend))


def calibrate_cluster(
    request: CalibrateRequest, on_progress: Callable[[Progress], None] = lambda progress: None
) -> Calibration | None:
    """Measure a cluster's devices and links, and fit the cost model's figures to that.

    Args:
        request: what is asked.
        on_progress: called while measuring.

    Returns:
        The figures; None in a launcher's processes other than the first.

    Raises:
        TapError: the cluster file is wrong, the number of processes does not fit it, or measuring fails.
    """
    from tap_planner.cluster import load_cluster

    cluster = load_cluster(request.cluster)
    try:
        return calibrate(request, cluster, on_progress)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ApplyError("tap-calibrate needs torch", hint="pip install 'tap-planner[apply]'") from error


def _devices(document: PlanDocument) -> tuple[int, ...]:
    """Number of each rank's device among those of the cluster."""
    numbers = {place: number for number, place in enumerate(_cluster(document).places())}
    missing = next((place for place in document.mesh.ranks if place not in numbers), None)
    if missing is not None:
        raise ApplyError(f"mesh.ranks: the cluster of the plan has no device {list(missing)}")
    return tuple(numbers[place] for place in document.mesh.ranks)
