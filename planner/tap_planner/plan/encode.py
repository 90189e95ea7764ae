"""Plan document -> JSON values, with the keys in schema order; keys whose value is the default may be left out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from tap_planner.cluster import rank_positions
from tap_planner.operators import rule_to_json
from tap_planner.plan.certificate import ProofEntry, ShareEntry
from tap_planner.plan.decisions import OperandDecision, OperatorDecision, ParameterDecision
from tap_planner.plan.document import (
    KIND,
    SCHEMA_URI,
    BlockEntry,
    BucketEntry,
    CollectiveEntry,
    IdleDevices,
    IdlePlaces,
    MeshSection,
    ParameterEntry,
    PipelineSection,
    PlanDocument,
    RedistributionEntry,
    RepeatEntry,
    row_major_ranks,
)
from tap_planner.plan.names import encode_list, encode_names
from tap_planner.plan.optimizer_states import states_to_json
from tap_planner.plan.options import DEFAULT_SCHEDULE, PlanOptions
from tap_planner.plan.overlap import AS_LIBRARY
from tap_planner.plan.placement import placement_to_json
from tap_planner.plan.rules import Constraint
from tap_planner.sharding import Placements, Step

Json = dict[str, object]

_LISTED_RANKS = 64
"""Meshes of more ranks write a row-major order as its shape."""


def document_to_json(document: PlanDocument) -> Json:
    """The whole plan; ``digests`` is left out while they are not computed."""
    axes = document.axis_names
    folded = document.folded
    json: Json = {
        "$schema": SCHEMA_URI,
        "format_version": document.format_version,
        "kind": KIND,
        "producer": {
            "name": document.producer.name,
            "version": document.producer.version,
            "ortools": document.producer.ortools,
        },
        "inputs": _inputs(document),
        "options": options_to_json(document.options),
        "mesh": _mesh(document.mesh),
        "pipeline": _pipeline(document.pipeline),
        **_optimizer(document.optimizer_states),
        "parameters": [_parameter(entry, axes) for entry in folded.parameters],
        "blocks": [_block(entry, axes) for entry in folded.blocks],
        "repeats": [_repeat(entry) for entry in folded.repeats],
        "redistributions": [_redistribution(entry, axes) for entry in folded.redistributions],
        "buckets": [_bucket(entry, axes) for entry in folded.buckets],
        "collectives": [_collective(entry) for entry in document.collectives],
        **_idle(document.idle),
        **({} if document.placement is None else {"placement": placement_to_json(document.placement)}),
        "predicted": _predicted(document),
        "certificate": _certificate(document),
    }
    if document.digests is not None:
        json["digests"] = {"decisions": document.digests.decisions, "plan": document.digests.plan}
    return json


def _listed(value: int | tuple[int, ...]) -> object:
    return list(value) if isinstance(value, tuple) else value


def _sorted(mapping: Mapping[str, object]) -> Json:
    return {key: mapping[key] for key in sorted(mapping)}


def _inputs(document: PlanDocument) -> Json:
    model = document.model
    return {
        "model": {
            "name": model.name,
            "file_sha256": model.file_sha256,
            "graph_digest": model.graph_digest,
            "dims": _sorted(model.dims),
            "batch": model.batch,
        },
        "cluster": dict(document.cluster),
    }


def options_to_json(options: PlanOptions) -> Json:
    """The options section."""
    loss = None if options.loss is None else {"kind": options.loss, "output": options.loss_output}
    json: Json = {
        "mode": options.mode,
        "batch": options.batch,
        "precision": options.precision,
        "optimizer": options.optimizer,
        **_unless_fp32("optimizer_states", options.optimizer_states),
        "loss": loss,
        "cost": options.cost,
        "zero": options.zero,
        "microbatches": options.microbatches,
        "recompute": options.recompute,
        "mesh": options.mesh,
        "max_axes": options.max_axes,
        "gap_basis_points": options.gap_basis_points,
        "max_memory_bytes": options.max_memory_bytes,
        "constraints": [_constraint(constraint) for constraint in options.constraints],
        "dims": _sorted(options.dims),
        "shapes": {name: list(options.shapes[name]) for name in sorted(options.shapes)},
        "values": _sorted({name: _listed(value) for name, value in options.values.items()}),
        "batch_dim": options.batch_dim,
        "freeze": list(options.freeze),
        "train": list(options.train),
    }
    if options.objective != "time":
        json["objective"] = options.objective
    if options.method != "sharding":
        json["method"] = options.method
    if options.traversal_order != "auto":
        json["traversal_order"] = options.traversal_order
    if options.places:
        json["places"] = [{"operators": rule.pattern, "where": rule.where} for rule in options.places]
    if options.overlap != AS_LIBRARY:
        json["overlap"] = options.overlap
    if options.target is not None:
        json["target"] = options.target
    if options.allow_idle:
        json["allow_idle"] = True
    if options.stages != 1:
        json["stages"] = options.stages
    if options.schedule != DEFAULT_SCHEDULE:
        json["schedule"] = options.schedule
    if options.order:
        json["order"] = list(options.order)
    if options.chunks is not None:
        json["chunks"] = options.chunks
    if options.max_regret_basis_points is not None:
        json["max_regret_basis_points"] = options.max_regret_basis_points
    if options.custom_rules:
        json["custom_rules"] = [rule_to_json(rule) for rule in options.custom_rules]
    return json


def _unless_fp32(key: str, states: str) -> Json:
    """Absent where AdamW's moments are what they are by default."""
    return {} if states == "fp32" else {key: states}


def _constraint(constraint: Constraint) -> Json:
    json: Json = {"kind": constraint.kind}
    if constraint.kind != "batch":
        json["operators"] = constraint.pattern
    if constraint.kind != "replicate":
        json["axis"] = constraint.axis
    if constraint.value:
        json["value"] = constraint.value
    json["rule"] = "forbid" if constraint.forbid else "require"
    return json


def _mesh(mesh: MeshSection) -> Json:
    return {
        "axes": [{"name": axis.name, "size": axis.size, "levels": list(axis.levels)} for axis in mesh.axes],
        **({"device_order": [mesh.axes[axis].name for axis in mesh.order]} if mesh.order else {}),
        "ranks": _ranks(mesh),
        **_idle_places(mesh.idle_devices),
    }


def _idle_places(idle: Sequence[IdlePlaces]) -> Json:
    """Absent where the mesh uses all devices."""
    entries = [{"first": list(places.first), "last": list(places.last)} for places in idle]
    return {"idle_devices": entries} if entries else {}


def _ranks(mesh: MeshSection) -> object:
    ranks, sizes = mesh.ranks, [axis.size for axis in mesh.axes]
    if len(ranks) > _LISTED_RANKS:
        shape = tuple(max(place) + 1 for place in zip(*ranks, strict=True))
        positions = rank_positions(sizes, mesh.order, len(ranks) // math.prod(sizes))
        laid = sorted(zip(positions.tolist(), ranks, strict=True))
        if tuple(place for _, place in laid) == row_major_ranks(shape):
            return {"order": "row-major", "shape": list(shape)}
    return [list(place) for place in ranks]


def _pipeline(pipeline: PipelineSection) -> Json:
    staged = pipeline.num_stages > 1
    return {
        "stages": [
            ({"stage": stage.stage} if staged else {}) | {"first": stage.first, "last": stage.last}
            for stage in pipeline.stages
        ],
        "schedule": pipeline.schedule,
        "microbatches": pipeline.microbatches,
        **({"order": list(pipeline.order)} if pipeline.order else {}),
        **({"scatter": list(pipeline.scatter)} if pipeline.scatter else {}),
    }


def _optimizer(states: str) -> Json:
    """Absent where AdamW's moments are what they are by default."""
    return {"optimizer": section} if (section := _unless_fp32("states", states)) else {}


def _placements(placements: Placements, axes: Sequence[str]) -> Json:
    return {axis: str(placement) for axis, placement in zip(axes, placements, strict=True)}


def _optional(placements: Placements | None, axes: Sequence[str]) -> Json | None:
    return None if placements is None else _placements(placements, axes)


def _owner(block: str | None, variant: int) -> Json:
    return {"block": block} if block is None else {"block": block, "variant": variant}


def _parameter(entry: ParameterEntry, axes: Sequence[str]) -> Json:
    decision: ParameterDecision = entry.decision
    json: Json = {"name": decision.name, **_owner(entry.block, entry.variant)}
    if entry.tensors != (decision.name,):
        json["tensors"] = list(entry.tensors)
    return json | {
        "shape": list(decision.shape),
        "dtype": decision.dtype,
        "trainable": decision.trainable,
        "placement": _placements(decision.placement, axes),
        "gradient": _optional(decision.gradient, axes),
        "zero": {"level": decision.zero_level, "axes": [axes[axis] for axis in decision.zero_axes]},
        "bucket": encode_runs(entry.buckets),
    }


def encode_runs(values: Sequence[int | None]) -> list[object]:
    """Run-length code: a value once, ``[value, count]``, or ``[first, count, step]`` for values that count up."""
    runs: list[object] = []
    start = 0
    while start < len(values):
        first = values[start]
        following = values[start + 1] if start + 1 < len(values) else None
        step = 0 if first is None or following is None else following - first
        length = _run_length(values, start, step) if step >= 0 else 1
        if length == 1 or (length == 2 and step > 0):
            runs.append(first)
            length = 1
        else:
            runs.append([first, length, step] if step else [first, length])
        start += length
    return runs


def _run_length(values: Sequence[int | None], start: int, step: int) -> int:
    """Number of values from ``start`` that are equal (step 0) or count up."""
    first = values[start]
    end = start + 1
    while end < len(values) and values[end] == (first if first is None else first + step * (end - start)):
        end += 1
    return end - start


def _block(entry: BlockEntry, axes: Sequence[str]) -> Json:
    return {
        "id": entry.id,
        "variant": entry.variant,
        "operators": [_operator(operator, axes) for operator in entry.operators],
    }


def _operator(operator: OperatorDecision, axes: Sequence[str]) -> Json:
    return {
        "id": operator.id,
        "name": operator.name,
        "type": operator.type,
        "strategy": dict(zip(axes, operator.strategy, strict=True)),
        "inputs": [_operand(operand, axes) for operand in operator.inputs],
        "outputs": [
            {
                "tensor": output.tensor,
                "shape": list(output.shape),
                "placement": _placements(output.placement, axes),
            }
            for output in operator.outputs
        ],
    }


def _operand(operand: OperandDecision | None, axes: Sequence[str]) -> Json | None:
    if operand is None:
        return None
    json: Json = {"tensor": operand.tensor, "placement": _placements(operand.placement, axes)}
    if operand.gradient is not None:
        json["gradient"] = _placements(operand.gradient, axes)
    return json


def _name_table(table: Mapping[str, Sequence[str]]) -> Json:
    return {name: encode_names(names) for name, names in table.items()}


def _repeat(entry: RepeatEntry) -> Json:
    json: Json = {
        "block": entry.block,
        "variant": entry.variant,
        "run": entry.run,
        "count": entry.count,
        "recompute": entry.recompute,
        "names": _name_table(entry.names),
    }
    if entry.labels:
        json["labels"] = _name_table(entry.labels)
    return json


def _redistribution(entry: RedistributionEntry, axes: Sequence[str]) -> Json:
    decision = entry.decision
    json: Json = {"tensor": decision.tensor, **_owner(entry.block, entry.variant)}
    json |= {
        "from": _placements(decision.source, axes),
        "to": _placements(decision.to, axes),
        "gradient": _optional(decision.gradient, axes),
        "forward": _steps(decision.forward, axes),
        "backward": _steps(decision.backward, axes),
        "consumers": encode_list(decision.consumers),
    }
    if entry.count > 1:
        json |= {"count": entry.count, "names": _name_table(entry.names)}
    return json


def _steps(steps: Iterable[Step], axes: Sequence[str]) -> list[Json]:
    return [
        {"kind": step.kind, "axes": [axes[step.axis]], "from": str(step.source), "to": str(step.target)}
        for step in steps
    ]


def _bucket(entry: BucketEntry, axes: Sequence[str]) -> Json:
    json: Json = {"id": entry.id}
    if entry.count > 1:
        json |= {"count": entry.count, "step": entry.step}
    json |= {"axes": [axes[axis] for axis in entry.axes], "dtype": entry.dtype, "zero": entry.zero_level}
    if entry.zero_level and entry.zero_axes != entry.axes:
        json["zero_axes"] = [axes[axis] for axis in entry.zero_axes]
    return json | {"elements": entry.elements}


def _collective(entry: CollectiveEntry) -> Json:
    return {
        "phase": entry.phase,
        "kind": entry.kind,
        "axes": list(entry.axes),
        "algorithm": entry.algorithm,
        "elements": entry.elements,
        "bytes": entry.bytes,
        "count": entry.count,
        "time_ns": entry.time_ns,
    }


def _idle(idle: Sequence[IdleDevices]) -> Json:
    """Absent where no device is idle."""
    entries = [{"axis": item.axis, "first": item.first, "end": item.end, "reason": item.reason} for item in idle]
    return {"idle": entries} if entries else {}


def _predicted(document: PlanDocument) -> Json:
    predicted = document.predicted
    return {
        "step_ns": predicted.step_ns,
        "compute_ns": predicted.compute_ns,
        "communication_ns": predicted.communication_ns,
        "hidden_ns": predicted.hidden_ns,
        "memory_bytes": dict(predicted.memory_bytes),
        **({"stage_memory_bytes": list(predicted.stage_memory_bytes)} if predicted.stage_memory_bytes else {}),
        **({} if predicted.tokens is None else {"tokens": predicted.tokens}),
    }


def _certificate(document: PlanDocument) -> Json:
    certificate, objective = document.certificate, document.options.objective
    unit = "bytes" if objective == "communication" else "ns"
    sent = {
        "objective_bytes": certificate.objective_bytes,
        "bound_bytes": certificate.bound_bytes,
        "lagrangian_bound_bytes": certificate.lagrangian_bound_bytes,
        "objective_ns": certificate.objective_ns,
        "bound_ns": None if objective == "communication" else certificate.bound_ns,
        "lagrangian_bound_ns": certificate.lagrangian_bound_ns,
        "simple_bound_ns": certificate.simple_bound_ns,
    }
    memory = [_proof(entry, "bytes") for entry in certificate.memory_proof]
    time_gap = certificate.time_gap_basis_points
    return {
        **{key: value for key, value in sent.items() if value is not None},
        "gap_basis_points": certificate.gap_basis_points,
        **({} if time_gap is None else {"time_gap_basis_points": time_gap}),
        "status": certificate.status,
        "space": _sorted(certificate.space),
        "not_in_objective": list(certificate.not_in_objective),
        **({} if certificate.near is None else {"near": asdict(certificate.near)}),
        **({} if certificate.states is None else {"optimizer_states": states_to_json(certificate.states)}),
        **({"memory_proof": memory} if memory else {}),
        **({"proof": [_proof(entry, unit) for entry in certificate.proof]} if certificate.proof else {}),
    }


def _shares(entries: Sequence[ShareEntry]) -> Json:
    """By tensor, rows of key and parts."""
    json: dict[str, list[list[list[int]]]] = {}
    for entry in entries:
        json.setdefault(entry.tensor, []).append([list(entry.key), list(entry.parts)])
    return dict(json)


def _proof(entry: ProofEntry, unit: str) -> Json:
    """Keys whose value is the default are left out."""
    json: Json = {"mesh": entry.mesh}
    if entry.part:
        json["part"] = entry.part
    if entry.setting:
        json["setting"] = entry.setting
    if entry.room is not None:
        json["room"] = entry.room
    json["microbatches"] = list(entry.microbatches)
    if entry.and_more:
        json["and_more"] = True
    if entry.and_multiples:
        json["and_multiples"] = True
    json["by"] = entry.by
    if entry.bound_ns:
        json[f"bound_{unit}"] = entry.bound_ns
    if entry.multiplier[0]:
        json["multiplier"] = list(entry.multiplier)
    if entry.graph_of is not None:
        json["graph_of"] = entry.graph_of
    if entry.loose != ():
        json["loose"] = "all" if entry.loose is None else list(entry.loose)
    if entry.shares:
        json["shares"] = _shares(entry.shares)
    if entry.solver_ns is not None:
        json[f"solver_{unit}"] = entry.solver_ns
    return json
