"""Reshape rules hold for random shapes, also where the dims do not refine each other."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tap_planner.operators import FactorKind, rule_of
from tests.operators.operator_reference import localise, parts_of, shard, signature, tensor


@st.composite
def _reshapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Two shapes of as many elements: primes multiplied into dims in two random ways."""
    primes = draw(st.lists(st.sampled_from([1, 2, 2, 2, 3, 3, 5]), min_size=1, max_size=7))

    def merged(order: list[int]) -> tuple[int, ...]:
        shape = [1]
        for prime in order:
            if draw(st.booleans()):
                shape[-1] *= prime
            else:
                shape.append(prime)
        return tuple(shape)

    return merged(primes), merged(draw(st.permutations(primes)))


@settings(max_examples=300, deadline=None)
@given(_reshapes(), st.sampled_from([2, 3, 4]))
def test_reshape_of_a_shard_is_the_shard_of_the_reshape(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], ranks: int
) -> None:
    """For every parallel factor, reshaping a rank's part gives its part of the result."""
    before, after = shapes
    sig = signature("Reshape", tensor(*before), shape=after)
    rule = rule_of(sig)
    value = np.arange(np.prod(before)).reshape(before)
    assert rule.inputs[0] is not None
    for factor, found in enumerate(rule.factors):
        if found.kind is FactorKind.FIXED:
            continue
        for part in parts_of(found.size, ranks):
            local = localise(sig, rule, factor, part)
            piece = shard(rule, rule.inputs[0], value, factor, part).reshape(local.outputs[0].shape)
            np.testing.assert_array_equal(piece, shard(rule, rule.outputs[0], value.reshape(after), factor, part))


@settings(max_examples=300, deadline=None)
@given(_reshapes())
def test_outermost_common_factor_is_found(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Where the first dims of both shapes have a common divisor, some factor may be split."""
    before, after = ([size for size in shape if size > 1] for shape in shapes)
    sig = signature("Reshape", tensor(*shapes[0]), shape=shapes[1])
    if before and np.gcd(before[0], after[0]) > 1:
        assert rule_of(sig).factors[0].kind is FactorKind.PARALLEL
