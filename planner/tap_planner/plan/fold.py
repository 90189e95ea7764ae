"""Decisions -> folded parts of the document: each decision once per block and variant.

Two occurrences share a variant when they become equal after every name is replaced by the order of its first
appearance; so what is written for the first occurrence holds for all, and the names can be told apart by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from tap_planner.plan.decisions import (
    BucketDecision,
    Decisions,
    OperatorDecision,
    ParameterDecision,
    RedistributionDecision,
    Region,
)
from tap_planner.plan.document import (
    BlockEntry,
    BlockKey,
    BucketEntry,
    FoldedDecisions,
    ParameterEntry,
    RedistributionEntry,
    RepeatEntry,
)
from tap_planner.plan.expand import expand_parts
from tap_planner.plan.ordering import canonical_decisions

_ID_DIGITS = 12


def fold_decisions(decisions: Decisions, reads: Mapping[str, str]) -> FoldedDecisions:
    """Fold decisions into blocks and repeats.

    Args:
        decisions: in any order of parameters and redistributions.
        reads: tensor name to the name of the parameter that it reads.

    Returns:
        Parts that ``expand_parts`` turns back into ``canonical_decisions(decisions, reads)``.
    """
    decisions = canonical_decisions(decisions, reads)
    occurrences = _split(decisions, reads)
    keys = _assign_keys(occurrences)
    firsts: dict[BlockKey, _Occurrence] = {}
    for key, occurrence in zip(keys, occurrences, strict=True):
        firsts.setdefault(key, occurrence)
    folded = FoldedDecisions(
        parameters=(*_parameters(keys, occurrences, firsts), *_shared_parameters(decisions, occurrences, reads)),
        blocks=tuple(BlockEntry(id=key[0], variant=key[1], operators=first.operators) for key, first in firsts.items()),
        repeats=_repeats(keys, occurrences, firsts),
        redistributions=(*_redistributions(firsts), *_shared_redistributions(decisions, occurrences)),
        buckets=_buckets(decisions.buckets),
    )
    back = expand_parts(folded)
    if (back.operators, back.parameters, back.redistributions, back.buckets, back.regions) != (
        decisions.operators,
        decisions.parameters,
        decisions.redistributions,
        decisions.buckets,
        decisions.regions,
    ):
        raise AssertionError("folding lost a decision")
    return folded


@dataclass(frozen=True, slots=True, kw_only=True)
class _Occurrence:
    """A region with what belongs to it alone."""

    region: Region
    operators: tuple[OperatorDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    tensors: Mapping[str, tuple[str, ...]]
    """Per parameter the tensors that read it."""
    redistributions: tuple[RedistributionDecision, ...]

    def names(self) -> dict[str, int]:
        """Every name, numbered by first appearance."""
        slots: dict[str, int] = {}
        for operator in self.operators:
            for name in _operator_names(operator):
                slots.setdefault(name, len(slots))
        for parameter in self.parameters:
            slots.setdefault(parameter.name, len(slots))
        return slots


def _operator_names(operator: OperatorDecision) -> Iterable[str]:
    yield operator.id
    yield from (operand.tensor for operand in operator.inputs if operand)
    yield from (output.tensor for output in operator.outputs)


def _split(decisions: Decisions, reads: Mapping[str, str]) -> tuple[_Occurrence, ...]:
    """Cut the decisions at the regions; what several regions use belongs to none."""
    region_of = {name: index for index, region in enumerate(decisions.regions) for name in region.operators}
    by_id = {operator.id: operator for operator in decisions.operators}
    tensors, readers = _reading(decisions, reads, region_of)
    parameters: list[list[ParameterDecision]] = [[] for _ in decisions.regions]
    for parameter in decisions.parameters:
        regions = readers.get(parameter.name, set())
        if len(regions) == 1:
            parameters[next(iter(regions))].append(parameter)
    redistributions: list[list[RedistributionDecision]] = [[] for _ in decisions.regions]
    for redistribution in decisions.redistributions:
        regions = {region_of[consumer] for consumer in redistribution.consumers}
        if len(regions) == 1:
            redistributions[next(iter(regions))].append(redistribution)
    return tuple(
        _Occurrence(
            region=region,
            operators=tuple(by_id[name] for name in region.operators),
            parameters=tuple(parameters[index]),
            tensors={parameter.name: tuple(tensors[parameter.name]) for parameter in parameters[index]},
            redistributions=tuple(redistributions[index]),
        )
        for index, region in enumerate(decisions.regions)
    )


def _reading(
    decisions: Decisions, reads: Mapping[str, str], region_of: Mapping[str, int]
) -> tuple[dict[str, list[str]], dict[str, set[int]]]:
    """Per parameter the tensors that read it, in order of use, and the regions that use them."""
    tensors: dict[str, list[str]] = {}
    readers: dict[str, set[int]] = {}
    for operator in decisions.operators:
        for operand in operator.inputs:
            parameter = reads.get(operand.tensor) if operand else None
            if operand is None or parameter is None:
                continue
            known = tensors.setdefault(parameter, [])
            if operand.tensor not in known:
                known.append(operand.tensor)
            readers.setdefault(parameter, set()).add(region_of[operator.id])
    return tensors, readers


def _assign_keys(occurrences: Sequence[_Occurrence]) -> tuple[BlockKey, ...]:
    """Block id and variant of every occurrence."""
    variants: dict[str, dict[object, int]] = {}
    keys: list[BlockKey] = []
    for occurrence in occurrences:
        slots = occurrence.names()
        block = _signature_id(occurrence, slots)
        known = variants.setdefault(block, {})
        keys.append((block, known.setdefault(_content(occurrence, slots), len(known))))
    return tuple(keys)


def _signature_id(occurrence: _Occurrence, slots: Mapping[str, int]) -> str:
    """Digest of operator types, wiring and shapes, without strategies."""
    signature = [
        [
            operator.type,
            [slots[operand.tensor] if operand else None for operand in operator.inputs],
            [[slots[output.tensor], *output.shape] for output in operator.outputs],
        ]
        for operator in occurrence.operators
    ]
    text = json.dumps(signature, separators=(",", ":"))
    return "b-" + hashlib.sha256(text.encode()).hexdigest()[:_ID_DIGITS]


def _content(occurrence: _Occurrence, slots: Mapping[str, int]) -> object:
    """Everything that occurrences of one variant have in common, hashable, without names."""
    operators = tuple(
        (
            operator.type,
            operator.strategy,
            tuple(o and (slots[o.tensor], o.placement, o.gradient) for o in operator.inputs),
            tuple((slots[o.tensor], o.shape, o.placement) for o in operator.outputs),
        )
        for operator in occurrence.operators
    )
    parameters = tuple(
        (
            replace(parameter, name="", bucket=None),
            slots[parameter.name],
            tuple(slots[tensor] for tensor in occurrence.tensors[parameter.name]),
        )
        for parameter in occurrence.parameters
    )
    redistributions = tuple(
        _redistribution_content(redistribution, slots) for redistribution in occurrence.redistributions
    )
    return operators, parameters, redistributions


def _redistribution_content(decision: RedistributionDecision, slots: Mapping[str, int]) -> object:
    consumers = tuple(slots[consumer] for consumer in decision.consumers)
    return replace(decision, tensor="", consumers=()), slots[decision.tensor], consumers


def _repeats(
    keys: Sequence[BlockKey], occurrences: Sequence[_Occurrence], firsts: Mapping[BlockKey, _Occurrence]
) -> tuple[RepeatEntry, ...]:
    """Run-length code the occurrences."""

    def run_key(index: int) -> object:
        region = occurrences[index].region
        alone = index if region.run is None else -1
        return keys[index], region.run, region.recompute, alone

    entries: list[RepeatEntry] = []
    for _, group in groupby(range(len(keys)), key=run_key):
        indices = list(group)
        members = [occurrences[index] for index in indices]
        region = members[0].region
        key = keys[indices[0]]
        entries.append(
            RepeatEntry(
                block=key[0],
                variant=key[1],
                run=region.run,
                count=len(members),
                recompute=region.recompute,
                names=_names(firsts[key], members),
                labels=_labels(firsts[key], members),
            )
        )
    return tuple(entries)


def _names(first: _Occurrence, members: Sequence[_Occurrence]) -> dict[str, tuple[str, ...]]:
    tables = [tuple(member.names()) for member in members]
    return {name: tuple(table[slot] for table in tables) for slot, name in enumerate(first.names())}


def _labels(first: _Occurrence, members: Sequence[_Occurrence]) -> dict[str, tuple[str, ...]]:
    labels: dict[str, tuple[str, ...]] = {}
    for index, operator in enumerate(first.operators):
        found = tuple(member.operators[index].name for member in members)
        if any(name != operator.name for name in found):
            labels[operator.id] = found
    return labels


def _parameters(
    keys: Sequence[BlockKey], occurrences: Sequence[_Occurrence], firsts: Mapping[BlockKey, _Occurrence]
) -> Iterable[ParameterEntry]:
    members: dict[BlockKey, list[_Occurrence]] = {}
    for key, occurrence in zip(keys, occurrences, strict=True):
        members.setdefault(key, []).append(occurrence)
    for key, first in firsts.items():
        for index, parameter in enumerate(first.parameters):
            yield ParameterEntry(
                block=key[0],
                variant=key[1],
                tensors=first.tensors[parameter.name],
                decision=replace(parameter, bucket=None),
                buckets=tuple(member.parameters[index].bucket for member in members[key]),
            )


def _shared_parameters(
    decisions: Decisions, occurrences: Sequence[_Occurrence], reads: Mapping[str, str]
) -> Iterable[ParameterEntry]:
    owned = {parameter.name for occurrence in occurrences for parameter in occurrence.parameters}
    shared = [parameter for parameter in decisions.parameters if parameter.name not in owned]
    if not shared:
        return
    tensors, _ = _reading(decisions, reads, {operator.id: 0 for operator in decisions.operators})
    for parameter in shared:
        yield ParameterEntry(
            block=None,
            variant=0,
            tensors=tuple(tensors.get(parameter.name, ())),
            decision=replace(parameter, bucket=None),
            buckets=(parameter.bucket,),
        )


def _redistributions(firsts: Mapping[BlockKey, _Occurrence]) -> Iterable[RedistributionEntry]:
    for key, first in firsts.items():
        for redistribution in first.redistributions:
            yield RedistributionEntry(block=key[0], variant=key[1], decision=redistribution)


def _shared_redistributions(decisions: Decisions, occurrences: Sequence[_Occurrence]) -> Iterable[RedistributionEntry]:
    """Those of no region; equal ones (a residual that two neighbours read) are written once, with their names."""
    owned = {id(item) for occurrence in occurrences for item in occurrence.redistributions}
    groups: dict[object, list[RedistributionDecision]] = {}
    for redistribution in decisions.redistributions:
        if id(redistribution) not in owned:
            content = _redistribution_content(redistribution, _own_slots(redistribution))
            groups.setdefault(content, []).append(redistribution)
    for members in groups.values():
        first = members[0]
        tables = [tuple(_own_slots(member)) for member in members]
        names = {name: tuple(table[slot] for table in tables) for slot, name in enumerate(_own_slots(first))}
        yield RedistributionEntry(
            block=None, variant=0, decision=first, count=len(members), names=names if len(members) > 1 else {}
        )


def _own_slots(decision: RedistributionDecision) -> dict[str, int]:
    slots = {decision.tensor: 0}
    for consumer in decision.consumers:
        slots.setdefault(consumer, len(slots))
    return slots


def _buckets(buckets: Sequence[BucketDecision]) -> tuple[BucketEntry, ...]:
    """Write buckets that are alike and whose ids count up as one entry."""
    alike: dict[BucketDecision, list[int]] = {}
    for bucket in buckets:
        alike.setdefault(replace(bucket, id=0, parameters=()), []).append(bucket.id)
    entries = [
        BucketEntry(
            id=first,
            count=count,
            step=step,
            axes=content.axes,
            dtype=content.dtype,
            zero_level=content.zero_level,
            zero_axes=content.zero_axes,
            elements=content.elements,
        )
        for content, ids in alike.items()
        for first, count, step in _progressions(ids)
    ]
    return tuple(sorted(entries, key=lambda entry: entry.id))


def _progressions(ids: Sequence[int]) -> Iterable[tuple[int, int, int]]:
    """Cut rising numbers into (first, count, step)."""
    start = 0
    while start < len(ids):
        end = start + 1
        step = ids[end] - ids[start] if end < len(ids) else 1
        while end < len(ids) and ids[end] - ids[end - 1] == step:
            end += 1
        yield ids[start], end - start, step
        start = end
