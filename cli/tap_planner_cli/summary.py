"""What tap-plan says on stderr, and the report."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner.alternatives import Alternative
from tap_planner.errors import InfeasibleError, TapError
from tap_planner.plan import Claim, PlanDocument, device_kinds, kinds_of_stages, write_text
from tap_planner_cli.errors import printable
from tap_planner_cli.show_placement import fullest_text, placement_text
from tap_planner_cli.show_text import (
    idle_text,
    mesh_sizes,
    recompute_text,
    schedule_text,
    split_text,
    states_text,
    zero_text,
)
from tap_planner_cli.units import format_bytes, format_ns, format_rate, format_unit, share


def print_facts(console: Console, rows: Sequence[tuple[str, str]]) -> None:
    """Names with what there is to say of them, in two columns."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in rows:
        grid.add_row(Text(name, style="dim"), printable(text))
    console.print(grid)


def print_summary(console: Console, document: PlanDocument, output: Path | None) -> None:
    """The plan in a few lines."""
    predicted, certificate = document.predicted, document.certificate
    mesh = " x ".join(f"{name}={size}" for name, size in mesh_sizes(document)) or "1 device"
    mesh += f" ({split_text(document)})" if document.mesh.order else ""
    training = document.options.mode == "train"
    staged = f", {schedule_text(document)}" if document.pipeline.num_stages > 1 else ""
    settings = f"{staged}, ZeRO {zero_text(document)}, {document.pipeline.microbatches} microbatches, "
    settings += f"recompute {recompute_text(document)}"
    settings += "" if document.optimizer_states == "fp32" else f", {document.optimizer_states} moments"
    communication = (
        f"{share(predicted.communication_ns - predicted.hidden_ns, predicted.step_ns)} of it communication"
        + (f", {format_ns(predicted.hidden_ns)} more of it hidden" if predicted.hidden_ns else "")
    )
    spread = ("mesh", mesh + (settings if training else ""))
    if document.placement is not None:
        spread = ("placement", placement_text(document, document.placement))
    rows = [
        spread,
        ("step" if training else "latency", f"{format_ns(predicted.step_ns)} predicted, {communication}"),
        *(() if training else (("throughput", _throughput(document)),)),
        ("memory", _memory(document)),
        ("proof", _proof(document)),
    ]
    if document.options.objective == "communication":
        rows.append(("time", f"{format_ns(certificate.objective_ns)} by objective A; nothing is proven of it"))
    if certificate.states is not None:
        rows.append(("moments", states_text(document, certificate.states)))
    if certificate.near is not None:
        rows.append(("near", certificate.near.shown))
    if document.num_idle:
        rows.append(("idle", idle_text(document)))
    if output is not None:
        rows.append(("plan", str(output)))
    print_facts(console, rows)
    wanted = document.options.gap_basis_points
    allowed = wanted if certificate.near is None else wanted + certificate.near.regret_basis_points
    gap = max(certificate.gap_basis_points, certificate.time_gap_basis_points or 0)
    if gap > max(allowed, 0) and certificate.status != "optimal":
        text = f"warning: the plan is not proven to be within {wanted / 100:g} % of the optimum; the gap is given above"
        console.print(Text(text, style="yellow"))


def print_alternatives(console: Console, document: PlanDocument, others: Sequence[Alternative]) -> None:
    """The best plans on other meshes, in units of the one that was chosen."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("mesh", "microbatches", "objective", "proven", "predicted step", "memory"):
        table.add_column(name, justify="left" if name == "mesh" else "right")
    best = document.claims[0]
    for other in others:
        objective, bound = (
            (other.objective_ns, other.bound_ns)
            if other.objective_bytes is None
            else (other.objective_bytes, other.bound_bytes)
        )
        more = f" ({objective / best.objective - 1:+.1%})" if best.objective else ""
        table.add_row(
            other.mesh,
            str(other.microbatches),
            f"{format_unit(best.unit, objective)}{more}",
            f">= {format_unit(best.unit, bound or 0)}",
            format_ns(other.step_ns),
            format_bytes(other.memory_bytes),
        )
    console.print(Text("The best plans on other meshes"))
    console.print(table)


def _throughput(document: PlanDocument) -> str:
    """What one step after the other gets through, as the prediction has it."""
    predicted = document.predicted
    texts = [f"{format_rate(document.model.batch, predicted.step_ns)} samples/s"]
    if predicted.tokens is not None:
        texts.append(f"{format_rate(predicted.tokens, predicted.step_ns)} tokens/s")
    return ", ".join(texts)


def _memory(document: PlanDocument) -> str:
    if document.placement is not None:
        return fullest_text(document, document.placement)
    total = document.predicted.total_memory_bytes
    kinds = device_kinds(document)
    if len(kinds) == 1:
        return f"{format_bytes(total)} per device{_by_kind(document)}"
    if document.predicted.stage_memory_bytes:
        return _memory_of_stages(document)
    of = ", ".join(
        f"{share(total, kind.limit_bytes)} of {kind.device}'s {format_bytes(kind.limit_bytes)}" for kind in kinds
    )
    return f"{format_bytes(total)} per device: {of}"


def _memory_of_stages(document: PlanDocument) -> str:
    """Of each kind of device, the stage that holds most."""
    fullest: dict[str, tuple[int, int]] = {}
    kinds = kinds_of_stages(document)
    for stage, (kind, taken) in enumerate(zip(kinds, document.predicted.stage_memory_bytes, strict=True)):
        if taken > fullest.get(kind.group, (-1, 0))[0]:
            fullest[kind.group] = (taken, stage)
    return ", ".join(
        f"{format_bytes(taken)} per device of stage {stage}: {share(taken, kinds[stage].limit_bytes)} of "
        f"{kinds[stage].device}'s {format_bytes(kinds[stage].limit_bytes)}"
        for taken, stage in fullest.values()
    )


def _by_kind(document: PlanDocument) -> str:
    """In inference, what of the memory is there from step to step, what goes in and comes out, and the workspace."""
    sizes = document.predicted.memory_bytes
    if document.options.mode == "train":
        return ""
    parts = {"parameters": sizes.get("parameters", 0), "caches": sizes.get("caches", 0)}
    parts["inputs and outputs"] = sizes.get("inputs", 0) + sizes.get("outputs", 0)
    parts["workspace"] = sizes.get("workspace", 0)
    return ": " + ", ".join(f"{format_bytes(size)} {kind}" for kind, size in parts.items() if size)


def _proof(document: PlanDocument) -> str:
    """What is proven; of the least memory, and then of the time of the plans that need no more."""
    first, *others = document.claims
    what = {"memory": " per device", "communication": " sent by a device in a step"}.get(document.options.objective, "")
    if document.certificate.status == "optimal":
        times = (f"; in that memory {format_unit(claim.unit, claim.objective)}" for claim in others)
        return f"optimal: {format_unit(first.unit, first.objective)}{what}{''.join(times)}"
    return "; in that memory ".join((_claim(first, what), *map(_claim, others)))


def _claim(claim: Claim, what: str = "") -> str:
    shown = f"{format_unit(claim.unit, claim.objective)}{what}"
    if claim.objective == claim.bound:
        return f"{shown}, proven to be the least"
    return f"{shown}, no plan is below {format_unit(claim.unit, claim.bound)}, gap {claim.gap_basis_points / 100:.2f} %"


def write_report(
    path: Path,
    started: float,
    *,
    document: PlanDocument | None = None,
    error: TapError | None = None,
    others: Sequence[Alternative] = (),
) -> None:
    """Write what does not belong into the plan: wall time, and the diagnosis of a failure.

    Args:
        path: JSON file.
        started: ``time.perf_counter()`` at the start.
        document: the plan that was found.
        error: what was found instead.
        others: the best plans on other meshes.
    """
    report: dict[str, object] = {"wall_ms": round(1000 * (time.perf_counter() - started))}
    if document is not None:
        report |= {
            "status": document.certificate.status,
            "objective_ns": document.certificate.objective_ns,
            **{f"objective_{claim.unit}": claim.objective for claim in document.claims},
            **{f"bound_{claim.unit}": claim.bound for claim in document.claims},
            "decisions": document.digests.decisions if document.digests else None,
        }
    if others:
        report["alternatives"] = [other.to_json() for other in others]
    if error is not None:
        report |= {"status": "error", "error": error.message, "hint": error.hint, "exit_code": error.exit_code}
    if isinstance(error, InfeasibleError):
        report |= {
            "status": "infeasible",
            "least_memory_bytes": error.least_memory_bytes,
            "limit_bytes": error.limit_bytes,
            "diagnosis": {
                "least_memory_bytes": error.least_memory_bytes,
                "limit_bytes": error.limit_bytes,
                "missing_bytes": max(error.least_memory_bytes - error.limit_bytes, 0),
                "conflicts": list(error.conflicts),
                "remedies": [asdict(remedy) for remedy in error.remedies],
            },
        }
    write_text(path, json.dumps(report, indent=2) + "\n")
