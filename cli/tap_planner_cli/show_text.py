"""A plan as tables."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from tap_planner.plan import (
    AS_LIBRARY,
    BlockDisplay,
    BlockEntry,
    Claim,
    IdlePlaces,
    ParameterEntry,
    PlanDocument,
    StatesChoice,
    device_kinds,
    display_blocks,
    gap_basis_points,
    kinds_of_stages,
)
from tap_planner.sharding import Placements
from tap_planner_cli.errors import printable
from tap_planner_cli.show_placement import fullest_text, print_placement, print_stretches
from tap_planner_cli.tables import heading, table
from tap_planner_cli.units import format_bytes, format_count, format_ns, format_unit, share

_NAMES: Mapping[str, Sequence[tuple[str, str]]] = {
    "time": [("objective", "")],
    "memory": [("objective", " of memory per device"), ("in that memory", "")],
    "communication": [("objective", " sent by a device in a step")],
}
"""By objective, what each claim of a plan is called, and what follows its figure."""


def print_plan(console: Console, document: PlanDocument) -> None:
    """Print everything that a reviewer wants to see first, the decisions last."""
    _print_head(console, document)
    if document.placement is None:
        _print_mesh(console, document)
    else:
        print_placement(console, document, document.placement)
    _print_time(console, document)
    _print_memory(console, document)
    _print_collectives(console, document)
    if document.placement is None:
        _print_blocks(console, document)
    else:  # all operators are whole
        print_stretches(console, document, document.placement)


def _print_head(console: Console, document: PlanDocument) -> None:
    options, model, certificate = document.options, document.model, document.certificate
    names = zip(document.claims, _NAMES[options.objective], strict=True)
    time = f"{format_ns(certificate.objective_ns)} by objective A" if options.objective == "communication" else ""
    optimizer = optimizer_text(options.optimizer, document.optimizer_states)
    kind = f"training with {optimizer}" if options.mode == "train" else "inference"
    dims = ", ".join(f"{name}={size}" for name, size in model.dims.items())
    console.print(Text(f"{printable(model.name)} on {printable(str(document.cluster['name']))}", style="bold"))
    lines = [
        ("workload", f"{kind}, {options.precision}, batch {model.batch}{f' ({dims})' if dims else ''}"),
        *(line for claim, (name, what) in names for line in _claim(name, claim, what)),
        ("without a solver", _simple_claim(document)),
        ("time", time),
        ("searched", ", ".join(f"{format_count(size)} {name}" for name, size in certificate.space.items())),
        ("not in it", ", ".join(certificate.not_in_objective)),
    ]
    if certificate.states is not None:
        lines.append(("moments", states_text(document, certificate.states)))
    if options.overlap != AS_LIBRARY:
        lines.append(("overlap", f"{options.overlap}, as the runtime that is to run it (tap-apply hides nothing)"))
    if options.constraints:
        lines.append(("constraints", ", ".join(map(str, options.constraints))))
    if options.places:
        lines.append(("rules", ", ".join(f"'{rule}'" for rule in options.places)))
    if options.custom_rules:
        lines.append(("custom rules", ", ".join(rule.type for rule in options.custom_rules)))
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in lines:
        if text:
            grid.add_row(Text(name, style="dim"), printable(text))
    console.print(grid)


def _claim(name: str, claim: Claim, what: str) -> Iterator[tuple[str, str]]:
    """An objective with what is proven of it, and the bound that ``tap-plan --verify-certificate`` takes again (none in
    older plans)."""
    gap = f"{claim.gap_basis_points / 100:.2f} %"
    proof = "proven optimal" if claim.objective == claim.bound else f"at most {gap} from the optimum"
    shown = format_unit(claim.unit, claim.objective)
    yield name, f"{shown}{what}, {proof} (bound {format_unit(claim.unit, claim.bound)})"
    if claim.lagrangian is not None and claim.lagrangian_gap_basis_points is not None:
        below = claim.lagrangian_gap_basis_points / 100
        yield "by elimination", f"bound {format_unit(claim.unit, claim.lagrangian)}, gap {below:.2f} %"


def _simple_claim(document: PlanDocument) -> str:
    """What is known of a device placement without a solver."""
    simple, objective = document.certificate.simple_bound_ns, document.certificate.objective_ns
    if simple is None or simple == document.certificate.bound_ns:
        return ""
    return f"bound {format_ns(simple)}, gap {gap_basis_points(objective, simple) / 100:.2f} %"


def _print_mesh(console: Console, document: PlanDocument) -> None:
    heading(console, f"Mesh of {len(document.mesh.ranks)} devices")
    rows = [(axis.name, str(axis.size), ", ".join(axis.levels) or "-") for axis in document.mesh.lying]
    console.print(table(("axis", "size", "levels of the topology"), rows, right=("size",)))
    if document.mesh.order:
        console.print(f"what is split over several axes is {split_text(document)}")
    console.print(
        f"microbatches {document.pipeline.microbatches}, ZeRO {zero_text(document)}, "
        f"recompute {recompute_text(document)}, "
        f"schedule {schedule_text(document)}"
    )
    if document.pipeline.num_stages > 1:
        _print_stages(console, document)
    if document.num_idle:
        console.print(f"idle: {idle_text(document)}", soft_wrap=True)


def split_text(document: PlanDocument) -> str:
    """By which axis a dim is split first, where that is not the outermost; else empty."""
    mesh = document.mesh
    return f"split by {', then '.join(document.axis_names)}" if mesh.order else ""


def mesh_sizes(document: PlanDocument) -> list[tuple[str, int]]:
    """Names and sizes of the axes, outermost first; stages of a pipeline before them, as ``pp``."""
    stages = document.pipeline.num_stages
    return [*([("pp", stages)] if stages > 1 else []), *((axis.name, axis.size) for axis in document.mesh.lying)]


def schedule_text(document: PlanDocument) -> str:
    """The schedule, with how many parts of the model a stage has if that is more than one."""
    pipeline = document.pipeline
    chunks = len(pipeline.stages) // pipeline.num_stages if pipeline.stages else 1
    shared = f", transfers shared out over {', '.join(pipeline.scatter)}" if pipeline.scatter else ""
    return pipeline.schedule + (f" with {chunks} parts a stage" if chunks > 1 else "") + shared


def _print_stages(console: Console, document: PlanDocument) -> None:
    """Where the model is cut."""
    heading(console, f"{document.pipeline.num_stages} stages")
    columns = ["stage", "from", "to"]
    rows = [[str(one.stage), printable(one.first), printable(one.last)] for one in document.pipeline.stages]
    taken = document.predicted.stage_memory_bytes
    if taken:
        kinds = kinds_of_stages(document)
        columns += ["memory", "of usable"] + (["devices"] if len(set(kinds)) > 1 else [])
        for row, one in zip(rows, document.pipeline.stages, strict=True):
            kind = kinds[one.stage]
            row += [format_bytes(taken[one.stage]), share(taken[one.stage], kind.limit_bytes)]
            row += [kind.device] if len(set(kinds)) > 1 else []
    console.print(table(columns, rows, right=("stage", "memory", "of usable")))


def idle_text(document: PlanDocument) -> str:
    """Which devices have nothing to do, and why."""
    mesh = document.mesh
    total = len(mesh.ranks) + mesh.num_left_out
    why = [
        f"{entry.reason}, which leaves {entry.axis} {_coordinates(entry.first, entry.end)} idle"
        for entry in document.idle
    ]
    if mesh.idle_devices:
        boxes = ", ".join(_box(places) for places in mesh.idle_devices)
        why.append(f"the mesh has {format_count(len(mesh.ranks))} devices and leaves out {boxes}")
    return f"{format_count(document.num_idle)} of {format_count(total)} devices: {'; '.join(why)}"


def _box(places: IdlePlaces) -> str:
    """``node 0 to 1, device 4 to 7``; levels beyond the node by their distance from it."""
    names = ["device", "node", *(f"level {number}" for number in range(2, len(places.first)))][::-1]
    spans = zip(names, places.first, places.last, strict=False)
    return ", ".join(f"{name} {_coordinates(first, last + 1)}" for name, first, last in spans)


def _coordinates(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first} to {end - 1}"


def _print_time(console: Console, document: PlanDocument) -> None:
    predicted = document.predicted
    staged = document.pipeline.num_stages > 1
    of = ", of the stage that waits least" if staged else ""
    heading(console, f"Time per step: {format_ns(predicted.step_ns)} predicted{of}")
    rows = [("compute", format_ns(predicted.compute_ns), share(predicted.compute_ns, predicted.step_ns))]
    phases: dict[str, int] = {}
    for entry in () if staged else document.collectives:  # those of a pipeline are of all its stages
        phases[entry.phase] = phases.get(entry.phase, 0) + entry.count * entry.time_ns
    communication = ("communication", predicted.communication_ns)
    for name, value in (communication, *((f"  {phase}", value) for phase, value in phases.items())):
        rows.append((name, format_ns(value), share(value, predicted.step_ns)))
    if predicted.hidden_ns:
        rows.append(("hidden", format_ns(-predicted.hidden_ns), share(-predicted.hidden_ns, predicted.step_ns)))
    if staged:
        bubble = predicted.step_ns - predicted.compute_ns - predicted.communication_ns + predicted.hidden_ns
        rows.append(("bubble", format_ns(bubble), share(bubble, predicted.step_ns)))
    console.print(table(("kind", "time", "share"), rows, right=("time", "share")))


def _print_memory(console: Console, document: PlanDocument) -> None:
    total = document.predicted.total_memory_bytes
    if document.placement is not None:
        heading(console, f"Memory: {fullest_text(document, document.placement)}")
        _print_kinds_of_memory(console, document)
        return
    kinds = device_kinds(document)
    of = f" of {format_bytes(kinds[0].memory_bytes)}" if len(kinds) == 1 else ""
    heading(console, f"Memory per device: {format_bytes(total)}{of}")
    if len(kinds) > 1 and not document.predicted.stage_memory_bytes:
        devices = [
            (kind.group, format_count(kind.num_devices), kind.device, format_bytes(kind.limit_bytes)) for kind in kinds
        ]
        used = [share(total, kind.limit_bytes) for kind in kinds]
        columns = ("node group", "devices", "kind", "usable", "used")
        console.print(
            table(columns, [(*row, text) for row, text in zip(devices, used, strict=True)], right=columns[3:])
        )
        console.print()
    _print_kinds_of_memory(console, document)


def _print_kinds_of_memory(console: Console, document: PlanDocument) -> None:
    sizes, total = document.predicted.memory_bytes, document.predicted.total_memory_bytes
    rows = [(kind, format_bytes(size), share(size, total)) for kind, size in sizes.items()]
    console.print(table(("kind", "memory", "share"), rows, right=("memory", "share")))


def _print_collectives(console: Console, document: PlanDocument) -> None:
    heading(console, "Collectives per step")
    if not document.collectives:
        console.print("none")
        return
    rows = [
        (
            entry.phase,
            entry.kind,
            ",".join(entry.axes),
            format_count(entry.count),
            format_bytes(entry.bytes),
            format_bytes(entry.bytes * entry.count),
            entry.algorithm,
            format_ns(entry.time_ns * entry.count),
        )
        for entry in document.collectives
    ]
    columns = ("phase", "kind", "axes", "count", "bytes each", "bytes", "algorithm", "time")
    console.print(table(columns, rows, right=("count", "bytes each", "bytes", "time")))


def _print_blocks(console: Console, document: PlanDocument) -> None:
    displays = display_blocks(document.folded)
    for block in document.folded.blocks:
        display = displays.get(block.key)
        if display is None:
            continue
        occurs = f"{display.count} times" if display.count > 1 else "once"
        values = f", i = {display.values}" if display.values else ""
        recompute = f", recompute {', '.join(display.recompute)}" if display.recompute != ("none",) else ""
        heading(console, f"Block {block.id} variant {block.variant}: occurs {occurs}{values}{recompute}")
        console.print(_operators(block, display, document.axis_names))
        parameters = [p for p in document.folded.parameters if (p.block, p.variant) == block.key]
        if parameters:
            console.print()
            console.print(_parameters(parameters, display, document.axis_names))
    shared = [parameter for parameter in document.folded.parameters if parameter.block is None]
    if shared:
        heading(console, "Parameters that several occurrences read")
        console.print(_parameters(shared, None, document.axis_names))


def _compact(placements: Placements | None) -> str:
    if placements is None:
        return "-"
    return "[" + " ".join(str(placement) for placement in placements) + "]"


def _operators(block: BlockEntry, display: BlockDisplay, axes: Sequence[str]) -> Table:
    rows = [
        (
            display.names.get(operator.id, operator.id),
            operator.type,
            *operator.strategy,
            " ".join(_compact(operand.placement) if operand else "." for operand in operator.inputs),
            " ".join(_compact(output.placement) for output in operator.outputs),
        )
        for operator in block.operators
    ]
    return table(("operator", "type", *axes, f"inputs [{' '.join(axes)}]", "outputs"), rows)


def _parameters(entries: Iterable[ParameterEntry], display: BlockDisplay | None, axes: Sequence[str]) -> Table:
    rows = []
    for entry in entries:
        decision = entry.decision
        name = decision.name if display is None else display.names.get(decision.name, decision.name)
        over = ",".join(axes[axis] for axis in decision.zero_axes)
        rows.append(
            (
                name,
                "x".join(map(str, decision.shape)) or "scalar",
                decision.dtype,
                _compact(decision.placement),
                _compact(decision.gradient) if decision.trainable else "frozen",
                f"{decision.zero_level}{f' over {over}' if over else ''}" if decision.trainable else "-",
            )
        )
    columns = ("parameter", "shape", "dtype", f"placement [{' '.join(axes)}]", "gradient", "ZeRO")
    return table(columns, rows, right=("shape",))


def zero_text(document: PlanDocument) -> str:
    """ZeRO levels of the trained parameters, with the share of their elements where there are several: ``1``, ``2
    (21 %), 3 (79 %)``."""
    counts = Counter[tuple[str | None, int]]()
    for repeat in document.folded.repeats:
        counts[repeat.key] += repeat.count
    elements = Counter[int]()
    for entry in document.folded.parameters:
        if entry.decision.trainable:
            times = 1 if entry.block is None else counts[entry.block, entry.variant]
            elements[entry.decision.zero_level] += times * math.prod(entry.decision.shape)
    total = elements.total()
    levels = {level: count for level, count in sorted(elements.items()) if 100 * count >= total}
    if len(levels) < 2:
        return str(next(iter(levels), "-"))
    return ", ".join(f"{level} ({share(count, total)})" for level, count in levels.items())


def optimizer_text(optimizer: str, states: str) -> str:
    """``adamw``, or ``adamw (bf16 moments)``."""
    return optimizer if states == "fp32" else f"{optimizer} ({states} moments)"


def states_text(document: PlanDocument, choice: StatesChoice) -> str:
    """Which element type AdamW's moments have, and what the other one would have made of the step."""
    chosen = document.optimizer_states
    other, name = (choice.fp32, "fp32") if chosen == "bf16" else (choice.bf16, "bf16")
    own = choice.bf16 if chosen == "bf16" else choice.fp32
    if other.objective_ns is None or own.objective_ns is None:
        least = other.least_memory_bytes
        needs = "none was found that fits" if least is None else f"every plan needs at least {format_bytes(least)}"
        return f"{chosen}; with {name} {needs}"
    change = f"{other.objective_ns / own.objective_ns - 1:+.1%}"
    bound = f", at least {format_ns(other.bound_ns)}" if other.bound_ns not in (None, other.objective_ns) else ""
    return f"{chosen}, {format_ns(own.objective_ns)}; with {name} {format_ns(other.objective_ns)} ({change}{bound})"


def recompute_text(document: PlanDocument) -> str:
    """Recompute settings of the repeated blocks, with their numbers where there are several: ``none 20, full 76``."""
    settings = Counter[str]()
    for repeat in document.folded.repeats:
        if repeat.run is not None:
            settings[repeat.recompute] += repeat.count
    if len(settings) < 2:
        return next(iter(settings), "none")
    return ", ".join(f"{setting} {count}" for setting, count in sorted(settings.items(), key=lambda item: -item[1]))
