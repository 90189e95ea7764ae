"""Factor rules are true: operators run on shards give the shards, or the terms, of the whole result."""

from __future__ import annotations

import numpy as np
import pytest

from tap_planner.operators import FactorKind, OperatorSignature, rule_of
from tests.operators.operator_cases import CASES, name_of
from tests.operators.operator_reference import Array, Range, localise, parts_of, random_values, run, shard

_AVERAGES = ("ReduceMean", "GlobalAveragePool")

_SPLITS = [
    pytest.param(sig, index, id=f"{name_of(sig)}-{factor.name}")
    for sig in CASES
    for index, factor in enumerate(rule_of(sig).factors)
    if factor.kind is not FactorKind.FIXED and all(item.factor != index for item in rule_of(sig).collectives)
]
"""All factors that may be split alone; that of test_vocabulary_split_uses_the_collectives needs collectives."""


def _local_values(sig: OperatorSignature, factor: int, part: Range, values: list[Array | None]) -> list[Array | None]:
    rule = rule_of(sig)
    local: list[Array | None] = []
    for index, (value, dims) in enumerate(zip(values, rule.inputs, strict=True)):
        piece = None if value is None or dims is None else shard(rule, dims, value, factor, part)
        once = index in rule.additive and rule.factors[factor].kind is FactorKind.SUM
        local.append(piece * 0 if piece is not None and once and part[0] > 0 else piece)
    return local


def _run_part(sig: OperatorSignature, factor: int, part: Range, values: list[Array | None]) -> list[Array]:
    rule = rule_of(sig)
    local_sig, local = localise(sig, rule, factor, part), _local_values(sig, factor, part, values)
    if sig.type == "Gather" and rule.factors[factor].kind is FactorKind.SUM:
        return [_masked_lookup(local_sig, part, local)]
    results = run(local_sig, local)
    if sig.type in _AVERAGES and rule.factors[factor].kind is FactorKind.SUM:
        return [result * (part[1] - part[0]) / rule.factors[factor].size for result in results]
    return results


def _masked_lookup(sig: OperatorSignature, part: Range, values: list[Array | None]) -> Array:
    table, indices, axis = values[0], values[1], sig.attribute("axis")
    assert table is not None and indices is not None and isinstance(axis, int)
    inside = (indices >= part[0]) & (indices < part[1])
    found = np.take(table, np.where(inside, indices - part[0], 0), axis=axis)
    return found * np.expand_dims(inside, tuple(d for d in range(found.ndim) if not axis <= d < axis + indices.ndim))


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("sig", "factor"), _SPLITS)
def test_split_factor_is_true(sig: OperatorSignature, factor: int, ranks: int) -> None:
    """PARALLEL: every rank has its part of the outputs; SUM: the ranks' results add up to the outputs."""
    rule = rule_of(sig)
    values = random_values(sig)
    whole = run(sig, values)
    parts = parts_of(rule.factors[factor].size, ranks)
    results = [_run_part(sig, factor, part, values) for part in parts]
    for index, (expected, dims) in enumerate(zip(whole, rule.outputs, strict=True)):
        if rule.factors[factor].kind is FactorKind.SUM:
            assert all(factor not in content for content in dims)
            np.testing.assert_allclose(sum(result[index] for result in results), expected, rtol=1e-9, atol=1e-12)
            continue
        for part, result in zip(parts, results, strict=True):
            mine = shard(rule, dims, expected, factor, part)
            np.testing.assert_allclose(result[index], mine, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("sig", CASES, ids=name_of)
def test_rule_fits_the_shapes(sig: OperatorSignature) -> None:
    """Each dim holds factors whose product is its size, or none; factor names are unique; no factor has size 1."""
    rule = rule_of(sig)
    names = [factor.name for factor in rule.factors]
    assert len(set(names)) == len(names)
    assert all(factor.size != 1 for factor in rule.factors)
    tensors, held = (*sig.inputs, *sig.outputs), (*rule.inputs, *rule.outputs)
    assert [found is None for found in tensors] == [dims is None for dims in held]
    for found, dims in zip(tensors, held, strict=True):
        if found is None or dims is None:
            continue
        for size, content in zip(found.shape, dims, strict=True):
            product = int(np.prod([rule.factors[factor].size for factor in content], dtype=np.int64))
            assert product == size if content else True


@pytest.mark.parametrize("sig", [sig for sig in CASES if rule_of(sig).partial], ids=name_of)
def test_partial_ways_are_linear(sig: OperatorSignature) -> None:
    """f(x1) + f(x2) = f(x1 + x2) for the operands marked P, with the others the same in both."""
    first, second = random_values(sig, 0), random_values(sig, 1)
    for way in rule_of(sig).partial:
        assert len(way) == len(sig.inputs)
        left = list(first)
        right = [b if letter == "P" else a for letter, a, b in zip(way, first, second, strict=True)]
        both = [
            a + b if letter == "P" and a is not None and b is not None else a
            for letter, a, b in zip(way, first, second, strict=True)
        ]
        terms = zip(run(sig, left), run(sig, right), run(sig, both), strict=True)
        for one, other, total in terms:
            np.testing.assert_allclose(one + other, total, rtol=1e-9, atol=1e-12)


def test_vocabulary_split_uses_the_collectives() -> None:
    """Cross-entropy over a split vocabulary is whole after the all-reduces (max; sum, target) of its rule."""
    sig = next(sig for sig in CASES if sig.attribute("kind") == "cross-entropy")
    rule = rule_of(sig)
    vocabulary = next(index for index, factor in enumerate(rule.factors) if factor.name == "v")
    logits, labels = random_values(sig)
    assert logits is not None and labels is not None and rule.inputs[0] is not None
    pieces = [shard(rule, rule.inputs[0], logits, vocabulary, part) for part in parts_of(10, 3)]
    maxima = np.stack([piece.max(-1) for piece in pieces])
    peak = maxima.max(0)
    sums, targets = 0, 0
    for piece, (start, stop) in zip(pieces, parts_of(10, 3), strict=True):
        inside = (labels >= start) & (labels < stop)
        local = np.take_along_axis(piece - peak[..., None], np.where(inside, labels - start, 0)[..., None], -1)[..., 0]
        sums, targets = sums + np.exp(piece - peak[..., None]).sum(-1), targets + local * inside
    np.testing.assert_allclose((np.log(sums) - targets).sum() / 24, run(sig, [logits, labels])[0], rtol=1e-12)
    assert [(item.factor, item.kind, item.multiplier) for item in rule.collectives] == [
        (vocabulary, "all_reduce", 1),
        (vocabulary, "all_reduce", 2),
    ]
    assert all(np.prod([rule.factors[i].size for i in item.elements]) == peak.size for item in rule.collectives)
