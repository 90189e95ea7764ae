"""Is what a device placement's certificate claims so? Written, played and priced again from the plan and the model."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import ApplyError, TapError
from tap_planner.placement_documents import device_loads, predicted_of
from tap_planner.placements import Placed, build_problem, find_placement
from tap_planner.plan import PlanDocument, expand, gap_basis_points
from tap_planner.requests import read_model
from tap_planner.verification import check_model, edited, failure_lines

if TYPE_CHECKING:
    from tap_planner.device_placement import Built, PlacedPlan
    from tap_planner.graph import Graph
    from tap_planner.plan import Decisions
    from tap_planner.requests import PreparedSearch

__all__ = ["PlacementReport", "verify_placement"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementReport:
    """What verifying a device placement's certificate gave."""

    findings: tuple[str, ...]
    """What is not as the certificate says; empty: all is."""
    objective_ns: int
    simple_ns: int
    bound_ns: int
    num_devices: int
    num_groups: int
    replayed: bool
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether nothing is wrong."""
        return not self.findings

    def lines(self) -> tuple[str, ...]:
        """A report for people."""
        if self.findings:
            return failure_lines(self.findings)
        solver = "proven again" if self.replayed else "claimed; --replay proves it again"
        by_solver = (f"solver's bound {self.bound_ns} ns, gap {self._gap(self.bound_ns)} ({solver})",)
        return (
            f"objective {self.objective_ns} ns and memory: the plan's order, played again on its devices",
            f"placement: {self.num_groups} groups of operators on {self.num_devices} devices, each where it may lie",
            f"bound by the longest way and the work shared out {self.simple_ns} ns, gap {self._gap(self.simple_ns)} "
            "(verified)",
            *(by_solver if self.bound_ns > self.simple_ns else ()),
            f"verified in {self.seconds:.1f} s",
        )

    def _gap(self, bound_ns: int) -> str:
        return f"{100 * (self.objective_ns - bound_ns) / max(bound_ns, 1):.3f} %"


def verify_placement(document: PlanDocument, model: Path, *, replay: bool = False) -> PlacementReport:
    """Check everything that the certificate of a device placement claims, from the plan and the model alone.

    Args:
        document: the plan.
        model: ONNX file.
        replay: whether to place and solve again, too, where the bound is a solver's.

    Raises:
        ApplyError: the plan is about another model.
    """
    from tap_planner.cluster import cluster_from_json
    from tap_planner.device_placement import lower_bound_ns

    started = time.perf_counter()
    read = read_model(model, cluster_from_json(document.cluster), document.options)
    check_model(document, read.graph, model)
    built = build_problem(read)
    simple = lower_bound_ns(built.problem)
    findings = [*edited(document), *_figures(document, simple), *_plan(document, read, built)]
    certificate = document.certificate
    by_solver = certificate.bound_ns > (certificate.simple_bound_ns or 0)
    if replay and by_solver and not findings:
        bound = find_placement(read).proof.bound_ns
        if bound < certificate.bound_ns:
            findings.append(f"bound_ns: {certificate.bound_ns}, the solver proves {bound}")
    return PlacementReport(
        findings=tuple(findings),
        objective_ns=certificate.objective_ns,
        simple_ns=certificate.simple_bound_ns or 0,
        bound_ns=certificate.bound_ns,
        num_devices=len(document.mesh.ranks),
        num_groups=built.problem.num_groups,
        replayed=replay,
        seconds=time.perf_counter() - started,
    )


def _figures(document: PlanDocument, simple_ns: int) -> Iterator[str]:
    """The figures of the certificate against each other."""
    certificate = document.certificate
    objective, bound = certificate.objective_ns, certificate.bound_ns
    least = min(simple_ns, objective)
    if certificate.simple_bound_ns != least:
        yield f"simple_bound_ns: {certificate.simple_bound_ns}, expected {least}"
    if not least <= bound <= objective:
        yield f"bound_ns: {bound}, expected {least} to {objective}"
    if bound > least and not certificate.space.get("solved"):
        yield f"bound_ns: {bound}, but no solver took part, and without one {least} is known"
    gap = gap_basis_points(objective, bound)
    if certificate.gap_basis_points != gap:
        yield f"gap_basis_points: {certificate.gap_basis_points}, expected {gap}"
    if (certificate.status == "optimal") != (objective == bound):
        yield f"status: {certificate.status}, but the gap is {objective - bound} ns"


def _plan(document: PlanDocument, read: PreparedSearch, built: Built) -> Iterator[str]:
    """The plan itself: a placement that keeps the rules, and of the time and memory that are claimed."""
    from tap_planner.program import lower_plan

    decisions = expand(document)
    try:
        program = lower_plan(read.graph, decisions)
    except ApplyError as error:
        yield f"decisions: {error.message}"
        return
    numbers = {place: rank for rank, place in enumerate(read.cluster.places())}
    unknown = next((place for place in document.mesh.ranks if place not in numbers), None)
    if unknown is not None:
        yield f"mesh.ranks: the cluster has no device {list(unknown)}"
        return
    devices = tuple(numbers[place] for place in document.mesh.ranks)
    placement, wrong = _placement(read.graph, built, decisions, devices)
    yield from wrong
    if wrong:
        return
    plan = _again(document, read, program.graph, decisions, devices)
    if isinstance(plan, str):
        yield plan
        return
    section = document.placement
    assert section is not None
    placed = Placed(read=read, built=built, placement=placement, order=section.order, placer=section.placer, plan=plan)
    yield from _prices(document, placed)


def _placement(
    graph: Graph, built: Built, decisions: Decisions, devices: Sequence[int]
) -> tuple[tuple[int, ...], list[str]]:
    """By group its device, and what is wrong with that."""
    on: dict[str, int] = {}
    for stage, operators in decisions.chunks:
        on.update((operator.id, devices[stage]) for operator in operators)
    wrong: list[str] = []
    placement: list[int] = []
    for group, members in enumerate(built.operators):
        names = [graph.operators[index].id for index in members]
        placement.append(on[names[0]])
        apart = next((name for name in names if on[name] != on[names[0]]), None)
        if apart is not None:
            wrong.append(f"decisions: {apart!r} and {names[0]!r} belong together, but lie on unlike devices")
        elif not built.problem.allowed[group, on[names[0]]]:
            wrong.append(f"decisions: {names[0]!r} may not lie on {built.devices[on[names[0]]].name}")
    return tuple(placement), wrong


def _again(
    document: PlanDocument, read: PreparedSearch, graph: Graph, decisions: Decisions, devices: tuple[int, ...]
) -> PlacedPlan | str:
    """The plan as its placement and order alone make it; what differs, if anything does."""
    from tap_planner.device_placement import PlacedPlan
    from tap_planner.graph import reordered
    from tap_planner.operators import TRANSFER
    from tap_planner.plan import canonical_decisions, cut_decisions, stage_starts, unsplit_decisions

    options, pipeline = read.options, decisions.pipeline
    try:
        moved = reordered(read.graph, [each.id for each in decisions.operators if each.type != TRANSFER])
        again = unsplit_decisions(
            moved,
            training=options.mode == "train",
            precision=options.precision,
            optimizer=options.optimizer,
            optimizer_states=options.optimizer_states,
            loss_output=read.loss_output or "",
        )
        if pipeline is not None:
            _, again = cut_decisions(moved, again, stage_starts(document.pipeline), pipeline.schedule)
    except TapError as error:
        return f"decisions: {error.message}"
    reads = {name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None}
    if canonical_decisions(again, reads) != canonical_decisions(decisions, reads):
        return "decisions: not those of whole operators in the order and on the devices of the plan"
    return PlacedPlan(graph=graph, decisions=decisions, devices=devices)


def _prices(document: PlanDocument, placed: Placed) -> Iterator[str]:
    """Times, memory and limits against what the plan says."""
    certificate, section = document.certificate, document.placement
    assert section is not None
    if placed.objective_ns != certificate.objective_ns:
        yield f"objective_ns: {certificate.objective_ns}, the plan takes {placed.objective_ns} as it is played"
    loads = device_loads(placed)
    for stage, (load, claimed) in enumerate(zip(loads, section.devices, strict=False)):
        if load != claimed:
            yield f"placement.devices[{stage}]: {claimed}, expected {load}"
        if load.limit_bytes is not None and load.total_memory_bytes > load.limit_bytes:
            yield f"placement.devices[{stage}]: {load.total_memory_bytes} bytes, the limit is {load.limit_bytes}"
    if len(loads) != len(section.devices):
        yield f"placement.devices: {len(section.devices)} entries, the plan uses {len(loads)} devices"
    predicted = predicted_of(placed, loads)
    if predicted != document.predicted:
        yield f"predicted: {document.predicted}, the simulated plan gives {predicted}"
