"""Is what a plan's certificate claims so? Checked without the tables of the search, and by elimination anew."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import ApplyError, PlanFormatError
from tap_planner.legality import unfounded
from tap_planner.membership import outside, regions_of
from tap_planner.plan import Claim, PlanDocument, PlanOptions, ProofEntry, ShareEntry, compute_digests, expand
from tap_planner.requests import PreparedSearch, limit_bytes, prepare, times_of

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.graph import Graph
    from tap_planner.plan import Decisions
    from tap_planner.program import Program
    from tap_planner.search import Leaf, SearchRequest

__all__ = [
    "CertificateReport",
    "check_model",
    "edited",
    "failure_lines",
    "lagrangian_bound",
    "leaves_of",
    "proof_entries",
    "stages_of",
    "verify",
]

MAX_SHOWN = 20
"""Findings that are shown."""
_COUNTED = ("microbatches", "operators", "parameters", "regions", "compared")
"""What is counted of a plan that stays near to an old one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CertificateReport:
    """What verifying a certificate gave."""

    findings: tuple[str, ...]
    """What is not as the certificate says; empty: all is."""
    objective: str
    """What was to be least: ``time``, ``memory`` or ``communication``."""
    claims: tuple[Claim, ...]
    """What is proven. Of each the Lagrangian bound is verified, and the solver's claimed, or with ``replayed`` proven
    again."""
    num_leaves: int
    num_meshes: int
    replayed: bool
    seconds: float
    near: str = ""
    """Of a plan that stays near to an old one what is verified of that; else empty."""

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def lines(self) -> tuple[str, ...]:
        """A report for people."""
        if self.findings:
            return failure_lines(self.findings)
        return (
            f"objective {self._objectives()}: equal to the price of the lowered plan",
            f"coverage: {self.num_leaves} parts with bounds cover all configurations of {self.num_meshes} meshes",
            *(line for claim in self.claims for line in self._bounds(claim)),
            *((self.near,) if self.near else ()),
            f"verified in {self.seconds:.1f} s",
        )

    def _objectives(self) -> str:
        first = self.claims[0]
        if self.objective == "communication":
            return f"{first.objective} bytes sent, time and memory"
        if self.objective == "memory":
            return f"{first.objective} bytes of memory and {self.claims[1].objective} ns"
        return f"{first.objective} ns and memory"

    def _bounds(self, claim: Claim) -> Iterator[str]:
        solver = "proven again" if self.replayed else "claimed; --replay proves it again"
        if self.objective == "memory" and claim is self.claims[0]:  # no solver takes part
            yield f"least memory: bound {claim.bound} bytes, gap {_gap(claim.objective, claim.bound)} (verified)"
            return
        within = "in that memory: " if self.objective == "memory" else ""
        lagrangian = claim.lagrangian or 0
        yield (
            f"{within}Lagrangian bound {lagrangian} {claim.unit}, gap {_gap(claim.objective, lagrangian)} (verified)"
        )
        yield (
            f"{within}solver's bound {claim.bound} {claim.unit}, gap {_gap(claim.objective, claim.bound)} ({solver})"
        )


def failure_lines(findings: Sequence[str]) -> tuple[str, ...]:
    """What is not as a certificate says, for people; the first ones of many."""
    more = len(findings) - MAX_SHOWN
    rest = (f"... and {more} more",) if more > 0 else ()
    return ("The certificate does not hold:", *findings[:MAX_SHOWN], *rest)


def _gap(objective: int, bound: int) -> str:
    return f"{100 * (objective - bound) / max(bound, 1):.3f} %"


# -- leaves in plans ---------------------------------------------------------------------------------------------


def proof_entries(leaves: Sequence[Leaf]) -> tuple[ProofEntry, ...]:
    """Leaves as a plan writes them: those that differ in their microbatch count only are one entry."""
    grouped: dict[tuple[object, ...], list[Leaf]] = {}
    for leaf in leaves:
        key = (leaf.mesh, leaf.part, leaf.setting, leaf.room, leaf.and_more, leaf.and_multiples, leaf.proof)
        grouped.setdefault((*key, leaf.solver_ns), []).append(leaf)
    entries: list[ProofEntry] = []
    for group in grouped.values():
        leaf, proof = group[0], group[0].proof
        excluded = proof.kind.value == "infeasible"
        entries.append(
            ProofEntry(
                mesh=leaf.mesh,
                microbatches=tuple(sorted({one.microbatches for one in group})),
                by=proof.kind.value,
                bound_ns=0 if excluded else proof.bound_ns,
                multiplier=(proof.multiplier.numerator, proof.multiplier.denominator),
                graph_of=proof.graph_of,
                loose=None if proof.loose is None else tuple(sorted(proof.loose)),
                shares=tuple(
                    ShareEntry(tensor=tensor, key=key, parts=parts) for tensor, key, parts in proof.shares.rows()
                ),
                solver_ns=None if excluded or leaf.solver_ns <= proof.bound_ns else leaf.solver_ns,
                part=leaf.part,
                setting=leaf.setting,
                room=leaf.room,
                and_more=leaf.and_more,
                and_multiples=leaf.and_multiples,
            )
        )
    order = {entry.mesh: number for number, entry in reversed(list(enumerate(entries)))}
    entries.sort(
        key=lambda e: (order[e.mesh], e.part, e.setting, e.microbatches, -1 if e.room is None else e.room, e.by)
    )
    return tuple(entries)


def leaves_of(entries: Sequence[ProofEntry]) -> tuple[Leaf, ...]:
    """The leaves that a plan holds."""
    from tap_planner.search import Leaf, Proof, ProofKind, Shares

    return tuple(
        Leaf(
            mesh=entry.mesh,
            setting=entry.setting,
            room=entry.room,
            microbatches=count,
            and_more=entry.and_more,
            and_multiples=entry.and_multiples,
            proof=Proof(
                kind=ProofKind(entry.by),
                bound_ns=entry.bound_ns,
                multiplier=Fraction(*entry.multiplier),
                graph_of=entry.graph_of,
                loose=None if entry.loose is None else frozenset(entry.loose),
                shares=Shares.of_rows((row.tensor, row.key, row.parts) for row in entry.shares),
            ),
            solver_ns=entry.bound_ns if entry.solver_ns is None else entry.solver_ns,
            part=entry.part,
        )
        for entry in entries
        for count in entry.microbatches
    )


def stages_of(prepared: PreparedSearch) -> tuple[int, ...]:
    """By part of the space, its number of pipeline stages: its bounds are those of all of them together."""
    return tuple(request.num_stages for request in prepared.requests)


def lagrangian_bound(entries: Sequence[ProofEntry], objective: int, stages: Sequence[int]) -> int:
    """What elimination proves of the whole space, no more than the objective.

    Args:
        entries: the proof.
        objective: of the plan.
        stages: see ``stages_of``.
    """
    return min([objective, *(-(-e.bound_ns // stages[e.part]) for e in entries if e.by != "infeasible")])


# -- verifying ---------------------------------------------------------------------------------------------------


def verify(
    document: PlanDocument, model: Path, *, replay: bool = False, old: PlanDocument | None = None
) -> CertificateReport:
    """Check everything that a certificate claims, from the plan and the model alone.

    Args:
        document: the plan.
        model: ONNX file.
        replay: whether to prove the solver's bounds again, too.
        old: the plan that it stays near to, to count again what it changes.

    Raises:
        ApplyError: the plan is about another model.
        PlanFormatError: the plan holds no proof.
    """
    from tap_planner.cluster import cluster_from_json
    from tap_planner.search import mesh_label, verify_in_memory, verify_leaves, verify_memory

    started = time.perf_counter()
    certificate = document.certificate
    if document.claims[-1].lagrangian is None or not all(claim.proof for claim in document.claims):
        raise PlanFormatError(
            "certificate.proof: the plan holds none: an older tap-plan wrote it", hint="Plan again with tap-plan."
        )
    cluster = cluster_from_json(document.cluster)
    prepared = prepare(model, cluster, _options(document))
    check_model(document, prepared.graph, model)
    findings = [
        *edited(document),
        *_claims(document, prepared),
        *_nearness(document, old),
        *_plan(document, prepared),
    ]
    leaves = leaves_of(certificate.proof)
    needs = leaves_of(certificate.memory_proof)

    def limit(part: Cluster) -> int | None:
        return limit_bytes(part, prepared.options)

    if prepared.options.objective == "memory":
        most = certificate.objective_bytes or 0
        wrong = verify_memory(prepared.requests, limit, needs)
        findings += (f"memory_proof: {finding.where}: {finding.what}" for finding in wrong)
        wrong = verify_in_memory(prepared.requests, limit, leaves, needs, most, replay=replay)
    else:
        wrong = verify_leaves(prepared.requests, limit, leaves, replay=replay)
    findings += (f"proof: {finding.where}: {finding.what}" for finding in wrong)
    return CertificateReport(
        findings=tuple(findings),
        objective=prepared.options.objective,
        claims=document.claims,
        num_leaves=len(leaves) + len(needs),
        num_meshes=len({mesh_label(mesh) for request in prepared.requests for mesh in request.meshes}),
        replayed=replay,
        near=_near_line(document, old),
        seconds=time.perf_counter() - started,
    )


def _options(document: PlanDocument) -> PlanOptions:
    """The options of the space that the certificate speaks of: moments that were left open are what was chosen."""
    if document.options.optimizer_states != "auto":
        return document.options
    return replace(document.options, optimizer_states=document.optimizer_states)


def check_model(document: PlanDocument, graph: Graph, model: Path) -> None:
    """Whether a plan is about a model.

    Args:
        document: the plan.
        graph: the model, bound by the plan's options.
        model: its file, for the message.

    Raises:
        ApplyError: it is not.
    """
    if graph.digest != document.model.graph_digest:
        raise ApplyError(
            f"{model.name} gives graph {graph.digest[:12]}, the plan was made for {document.model.graph_digest[:12]}",
            hint="give the model that the plan was made from with --model, or plan this one anew",
        )


def edited(document: PlanDocument) -> Iterator[str]:
    """Says so if a plan's digests are not its own."""
    if document.digests != compute_digests(document):
        yield "digests: the plan was edited after it was written"


def _claims(document: PlanDocument, prepared: PreparedSearch) -> Iterator[str]:
    """The figures of the certificate against each other."""
    certificate, stages = document.certificate, stages_of(prepared)
    for claim in document.claims:
        beyond = next((entry for entry in claim.proof if entry.part >= len(stages)), None)
        if beyond is not None:
            yield f"proof: {beyond.mesh} is of part {beyond.part}, the space has {len(stages)}"
            return
        feasible = [entry for entry in claim.proof if entry.by != "infeasible"]
        proven = [-(-(e.bound_ns if e.solver_ns is None else e.solver_ns) // stages[e.part]) for e in feasible]
        lagrangian = lagrangian_bound(claim.proof, claim.objective, stages)
        if claim.lagrangian not in (None, lagrangian):
            yield f"lagrangian_bound_{claim.unit}: {claim.lagrangian}, expected {lagrangian}, the least in proof"
        bound = min([claim.objective, *proven])
        if claim.bound > bound:
            yield f"bound_{claim.unit}: {claim.bound}, expected at most {bound}, the least in proof"
    first, last = document.claims[0], document.claims[-1]
    if certificate.gap_basis_points != first.gap_basis_points:
        yield f"gap_basis_points: {certificate.gap_basis_points}, expected {first.gap_basis_points}"
    time_gap = last.gap_basis_points if document.options.objective == "memory" else None
    if certificate.time_gap_basis_points != time_gap:
        yield f"time_gap_basis_points: {certificate.time_gap_basis_points}, expected {time_gap}"
    gaps = [claim.objective - claim.bound for claim in document.claims]
    if (certificate.status == "optimal") != (not any(gaps)):
        shown = " and ".join(f"{gap} {claim.unit}" for gap, claim in zip(gaps, document.claims, strict=True))
        yield f"status: {certificate.status}, but the gap is {shown}"


def _nearness(document: PlanDocument, old: PlanDocument | None) -> Iterator[str]:
    """What a plan says of the old one that it stays near to; counted again where that is given."""
    from tap_planner.search import OldPlan

    near, most = document.certificate.near, document.options.max_regret_basis_points
    if (near is None) != (most is None):
        yield f"near: {'missing' if near is None else 'present'}, the options have {most} as the regret allowed"
    if old is not None and near is None:
        yield "near: the plan does not say that it stays near to an old one"
    if near is None or most is None:
        return
    gap = document.certificate.gap_basis_points
    if near.regret_basis_points > most:
        yield f"near: a regret of {near.regret_basis_points} basis points, {most} are allowed"
    if near.regret_basis_points > gap:
        yield f"near: a regret of {near.regret_basis_points} basis points, but the gap to all plans is {gap}"
    if near.changes > near.compared:
        yield f"near: {near.changes} changes of {near.compared} decisions"
    if old is None:
        return
    decisions, before = expand(document), OldPlan(expand(old))
    changes, compared = before.changes(decisions), before.counterparts(decisions)
    counted = (changes.microbatches, changes.operators, changes.parameters, changes.regions, compared)
    claimed = (near.microbatches, near.operators, near.parameters, near.regions, near.compared)
    for name, found, said in zip(_COUNTED, counted, claimed, strict=True):
        if found != said:
            yield f"near: {name}: {said}, against the old plan there are {found}"


def _near_line(document: PlanDocument, old: PlanDocument | None) -> str:
    near = document.certificate.near
    if near is None:
        return ""
    counted = "claimed; the old plan in --stay-near counts them again" if old is None else "counted again"
    regret = f"{near.regret_basis_points / 100:.2f} %"
    return (
        f"near the old plan: {near.changes} of {near.compared} decisions change ({counted}), regret {regret} (claimed)"
    )


def _plan(document: PlanDocument, prepared: PreparedSearch) -> Iterator[str]:
    """The plan itself: of the space, legal, of the price that is claimed, and within the limit."""
    from tap_planner.cluster import mesh_places, mesh_text, part_of
    from tap_planner.program import lower_plan
    from tap_planner.search import stage_rooms
    from tap_planner.simulate import price_program

    decisions = expand(document)
    if not _parts_of(prepared, decisions):
        stages, pipeline = decisions.num_stages, decisions.pipeline
        yield f"pipeline: {pipeline.schedule.name if pipeline else 'none'} of {stages} stages is not in the space"
        return
    asked = prepared.request.optimizer_states
    if decisions.optimizer_states != asked:
        yield f"optimizer.states: {decisions.optimizer_states}, the options ask for {asked}"
        return
    axes, order = tuple((axis.name, axis.size) for axis in document.mesh.axes), document.mesh.order
    prepared = replace(prepared, requests=_parts_of(prepared, decisions))
    meshes = [mesh for request in prepared.requests for mesh in request.meshes]
    same = (m for m in meshes if tuple((axis.name, axis.size) for axis in m.axes) == axes and m.order == order)
    mesh = next((m for m in same if mesh_places(prepared.cluster, m) == document.mesh.ranks), None)
    if mesh is None:
        shown = mesh_text(document.mesh.axes, order)
        yield f"mesh: {document.mesh.ranks[:4]}... of the axes {shown} is not in the space"
        return
    if prepared.graph.batch % decisions.microbatches:
        yield f"microbatches: {decisions.microbatches} do not divide the batch {prepared.graph.batch}"
        return
    graph = prepared.graphs(decisions.microbatches)
    try:
        program = lower_plan(graph, decisions)
        whole = decisions if decisions.pipeline is None else _joined(document, prepared, graph, program)
    except ApplyError as error:
        yield f"decisions: {error.message}"
        return
    wrong = [*unfounded(graph, whole), *_outside(prepared, mesh, whole)]
    yield from wrong
    if wrong:
        return
    used: Cluster = part_of(prepared.cluster, mesh)
    price = price_program(program, used, times_of(prepared.options))
    yield from _objective_bytes(document, program, used, price.memory_bytes)
    if price.objective_ns != document.certificate.objective_ns:
        yield f"objective_ns: {document.certificate.objective_ns}, the lowered plan costs {price.objective_ns}"
    if price.memory_bytes != document.predicted.total_memory_bytes:
        yield f"memory_bytes: {document.predicted.total_memory_bytes}, the lowered plan needs {price.memory_bytes}"
    if document.predicted.stage_memory_bytes not in ((), price.stage_bytes):
        yield f"stage_memory_bytes: {document.predicted.stage_memory_bytes}, the stages need {price.stage_bytes}"
    rooms = stage_rooms(used, decisions.num_stages, lambda part: limit_bytes(part, prepared.options))
    for stage, (taken, room) in enumerate(zip(price.bytes_of_stages, rooms or (), strict=False)):
        if taken > room:
            of = f" on stage {stage}" if price.stage_bytes else ""
            yield f"memory_bytes: the lowered plan needs {taken}{of}, the limit is {room}"


def _parts_of(prepared: PreparedSearch, decisions: Decisions) -> tuple[SearchRequest, ...]:
    """The parts of the space that a plan's pipeline is of, or its having none."""
    schedule = None if decisions.pipeline is None else decisions.pipeline.schedule
    return tuple(
        request
        for request in prepared.requests
        if (schedule is None and request.pipeline is None)
        or (
            schedule is not None
            and request.pipeline is not None
            and (request.pipeline.schedule, request.num_stages) == (schedule.name, decisions.num_stages)
            and request.microbatches == decisions.microbatches
            and request.pipeline.at(decisions.microbatches) == schedule
        )
    )


def _joined(document: PlanDocument, prepared: PreparedSearch, graph: Graph, program: Program) -> Decisions:
    """The plan of one stage that a pipeline is cut from.

    Raises:
        ApplyError: cut again it is another one.
    """
    from tap_planner.plan import canonical_decisions, cut_decisions, join_decisions, stage_starts

    decisions = program.decisions
    assert decisions.pipeline is not None
    regions = regions_of(prepared.request.folded(decisions.microbatches))
    whole = join_decisions(graph, program.graph, decisions, regions)
    starts = stage_starts(document.pipeline)
    pipeline = decisions.pipeline
    cut, again = cut_decisions(graph, whole, starts, pipeline.schedule, pipeline.scatter_axes)
    reads = {name: tensor.read.parameter for name, tensor in cut.tensors.items() if tensor.read is not None}
    if canonical_decisions(again, reads) != canonical_decisions(decisions, reads):
        raise ApplyError("the stages of the pipeline are not cut from one plan for all of them")
    return whole


def _objective_bytes(document: PlanDocument, program: Program, used: Cluster, memory_bytes: int) -> Iterator[str]:
    """What the plan sends or needs, where that is its objective."""
    from tap_planner.simulate import sent_by_program

    objective, claimed = document.options.objective, document.certificate.objective_bytes
    if objective == "communication":
        sent = sent_by_program(program, used)
        if claimed != sent:
            yield f"objective_bytes: {claimed}, the lowered plan sends {sent}"
    elif objective == "memory" and claimed != memory_bytes:
        yield f"objective_bytes: {claimed}, the lowered plan needs {memory_bytes}"


def _outside(prepared: PreparedSearch, mesh: Mesh, decisions: Decisions) -> Iterator[str]:
    """Why the plan is of no part of the space: what the part that it is nearest to says."""
    from tap_planner.search import requests_by_room

    def limit(cluster: Cluster) -> int | None:
        return limit_bytes(cluster, prepared.options)

    found: list[list[str]] = []
    for request in prepared.requests:
        parts = (part for part in requests_by_room(request, limit) if mesh in part.meshes)
        wrong = list(outside(next(parts, request), mesh, decisions))
        if not wrong:
            return
        found.append(wrong)
    yield from min(found, key=len)[:MAX_SHOWN]
