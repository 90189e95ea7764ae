"""What changed between two plans, as data: computed on expanded names, folded again for display. Needs no graph."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.operators import TRANSFER
from tap_planner.plan.decisions import Decisions, OperatorDecision, ParameterDecision, RedistributionDecision
from tap_planner.plan.digests import compute_digests
from tap_planner.plan.document import MEMORY_KINDS, PHASES, CollectiveEntry, PlanDocument
from tap_planner.plan.encode import options_to_json
from tap_planner.plan.expand import expand
from tap_planner.plan.names import encode_list, encode_values, find_pattern
from tap_planner.sharding import Placements, Step

Scalar = int | str | None
_MAX_STRIDE = 16
"""Most operators of one layer that are looked for as families of like names."""


class Verdict(enum.Enum):
    """The answer in one phrase."""

    IDENTICAL = "identical"
    """Byte for byte."""
    SAME_DECISIONS = "same decisions"
    """What would run is the same; inputs, options or prediction differ."""
    DECISIONS_CHANGED = "decisions changed"


class ChangeKind(enum.Enum):
    """What happened to an entity."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueChange:
    """A value that differs."""

    name: str
    """Key in the section, as ``device.memory_bytes`` or ``strategy.tp``."""
    old: Scalar
    """None: absent."""
    new: Scalar


@dataclass(frozen=True, slots=True, kw_only=True)
class EntityChange:
    """Operators, parameters or redistributions that changed in the same way."""

    kind: ChangeKind
    name: str
    """Name, or a pattern with ``{i}`` (and ``{j}``, ``{k}``)."""
    values: str
    """The values of i as a series (``0..95``), then those of j and k after semicolons; empty for a single name."""
    count: int
    fields: tuple[ValueChange, ...]
    """What changed; of an added or removed entity its main features."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantityChange:
    """A predicted quantity of both plans (also when it is equal)."""

    name: str
    """``step_ns``, ``memory_bytes.activations``, ``communication_ns.forward``, ...; the unit is in the name."""
    old: int
    new: int

    @property
    def delta(self) -> int:
        """New minus old."""
        return self.new - self.old

    @property
    def basis_points(self) -> int | None:
        """Change in hundredths of a percent of the old value, rounded half up; None where the old value is 0."""
        return None if self.old == 0 else (20_000 * self.delta + self.old) // (2 * self.old)


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveChange:
    """A collective whose count or time differs."""

    phase: str
    kind: str
    axes: tuple[str, ...]
    algorithm: str
    elements: int
    bytes: int
    old_count: int
    """0: only in the new plan."""
    new_count: int
    old_ns: int
    """Time of all calls."""
    new_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanDiff:
    """Everything that two plans differ in."""

    verdict: Verdict
    model: tuple[ValueChange, ...]
    cluster: tuple[ValueChange, ...]
    options: tuple[ValueChange, ...]
    mesh: tuple[ValueChange, ...]
    operators: tuple[EntityChange, ...]
    parameters: tuple[EntityChange, ...]
    redistributions: tuple[EntityChange, ...]
    collectives: tuple[CollectiveChange, ...]
    predicted: tuple[QuantityChange, ...]
    certificate: tuple[ValueChange, ...]

    def quantity(self, name: str) -> QuantityChange:
        """The predicted quantity called ``name``."""
        return next(quantity for quantity in self.predicted if quantity.name == name)


def diff_plans(old: PlanDocument, new: PlanDocument) -> PlanDiff:
    """Compare two plans.

    Raises:
        PlanFormatError: the parts of one of the plans do not fit together.
    """
    verdict = _verdict(old, new)
    changed = verdict is Verdict.DECISIONS_CHANGED
    plans = [(old, expand(old)), (new, expand(new))] if changed else []
    placed = old.placement is not None or new.placement is not None
    return PlanDiff(
        verdict=verdict,
        model=compare_values(_model(old), _model(new)),
        cluster=compare_values(flatten(old.cluster), flatten(new.cluster)),
        options=compare_values(_options(old), _options(new)),
        mesh=compare_values(_mesh(old), _mesh(new)),
        operators=_entities(*(_placed_operators(*plan) if placed else _operators(plan[1]) for plan in plans)),
        parameters=_entities(*(_parameters(decisions) for _, decisions in plans))
        or _entities(*(_buckets(decisions) for _, decisions in plans)),
        redistributions=_entities(*(_redistributions(decisions) for _, decisions in plans)),
        collectives=_collectives(old.collectives, new.collectives),
        predicted=_quantities(old, new),
        certificate=compare_values(_certificate(old), _certificate(new)),
    )


def _verdict(old: PlanDocument, new: PlanDocument) -> Verdict:
    before, after = compute_digests(old), compute_digests(new)
    if before.plan == after.plan:
        return Verdict.IDENTICAL
    return Verdict.SAME_DECISIONS if before.decisions == after.decisions else Verdict.DECISIONS_CHANGED


def flatten(value: object, prefix: str = "") -> dict[str, Scalar]:
    """A JSON value as dotted keys and scalars (its depth is that of a cluster or of options: small)."""
    if isinstance(value, Mapping):
        parts = ((f"{prefix}.{key}" if prefix else str(key), item) for key, item in value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str):
        parts = ((f"{prefix}[{index}]", item) for index, item in enumerate(value))
    else:
        return {prefix: value if isinstance(value, int | str) else None}
    flat: dict[str, Scalar] = {}
    for key, item in parts:
        flat.update(flatten(item, key))
    return flat


def compare_values(old: Mapping[str, Scalar], new: Mapping[str, Scalar]) -> tuple[ValueChange, ...]:
    """The keys whose values differ, in the order of the old plan, then of the new."""
    return tuple(
        ValueChange(name=name, old=old.get(name), new=new.get(name))
        for name in (*old, *(name for name in new if name not in old))
        if old.get(name) != new.get(name)
    )


def _options(document: PlanDocument) -> dict[str, Scalar]:
    options = document.options
    return {"objective": options.objective, "overlap": options.overlap, **flatten(options_to_json(options))}


def _model(document: PlanDocument) -> dict[str, Scalar]:
    model = document.model
    return {
        "name": model.name,
        "file_sha256": model.file_sha256,
        "graph_digest": model.graph_digest,
        "batch": model.batch,
        **{f"dims.{name}": size for name, size in model.dims.items()},
    }


def _mesh(document: PlanDocument) -> dict[str, Scalar]:
    values: dict[str, Scalar] = {
        "axes": " ".join(f"{axis.name}={axis.size}" for axis in document.mesh.lying),
        "split_order": " ".join(document.axis_names) if document.mesh.order else "",
        "microbatches": document.pipeline.microbatches,
        "schedule": document.pipeline.schedule,
        "optimizer_states": document.optimizer_states,
        "stages": document.pipeline.num_stages,
        **_parts(document),
        "scatter": " ".join(document.pipeline.scatter),
        "ranks": " ".join(map(_place, document.mesh.ranks)),
    }
    if document.mesh.idle_devices:
        boxes = (f"{_place(box.first)} to {_place(box.last)}" for box in document.mesh.idle_devices)
        values["idle_devices"] = ", ".join(boxes)
    return values | {f"levels.{axis.name}": ", ".join(axis.levels) for axis in document.mesh.axes}


def _parts(document: PlanDocument) -> dict[str, Scalar]:
    """In what parts the model is cut; of a placement, which deals operators out one by one, how it was found."""
    placement, stages = document.placement, document.pipeline.stages
    if placement is not None:
        return {"placer": placement.placer, "stretches": len(stages)}
    return {
        "chunks": len(stages) // document.pipeline.num_stages,
        "cuts": " ".join(stage.first for stage in stages[1:]),
    }


def _place(place: tuple[int, ...]) -> str:
    return ".".join(map(str, place))


def _certificate(document: PlanDocument) -> dict[str, Scalar]:
    certificate = document.certificate
    sent = document.options.objective == "communication"
    return {
        "objective_bytes": certificate.objective_bytes,
        "bound_bytes": certificate.bound_bytes,
        "objective_ns": certificate.objective_ns,
        "bound_ns": None if sent else certificate.bound_ns,
        "gap_basis_points": certificate.gap_basis_points,
        "time_gap_basis_points": certificate.time_gap_basis_points,
        "status": certificate.status,
    }


def _quantities(old: PlanDocument, new: PlanDocument) -> tuple[QuantityChange, ...]:
    before, after = _predicted(old), _predicted(new)
    names = (*before, *(name for name in after if name not in before))
    return tuple(QuantityChange(name=name, old=before.get(name, 0), new=after.get(name, 0)) for name in names)


def _predicted(document: PlanDocument) -> dict[str, int]:
    predicted = document.predicted
    values = {
        "step_ns": predicted.step_ns,
        "compute_ns": predicted.compute_ns,
        "communication_ns": predicted.communication_ns,
        "hidden_ns": predicted.hidden_ns,
        "sent_bytes": document.sent_bytes,
        "memory_bytes": predicted.total_memory_bytes,
    }
    kinds = (*MEMORY_KINDS, *(kind for kind in predicted.memory_bytes if kind not in MEMORY_KINDS))
    values |= {f"memory_bytes.{kind}": predicted.memory_bytes.get(kind, 0) for kind in kinds}
    for phase in PHASES:
        of_phase = [entry for entry in document.collectives if entry.phase == phase]
        values[f"communication_ns.{phase}"] = sum(entry.time_ns * entry.count for entry in of_phase)
        values[f"communication_bytes.{phase}"] = sum(entry.bytes * entry.count for entry in of_phase)
    return values


def _collectives(old: Sequence[CollectiveEntry], new: Sequence[CollectiveEntry]) -> tuple[CollectiveChange, ...]:
    before, after = _by_key(old), _by_key(new)
    changes: list[CollectiveChange] = []
    for key in (*before, *(key for key in after if key not in before)):
        old_count, old_ns = before.get(key, (0, 0))
        new_count, new_ns = after.get(key, (0, 0))
        if (old_count, old_ns) != (new_count, new_ns):
            phase, kind, axes, algorithm, elements, size = key
            changes.append(
                CollectiveChange(
                    phase=phase,
                    kind=kind,
                    axes=axes,
                    algorithm=algorithm,
                    elements=elements,
                    bytes=size,
                    old_count=old_count,
                    new_count=new_count,
                    old_ns=old_ns,
                    new_ns=new_ns,
                )
            )
    return tuple(changes)


_CollectiveKey = tuple[str, str, tuple[str, ...], str, int, int]


def _by_key(entries: Sequence[CollectiveEntry]) -> dict[_CollectiveKey, tuple[int, int]]:
    found: dict[_CollectiveKey, tuple[int, int]] = {}
    for entry in entries:
        key = (entry.phase, entry.kind, entry.axes, entry.algorithm, entry.elements, entry.bytes)
        count, time_ns = found.get(key, (0, 0))
        found[key] = (count + entry.count, time_ns + entry.count * entry.time_ns)
    return found


Features = dict[str, Scalar]
"""An entity's decisions as named values."""


def _placements(placements: Placements | None, axes: Sequence[str]) -> str | None:
    if placements is None:
        return None
    return " ".join(f"{axis}={placement}" for axis, placement in zip(axes, placements, strict=True)) or "whole"


def _operators(decisions: Decisions) -> dict[str, Features]:
    axes = tuple(axis.name for axis in decisions.axes)
    recompute = {name: region.recompute for region in decisions.regions for name in region.operators}
    return {
        operator.id: _operator_features(operator, axes) | {"recompute": recompute[operator.id]}
        for operator in decisions.operators
    }


def _placed_operators(document: PlanDocument, decisions: Decisions) -> dict[str, Features]:
    """Where one of two plans is a placement: on which device each operator lies; transfers follow from that."""
    features = {name: found for name, found in _operators(decisions).items() if found["type"] != TRANSFER}
    if document.placement is None:
        return features
    for stage, operators in decisions.chunks:
        for operator in operators:
            if operator.id in features:
                features[operator.id]["device"] = _place(document.mesh.ranks[stage])
    return features


def _operator_features(operator: OperatorDecision, axes: Sequence[str]) -> Features:
    features: Features = {"type": operator.type}
    features |= {f"strategy.{axis}": value for axis, value in zip(axes, operator.strategy, strict=True)}
    for index, operand in enumerate(operator.inputs):
        if operand is not None:
            features[f"input {index}"] = _placements(operand.placement, axes)
            features[f"gradient of input {index}"] = _placements(operand.gradient, axes)
    for index, output in enumerate(operator.outputs):
        features[f"output {index}"] = _placements(output.placement, axes)
        features[f"shape of output {index}"] = "x".join(map(str, output.shape)) or "scalar"
    return features


def _parameters(decisions: Decisions) -> dict[str, Features]:
    axes = tuple(axis.name for axis in decisions.axes)
    return {parameter.name: _parameter_features(parameter, axes) for parameter in decisions.parameters}


def _parameter_features(parameter: ParameterDecision, axes: Sequence[str]) -> Features:
    return {
        "shape": "x".join(map(str, parameter.shape)) or "scalar",
        "dtype": parameter.dtype,
        "trainable": "yes" if parameter.trainable else "no",
        "placement": _placements(parameter.placement, axes),
        "gradient": _placements(parameter.gradient, axes),
        "zero": parameter.zero_level,
        "zero axes": " ".join(axes[axis] for axis in parameter.zero_axes) or None,
    }


def _buckets(decisions: Decisions) -> dict[str, Features]:
    """The parameters' buckets, which follow from the rest: of interest only where nothing else about them differs."""
    return {parameter.name: {"bucket": parameter.bucket} for parameter in decisions.parameters}


def _redistributions(decisions: Decisions) -> dict[str, Features]:
    """Keyed by the tensor, numbered where one tensor has several."""
    axes = tuple(axis.name for axis in decisions.axes)
    found: dict[str, Features] = {}
    seen: dict[str, int] = {}
    for decision in decisions.redistributions:
        number = seen.get(decision.tensor, 0)
        seen[decision.tensor] = number + 1
        name = decision.tensor if number == 0 else f"{decision.tensor} ({number + 1})"
        found[name] = _redistribution_features(decision, axes)
    return found


def _redistribution_features(decision: RedistributionDecision, axes: Sequence[str]) -> Features:
    return {
        "from": _placements(decision.source, axes),
        "to": _placements(decision.to, axes),
        "gradient": _placements(decision.gradient, axes),
        "forward": _steps(decision.forward, axes),
        "backward": _steps(decision.backward, axes),
        "consumers": len(decision.consumers),
    }


def _steps(steps: Sequence[Step], axes: Sequence[str]) -> str | None:
    return ", ".join(f"{step.kind}({axes[step.axis]})" for step in steps) or None


def _entities(*described: dict[str, Features]) -> tuple[EntityChange, ...]:
    """Compare entities of two plans (or none) by name and group those that changed alike."""
    if not described:
        return ()
    before, after = described
    groups: dict[tuple[ChangeKind, tuple[ValueChange, ...], str], list[str]] = {}
    for name in (*before, *(name for name in after if name not in before)):
        fields = compare_values(before.get(name, {}), after.get(name, {}))
        if fields:
            groups.setdefault((_kind(name, before, after), fields, _skeleton(name)), []).append(name)
    return tuple(
        EntityChange(kind=kind, name=name, values=values, count=count, fields=fields)
        for (kind, fields, _), names in groups.items()
        for name, values, count in fold_names(names)
    )


def _kind(name: str, before: Mapping[str, Features], after: Mapping[str, Features]) -> ChangeKind:
    if name not in before:
        return ChangeKind.ADDED
    return ChangeKind.CHANGED if name in after else ChangeKind.REMOVED


def _skeleton(name: str) -> str:
    return re.sub(r"[0-9]+", "#", name)


def fold_names(names: Sequence[str]) -> Iterable[tuple[str, str, int]]:
    """Names (with equal skeletons) as (name or pattern, values of i, count)."""
    for group in _families(names):
        found = find_pattern(group) if len(group) > 1 else None
        if found is None:
            yield from ((name, "", 1) for name in group)
        else:
            yield found[0], encode_values(found[1]), len(group)


_Families = Sequence[Sequence[str]]


def _families(names: Sequence[str]) -> _Families:
    """Split names into families in the way that is shortest to write."""
    candidates: list[_Families] = [[names]]
    candidates += [
        [names[start::stride] for start in range(stride)]
        for stride in range(2, min(_MAX_STRIDE, len(names) // 2) + 1)
        if len(names) % stride == 0
    ]
    tokens = [re.split(r"([0-9]+)", name) for name in names]
    candidates += [_masked(names, tokens, place) for place in range(1, len(tokens[0]), 2)]
    return min(candidates, key=lambda families: sum(len(json.dumps(encode_list(family))) + 4 for family in families))


def _masked(names: Sequence[str], tokens: Sequence[Sequence[str]], place: int) -> _Families:
    """Names that are equal but for the number at one place."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name, parts in zip(names, tokens, strict=True):
        groups.setdefault((*parts[:place], "", *parts[place + 1 :]), []).append(name)
    return list(groups.values())
