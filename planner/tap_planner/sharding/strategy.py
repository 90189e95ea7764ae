"""Strategies of an operator: per axis one factor to split, ``none`` or ``partial``."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.operators import FactorKind, FactorRule, OperatorSignature
from tap_planner.sharding.placement import PARTIAL, REPLICATE, Placement, Placements, dual, fits, shard


@dataclass(frozen=True, slots=True)
class Choice:
    """What an operator does on one axis."""

    kind: str
    """``none``, ``factor`` or ``partial``."""
    index: int = -1
    """Index of the factor, or of the way in ``FactorRule.partial``."""
    blocks: int = 1
    """The factor is split inside each of so many equal blocks (a fused projection)."""

    def name(self, rule: FactorRule) -> str:
        """Name in the plan: ``none``, ``m``, ``n[3]``, ``partial`` or ``partial[1]``."""
        if self.kind == "none":
            return "none"
        if self.kind == "partial":
            return "partial" if self.index == 0 else f"partial[{self.index}]"
        name = rule.factors[self.index].name
        return name if self.blocks == 1 else f"{name}[{self.blocks}]"


NONE = Choice("none")


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to run an operator on a mesh, and the placements that follow from it."""

    choices: tuple[Choice, ...]
    """Per axis."""
    inputs: tuple[Placements | None, ...]
    """Placement that each operand must have; None for an absent operand."""
    input_gradients: tuple[Placements | None, ...]
    """Placement in which backward makes the gradient of each operand (by duality)."""
    outputs: tuple[Placements, ...]
    factor_sizes: tuple[int, ...]
    """Local size of every factor of the rule (the largest shard)."""

    def names(self, rule: FactorRule) -> tuple[str, ...]:
        """Names of the choices, per axis, as the plan writes them."""
        return tuple(choice.name(rule) for choice in self.choices)


def axis_choices(
    rule: FactorRule, hints: Sequence[Sequence[int]], partial_operands: Sequence[bool]
) -> tuple[Choice, ...]:
    """The choices of an operator on one axis, before sizes are looked at.

    Args:
        rule: the operator's factor rule.
        hints: per factor, block counts (> 1) in which it may also be split.
        partial_operands: per operand, whether it can be P(sum): an activation (P of anything else is never useful).
    """
    choices = [NONE]
    for index, factor in enumerate(rule.factors):
        if factor.kind is FactorKind.FIXED or factor.size < 2:
            continue
        choices.append(Choice("factor", index))
        choices.extend(Choice("factor", index, blocks) for blocks in hints[index])
    for index, way in enumerate(rule.partial):
        if any(letter == "P" and partial_operands[position] for position, letter in enumerate(way)):
            choices.append(Choice("partial", index))
    return tuple(choices)


def _compound_factors(rule: FactorRule) -> frozenset[int]:
    """Factors that share a dim with others: an uneven split would not fall on a boundary."""
    shared: set[int] = set()
    for operand in (*rule.inputs, *rule.outputs):
        for dim in operand or ():
            if len(dim) > 1:
                shared.update(dim)
    return frozenset(shared)


def _split_sizes(rule: FactorRule, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Local factor sizes under ``choices``; None where a factor cannot be split so."""
    compound = _compound_factors(rule)
    sizes = [factor.size for factor in rule.factors]
    ranks: dict[int, list[int]] = {}
    blocks: dict[int, int] = {}
    for axis, choice in enumerate(choices):
        if choice.kind != "factor":
            continue
        if blocks.setdefault(choice.index, choice.blocks) != choice.blocks:
            return None
        ranks.setdefault(choice.index, []).append(mesh_shape[axis])
    for index, parts in ranks.items():
        length = sizes[index] // blocks[index]
        total = 1
        for part in parts:
            total *= part
        if length % total:
            if index in compound or blocks[index] > 1 or len(parts) > 1 or length < total:
                return None
            length = -(-length // total)
        else:
            length //= total
        sizes[index] = length * blocks[index]
    return tuple(sizes)


def _outer_size(rule: FactorRule, dim: tuple[int, ...], factor: int) -> int:
    size = 1
    for index in dim:
        if index == factor:
            return size
        size *= rule.factors[index].size
    raise AssertionError("factor is not in the dim")


def _operand_placement(
    rule: FactorRule, operand: tuple[tuple[int, ...], ...], choice: Choice, without: Placement
) -> Placement:
    """Placement of an operand under a factor split; ``without`` if it does not hold the factor."""
    for dim, factors in enumerate(operand):
        if choice.index in factors:
            return shard(dim, _outer_size(rule, factors, choice.index) * choice.blocks)
    return without


def _input_placement(rule: FactorRule, position: int, choice: Choice) -> Placement:
    operand = rule.inputs[position]
    assert operand is not None
    if choice.kind == "none":
        return REPLICATE
    if choice.kind == "partial":
        return PARTIAL if rule.partial[choice.index][position] == "P" else REPLICATE
    counted_once = rule.factors[choice.index].kind is FactorKind.SUM and position in rule.additive
    return _operand_placement(rule, operand, choice, PARTIAL if counted_once else REPLICATE)


def _output_placement(rule: FactorRule, position: int, choice: Choice) -> Placement:
    if choice.kind == "none":
        return REPLICATE
    if choice.kind == "partial":
        return PARTIAL
    summed = rule.factors[choice.index].kind is FactorKind.SUM
    return _operand_placement(rule, rule.outputs[position], choice, PARTIAL if summed else REPLICATE)


def make_strategy(
    signature: OperatorSignature, rule: FactorRule, choices: tuple[Choice, ...], mesh_shape: tuple[int, ...]
) -> Strategy | None:
    """The strategy with these choices, or None where sizes forbid it (see ``fits`` and definitions.md)."""
    sizes = _split_sizes(rule, choices, mesh_shape)
    if sizes is None:
        return None
    outputs: list[Placements] = []
    for position, output in enumerate(signature.outputs):
        placements = tuple(_output_placement(rule, position, choice) for choice in choices)
        if not fits(output.shape, placements, mesh_shape):
            return None
        outputs.append(placements)
    inputs: list[Placements | None] = []
    gradients: list[Placements | None] = []
    for position, operand in enumerate(signature.inputs):
        if operand is None:
            inputs.append(None)
            gradients.append(None)
            continue
        placements = tuple(_input_placement(rule, position, choice) for choice in choices)
        if not fits(operand.shape, placements, mesh_shape):
            return None
        inputs.append(placements)
        gradients.append(
            tuple(
                PARTIAL
                if placement.is_replicate and any(not output[axis].is_replicate for output in outputs)
                else dual(placement)
                for axis, placement in enumerate(placements)
            )
        )
    return Strategy(
        choices=choices,
        inputs=tuple(inputs),
        input_gradients=tuple(gradients),
        outputs=tuple(outputs),
        factor_sizes=sizes,
    )


def enumerate_strategies(
    signature: OperatorSignature,
    rule: FactorRule,
    mesh_shape: tuple[int, ...],
    hints: Sequence[Sequence[int]],
    partial_operands: Sequence[bool],
) -> tuple[Strategy, ...]:
    """All strategies of an operator on a mesh, in a fixed order; the first is ``none`` on every axis."""
    per_axis = axis_choices(rule, hints, partial_operands)
    found: list[Strategy] = []
    for choices in itertools.product(per_axis, repeat=len(mesh_shape)):
        strategy = make_strategy(signature, rule, choices, mesh_shape)
        if strategy is not None:
            found.append(strategy)
    return tuple(found)
