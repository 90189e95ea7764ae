"""Strategies of an operator: per axis one factor to split, ``ring``, ``none`` or ``partial``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.operators import FactorKind, FactorRule, OperatorSignature
from tap_planner.sharding.placement import PARTIAL, REPLICATE, Placement, Placements, dual, fits, shard


@dataclass(frozen=True, slots=True)
class Choice:
    """What an operator does on one axis."""

    kind: str
    """``none``, ``factor``, ``partial`` or ``ring``."""
    index: int = -1
    """Index of the factor, of the way in ``FactorRule.partial`` or of the ring in ``FactorRule.rings``."""
    blocks: int = 1
    """The factor is split inside each of so many equal blocks (a fused projection)."""

    def name(self, rule: FactorRule) -> str:
        """Name in the plan: ``none``, ``m``, ``n[3]``, ``ring``, ``partial`` or ``partial[1]``."""
        if self.kind == "none":
            return "none"
        if self.kind in ("partial", "ring"):
            return self.kind if self.index == 0 else f"{self.kind}[{self.index}]"
        name = rule.factors[self.index].name
        return name if self.blocks == 1 else f"{name}[{self.blocks}]"

    def divides(self, rule: FactorRule) -> int | None:
        """The factor of which each rank computes a part, if any."""
        if self.kind == "ring":
            return rule.rings[self.index].queries
        return self.index if self.kind == "factor" else None

    def spreads(self, rule: FactorRule) -> int | None:
        """The factor that the collectives inside the operator are about: the one that is split, or whose parts go
        round."""
        return rule.rings[self.index].keys if self.kind == "ring" else self.divides(rule)


def parse_choice(rule: FactorRule, name: str) -> Choice:
    """The choice that a plan calls ``name``.

    Raises:
        ValueError: the rule has none of that name.
    """
    word, _, number = name.partition("[")
    index = int(number.rstrip("]")) if number else 0
    if word == "none":
        return Choice("none")
    if word in ("partial", "ring") and index < len(rule.partial if word == "partial" else rule.rings):
        return Choice(word, index)
    for position, factor in enumerate(rule.factors):
        if factor.name == word:
            return Choice("factor", position, max(index, 1))
    raise ValueError(f"the operator has no choice {name!r}")


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
    """Local size of every factor of the rule (the largest shard): what a rank computes."""
    input_passes: tuple[int, ...]
    """How many parts of each operand pass through a rank: those of all ranks of a ring, else its own."""

    def names(self, rule: FactorRule) -> tuple[str, ...]:
        """Names of the choices, per axis, as the plan writes them."""
        return tuple(choice.name(rule) for choice in self.choices)

    def axes_over(self, rule: FactorRule, factor: int) -> tuple[int, ...]:
        """Axes that split a factor, or on which its parts go round."""
        return tuple(axis for axis, choice in enumerate(self.choices) if choice.spreads(rule) == factor)


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
        if not factor.least_part:
            choices.extend(Choice("factor", index, blocks) for blocks in hints[index])
    for index, way in enumerate(rule.partial):
        if any(letter == "P" and partial_operands[position] for position, letter in enumerate(way)):
            choices.append(Choice("partial", index))
    choices.extend(Choice("ring", index) for index in range(len(rule.rings)))
    return tuple(choices)


def compound_factors(rule: FactorRule) -> frozenset[int]:
    """Factors that share a dim with others: an uneven split would not fall on a boundary."""
    shared: set[int] = set()
    for operand in (*rule.inputs, *rule.outputs):
        for dim in operand or ():
            if len(dim) > 1:
                shared.update(dim)
    return frozenset(shared)


def can_split(length: int, parts: Sequence[int], *, even_only: bool) -> bool:
    """Whether so many elements can be split over axes of these sizes: evenly, or over one axis in parts that are not
    empty, unless they must be equal."""
    total = math.prod(parts)
    return length % total == 0 or not (even_only or len(parts) > 1 or length < total)


def _split_sizes(rule: FactorRule, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """Local factor sizes under ``choices``; None where a factor cannot be split so."""
    if not _even_rings(rule, choices, mesh_shape):
        return None
    compound = compound_factors(rule)
    sizes = [factor.size for factor in rule.factors]
    ranks: dict[int, list[int]] = {}
    blocks: dict[int, int] = {}
    for axis, choice in enumerate(choices):
        index = choice.divides(rule)
        if index is None:
            continue
        if blocks.setdefault(index, choice.blocks) != choice.blocks:
            return None
        ranks.setdefault(index, []).append(mesh_shape[axis])
    for index, parts in ranks.items():
        length, total = sizes[index] // blocks[index], math.prod(parts)
        if not rule.factors[index].allows(total, blocks[index]):
            return None
        if not can_split(length, parts, even_only=index in compound or blocks[index] > 1):
            return None
        sizes[index] = -(-length // total) * blocks[index]
    return tuple(sizes)


def _even_rings(rule: FactorRule, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> bool:
    """Whether all parts that meet in a ring are of one size."""
    for number in {choice.index for choice in choices if choice.kind == "ring"}:
        ring = rule.rings[number]
        rounds = math.prod(mesh_shape[axis] for axis, c in enumerate(choices) if c == Choice("ring", number))
        parts = math.prod(mesh_shape[axis] for axis, c in enumerate(choices) if c.divides(rule) == ring.queries)
        if rule.factors[ring.queries].size % parts or rule.factors[ring.keys].size % rounds:
            return False
    return True


def operand_passes(rule: FactorRule, choices: Sequence[Choice], mesh_shape: tuple[int, ...]) -> tuple[int, ...]:
    """``Strategy.input_passes``: an operand of keys alone goes round; one that holds queries too is read once."""
    passes = [1] * len(rule.inputs)
    for axis, choice in enumerate(choices):
        if choice.kind != "ring":
            continue
        ring = rule.rings[choice.index]
        for position in ring.operands:
            held = {factor for dim in rule.inputs[position] or () for factor in dim}
            if ring.keys in held and ring.queries not in held:
                passes[position] *= mesh_shape[axis]
    return tuple(passes)


def _outer_size(rule: FactorRule, dim: tuple[int, ...], factor: int) -> int:
    size = 1
    for index in dim:
        if index == factor:
            return size
        size *= rule.factors[index].size
    raise AssertionError("factor is not in the dim")


def _held(
    rule: FactorRule, operand: tuple[tuple[int, ...], ...], factor: int, blocks: int, without: Placement
) -> Placement:
    """Placement of an operand under a split of a factor; ``without`` if it does not hold the factor."""
    for dim, factors in enumerate(operand):
        if factor in factors:
            return shard(dim, _outer_size(rule, factors, factor) * blocks)
    return without


def _ring_placement(rule: FactorRule, operand: tuple[tuple[int, ...], ...], choice: Choice, keys: bool) -> Placement:
    """Parts of queries; parts of keys where they are held so; everything else whole."""
    ring = rule.rings[choice.index]
    without = _held(rule, operand, ring.keys, 1, REPLICATE) if keys else REPLICATE
    return _held(rule, operand, ring.queries, 1, without)


def _input_placement(rule: FactorRule, position: int, choice: Choice) -> Placement:
    operand = rule.inputs[position]
    assert operand is not None
    if choice.kind == "none":
        return REPLICATE
    if choice.kind == "partial":
        return PARTIAL if rule.partial[choice.index][position] == "P" else REPLICATE
    if choice.kind == "ring":
        return _ring_placement(rule, operand, choice, position in rule.rings[choice.index].operands)
    counted_once = rule.factors[choice.index].kind is FactorKind.SUM and position in rule.additive
    return _held(rule, operand, choice.index, choice.blocks, PARTIAL if counted_once else REPLICATE)


def _output_placement(rule: FactorRule, position: int, choice: Choice) -> Placement:
    if choice.kind == "none":
        return REPLICATE
    if choice.kind == "partial":
        return PARTIAL
    if choice.kind == "ring":
        return _ring_placement(rule, rule.outputs[position], choice, True)
    summed = rule.factors[choice.index].kind is FactorKind.SUM
    return _held(rule, rule.outputs[position], choice.index, choice.blocks, PARTIAL if summed else REPLICATE)


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
        input_passes=operand_passes(rule, choices, mesh_shape),
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
