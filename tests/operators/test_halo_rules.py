"""Space of windowed operators: the halo that a rule states is exactly what the parts of the result are made from."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tap_planner.operators import FactorKind, FactorRule, InternalCollective, OperatorSignature, rule_of
from tests.operators.halo_cases import SPATIAL_CASES, evaluate, padding_of, pads_of
from tests.operators.operator_cases import name_of
from tests.operators.operator_reference import Array, random_values, signature, tensor


def space_of(rule: FactorRule) -> dict[int, int]:
    """Dim of operand 0 -> its factor that may be split."""
    assert rule.inputs[0] is not None
    found = {dim: factors[0] for dim, factors in enumerate(rule.inputs[0]) if dim > 1 and factors}
    return {dim: factor for dim, factor in found.items() if rule.factors[factor].kind is FactorKind.PARALLEL}


def halo_of(rule: FactorRule, factor: int) -> tuple[int, int]:
    """Rows before and behind a part."""
    return next((found.halo for found in rule.collectives if found.factor == factor and found.halo), (0, 0))


def rows(data: Array, dim: int, start: int, stop: int, beyond: float) -> Array:
    """Rows of a dim; beyond its ends there is padding."""
    size = data.shape[dim]
    inside = np.take(data, range(max(start, 0), min(stop, size)), dim)
    amounts = [(0, 0)] * data.ndim
    amounts[dim] = (max(0, -start), max(0, stop - size))
    return np.pad(inside, amounts, constant_values=beyond)


def part_of_result(sig: OperatorSignature, dim: int, part: int, ranks: int, values: list[Array | None]) -> Array:
    """One part of the result, from the part of operand 0 and the rows that the rule says it needs."""
    rule = rule_of(sig)
    before, after = halo_of(rule, space_of(rule)[dim])
    data = values[0]
    assert data is not None
    chunk = data.shape[dim] // ranks
    beyond = 0.0 if sig.type == "ConvTranspose" else padding_of(sig)
    wide = rows(data, dim, part * chunk - before, (part + 1) * chunk + after, beyond)
    pads = pads_of(sig)
    begin = pads[dim - 2][0]
    count = sig.outputs[0].shape[dim] // ranks
    if sig.type == "ConvTranspose":
        stride = sig.outputs[0].shape[dim] // data.shape[dim]
        pads[dim - 2] = (0, 0)
        whole = evaluate(sig, [wide, *values[1:]], pads)
        start = before * stride + begin
        return rows(whole, dim, start, start + count, 0.0)
    pads[dim - 2] = (0, 0)
    return np.take(evaluate(sig, [wide, *values[1:]], pads), range(count), dim)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("sig", SPATIAL_CASES, ids=name_of)
def test_parts_and_halo_make_the_parts_of_the_result(sig: OperatorSignature, ranks: int) -> None:
    """Each rank's part of operand 0, with the rows of the direct neighbours, gives its part of the result."""
    rule, values = rule_of(sig), random_values(sig)
    whole = evaluate(sig, values, pads_of(sig))
    assert whole.shape == sig.outputs[0].shape
    assert len(space_of(rule)) == whole.ndim - 2
    for dim, factor in space_of(rule).items():
        assert rule.factors[factor].allows(ranks)
        expected = np.split(whole, ranks, dim)
        for part in range(ranks):
            made = part_of_result(sig, dim, part, ranks, values)
            np.testing.assert_allclose(made, expected[part], rtol=1e-11, atol=1e-12)


def read_rows(size: int, kernel: int, stride: int, begin: int, dilation: int, part: range) -> set[int]:
    """Rows of the operand that a range of results reads."""
    read = {o * stride - begin + k * dilation for o in part for k in range(kernel)}
    return {row for row in read if 0 <= row < size}


def reaches_neighbours_only(size: int, result: int, ranks: int, window: tuple[int, int, int, int]) -> bool:
    """Whether equal chunks work out with no rows but those of the direct neighbours."""
    if size % ranks or result % ranks:
        return False
    chunk, count = size // ranks, result // ranks
    return all(
        read_rows(size, *window, range(part * count, (part + 1) * count))
        <= set(range((part - 1) * chunk, (part + 2) * chunk))
        for part in range(ranks)
    )


def test_splits_that_are_allowed() -> None:
    """Of a dim with stride x results rows a convolution allows exactly the splits that direct neighbours can serve."""
    seen = {True: 0, False: 0}
    for size, kernel, stride, begin, end, dilation in itertools.product(
        (8, 9, 12), (1, 2, 3, 5), (1, 2, 3), (0, 1, 2), (0, 1, 2, 3), (1, 2)
    ):
        if size + begin + end < dilation * (kernel - 1) + 1 or begin > dilation * (kernel - 1):
            continue
        sig = signature(
            "Conv",
            tensor(1, 1, size),
            tensor(1, 1, kernel),
            group=1,
            kernel_shape=(kernel,),
            strides=(stride,),
            pads=(begin, end),
            dilations=(dilation,),
        )
        result = sig.outputs[0].shape[2]
        splittable = space_of(rule_of(sig))
        for ranks in range(2, result + 1):
            allowed = 2 in splittable and rule_of(sig).factors[splittable[2]].allows(ranks)
            if splittable and not rule_of(sig).factors[splittable[2]].least_part:
                continue
            possible = reaches_neighbours_only(size, result, ranks, (kernel, stride, begin, dilation))
            assert possible or not allowed
            if size == stride * result and dilation == 1:
                assert allowed == possible, (size, kernel, stride, begin, ranks)
            seen[allowed] += 1
    assert min(seen.values()) > 50


def test_what_is_not_aligned_is_not_split() -> None:
    """Without padding rows are lost at the ends and chunks shift: the dim stays whole, but the other is split."""
    sig = signature("Conv", tensor(1, 2, 8, 8), tensor(2, 2, 3, 3), group=1, pads=(0, 1, 0, 1), kernel_shape=(3, 3))
    assert [rule_of(sig).factors[factor].name for factor in space_of(rule_of(sig)).values()] == ["s1"]


@pytest.mark.parametrize(
    ("name", "attributes"),
    [
        ("Conv", {"kernel_shape": (1, 1), "strides": (2, 2), "pads": (0,) * 4, "group": 1}),
        ("MaxPool", {"kernel_shape": (2, 2), "strides": (2, 2), "pads": (0,) * 4}),
        ("AveragePool", {"kernel_shape": (3, 3), "strides": (3, 3), "pads": (0,) * 4}),
    ],
)
def test_windows_inside_a_part_exchange_nothing(name: str, attributes: dict) -> None:  # type: ignore[type-arg]
    """Windows no longer than their stride lie inside one part: no collective, and no condition on parts."""
    weights = [tensor(3, 3, 1, 1)] if name == "Conv" else []
    rule = rule_of(signature(name, tensor(1, 3, 12, 12), *weights, **attributes))
    assert len(space_of(rule)) == 2 and rule.collectives == ()
    assert all(rule.factors[factor].least_part == 0 for factor in space_of(rule).values())


def exchange(sig: OperatorSignature, name: str) -> InternalCollective:
    """The exchange along a factor."""
    rule = rule_of(sig)
    return next(found for found in rule.collectives if rule.factors[found.factor].name == name)


def test_payload_of_an_exchange() -> None:
    """Rows of both neighbours where there are two, the larger halo where there is one, and what an earlier exchange
    added: counted by hand for a 5x5 kernel, padded by 1 before and 3 behind, on 4 channels of 2 images of 12x8."""
    sig = signature("Conv", tensor(2, 4, 12, 8), tensor(3, 4, 5, 5), group=1, pads=(1, 1, 3, 3), kernel_shape=(5, 5))
    rule = rule_of(sig)
    names = [factor.name for factor in rule.factors]

    def elements(name: str, **ranks: int) -> int:
        counts = [ranks.get(known, 1) for known in names]
        sizes = [factor.size // count for factor, count in zip(rule.factors, counts, strict=True)]
        return exchange(sig, name).num_elements(sizes, counts)

    assert elements("s0", s0=2) == 2 * 4 * 3 * 8
    assert elements("s0", s0=3) == 2 * 4 * (1 + 3) * 8
    assert elements("s0", s0=2, n=2, ci=2) == 1 * 2 * 3 * 8
    assert elements("s1", s1=2) == 2 * 4 * 12 * 3
    assert elements("s1", s0=2, s1=2) == 2 * 4 * (6 + 1 + 3) * 3
    assert elements("s0", s0=2, s1=2) == 2 * 4 * 3 * 4
    assert exchange(sig, "s0").times([1] * len(names)) == 0
    assert exchange(sig, "s0").backward_of == 0
