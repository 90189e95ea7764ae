"""The canonical order of decisions: by first use, in graph order.

The order of parameters has a meaning (the flat layout of a bucket); that of redistributions has none. Both follow from
the operators, so that the folded form need not store them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from tap_planner.plan.decisions import (
    BucketDecision,
    Decisions,
    OperatorDecision,
    ParameterDecision,
    RedistributionDecision,
)

Position = tuple[int, int]
"""Index of an operator and of its operand."""


def first_reads(operators: Sequence[OperatorDecision], reads: Mapping[str, str]) -> dict[str, Position]:
    """Where each parameter is first read.

    Args:
        operators: all operators, in graph order.
        reads: tensor to the parameter that it reads.
    """
    found: dict[str, Position] = {}
    for index, operator in enumerate(operators):
        for operand, decision in enumerate(operator.inputs):
            parameter = reads.get(decision.tensor) if decision else None
            if parameter is not None:
                found.setdefault(parameter, (index, operand))
    return found


def order_parameters(
    operators: Sequence[OperatorDecision], parameters: Sequence[ParameterDecision], reads: Mapping[str, str]
) -> tuple[ParameterDecision, ...]:
    """Parameters by first use; those that nothing reads come last, in the order given."""
    positions = first_reads(operators, reads)
    last = (len(operators), 0)
    return tuple(sorted(parameters, key=lambda parameter: positions.get(parameter.name, last)))


def order_redistributions(
    operators: Sequence[OperatorDecision], redistributions: Sequence[RedistributionDecision]
) -> tuple[RedistributionDecision, ...]:
    """Redistributions by their first consumer and its operand; consumers in graph order."""
    index_of = {operator.id: index for index, operator in enumerate(operators)}

    def ordered(decision: RedistributionDecision) -> RedistributionDecision:
        return replace(decision, consumers=tuple(sorted(decision.consumers, key=index_of.__getitem__)))

    def position(decision: RedistributionDecision) -> Position:
        index = index_of[decision.consumers[0]]
        for operand, read in enumerate(operators[index].inputs):
            if read and (read.tensor, read.placement, read.gradient) == _destination(decision):
                return index, operand
        return index, len(operators[index].inputs)

    return tuple(sorted(map(ordered, redistributions), key=position))


def _destination(decision: RedistributionDecision) -> tuple[object, object, object]:
    return decision.tensor, decision.to, decision.gradient


def bucket_members(
    parameters: Sequence[ParameterDecision],
) -> dict[int, tuple[str, ...]]:
    """Names of the parameters of each bucket, in ``parameters`` order."""
    members: dict[int, list[str]] = {}
    for parameter in parameters:
        if parameter.bucket is not None:
            members.setdefault(parameter.bucket, []).append(parameter.name)
    return {bucket: tuple(names) for bucket, names in members.items()}


def canonical_decisions(decisions: Decisions, reads: Mapping[str, str]) -> Decisions:
    """The same decisions in canonical order; this is what ``expand`` gives back after ``fold_decisions``."""
    parameters = order_parameters(decisions.operators, decisions.parameters, reads)
    members = bucket_members(parameters)
    buckets: list[BucketDecision] = []
    for bucket in sorted(decisions.buckets, key=lambda bucket: bucket.id):
        named = members.get(bucket.id, ())
        if sorted(named) != sorted(bucket.parameters):
            raise ValueError(f"bucket {bucket.id} holds {bucket.parameters}, its parameters say {named}")
        buckets.append(replace(bucket, parameters=named))
    return replace(
        decisions,
        parameters=parameters,
        redistributions=order_redistributions(decisions.operators, decisions.redistributions),
        buckets=tuple(buckets),
        regions=tuple(replace(region, occurrence=0) if region.run is None else region for region in decisions.regions),
    )
