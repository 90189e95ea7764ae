"""Matrix products: MatMul, Gemm, Einsum."""

from __future__ import annotations

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators.attributes import flag_of, operand, text_of
from tap_planner.operators.building import Dims, RuleBuilder, aligned, broadcast_shapes, one_of, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorKind,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


def _matmul_rule(signature: OperatorSignature) -> FactorRule:
    """``(b0.., m, k) (b0.., k, n) -> (b0.., m, n)``; a vector has no m or n, a broadcast batch dim no factor."""
    left, right = operand(signature, 0).shape, operand(signature, 1).shape
    builder = RuleBuilder(signature)
    batch_shape = broadcast_shapes(signature, (left[:-2], right[:-2]))
    batch = builder.each("b", batch_shape)
    m = tuple(builder.factor("m", size) for size in left[-2:-1])
    (k,) = (builder.summed("k", size) for size in left[-1:])
    n = tuple(builder.factor("n", size) for size in right[1:][-1:])
    left_dims = (*aligned(left[:-2], batch), *m, k)
    right_dims = (*aligned(right[:-2], batch), k, *n)
    return builder.build((left_dims, right_dims), ((*batch, *m, *n),), partial=one_of(2))


def _matmul_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    left, right = operand(signature, 0), operand(signature, 1)
    if not left.shape or not right.shape:
        raise shape_error(signature, "at least one dim each")
    if left.shape[-1:] != right.shape[-2:][:1]:
        raise shape_error(signature, "equal inner dims")
    batch = broadcast_shapes(signature, (left.shape[:-2], right.shape[:-2]))
    rows = left.shape[-2:-1]
    columns = right.shape[1:][-1:]
    return (TensorType(dtype=left.dtype, shape=(*batch, *rows, *columns)),)


def _gemm_rule(signature: OperatorSignature) -> FactorRule:
    """``(m, k) (k, n) [+ (m, n)] -> (m, n)``; the third operand is added once."""
    rows, columns = signature.outputs[0].shape
    left = operand(signature, 0).shape
    left_transposed, right_transposed = flag_of(signature, "transA"), flag_of(signature, "transB")
    builder = RuleBuilder(signature)
    m = builder.factor("m", rows)
    k = builder.summed("k", left[0] if left_transposed else left[1])
    n = builder.factor("n", columns)
    inputs: list[Dims | None] = [(k, m) if left_transposed else (m, k), (n, k) if right_transposed else (k, n)]
    for bias in signature.inputs[2:]:
        inputs.append(None if bias is None else aligned(bias.shape, (m, n)))
    return builder.build(inputs, ((m, n),), additive=(2,), partial=(("P", "R", "P"), ("R", "P", "P")))


def _gemm_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    left, right = operand(signature, 0), operand(signature, 1)
    if len(left.shape) != 2 or len(right.shape) != 2:
        raise shape_error(signature, "two matrices")
    rows, inner = reversed(left.shape) if flag_of(signature, "transA") else left.shape
    other, columns = reversed(right.shape) if flag_of(signature, "transB") else right.shape
    if inner != other:
        raise shape_error(signature, "equal inner dims")
    return (TensorType(dtype=left.dtype, shape=(rows, columns)),)


def _equation(signature: OperatorSignature) -> tuple[list[str], str]:
    """The indices of each operand and of the result, as the binder has written them out."""
    equation = text_of(signature, "equation").replace(" ", "")
    terms, arrow, result = equation.partition("->")
    if not arrow or "." in equation or terms.count(",") != len(signature.inputs) - 1:
        raise UnsupportedGraphError(
            f"operator Einsum: equation {equation!r}, expected one term per operand, a result and no ellipsis",
            hint="write out all indices of the equation",
        )
    return terms.split(","), result


def _letter_sizes(signature: OperatorSignature, terms: list[str]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for index, term in enumerate(terms):
        shape = operand(signature, index).shape
        if len(shape) != len(term):
            raise shape_error(signature, f"as many dims as indices in {text_of(signature, 'equation')!r}")
        for letter, size in zip(term, shape, strict=True):
            known = sizes.get(letter, 1)
            if known != 1 and size not in (1, known):
                raise shape_error(signature, f"one size for index {letter!r}")
            sizes[letter] = max(known, size) if 0 not in (known, size) else 0
    return sizes


def _einsum_rule(signature: OperatorSignature) -> FactorRule:
    """Every index is a factor, summed over if the output lacks it; the indices of a diagonal are fixed."""
    terms, result = _equation(signature)
    sizes = _letter_sizes(signature, terms)
    builder = RuleBuilder(signature)
    factors: dict[str, DimFactors] = {}
    for letter, size in sizes.items():
        if any(term.count(letter) > 1 for term in terms):
            factors[letter] = builder.fixed(letter, size)
        elif letter in result:
            factors[letter] = builder.factor(letter, size, FactorKind.PARALLEL)
        else:
            factors[letter] = builder.summed(letter, size)
    inputs = [
        tuple(
            () if size == 1 else factors[letter]
            for letter, size in zip(term, operand(signature, index).shape, strict=True)
        )
        for index, term in enumerate(terms)
    ]
    return builder.build(inputs, (tuple(factors[letter] for letter in result),), partial=one_of(len(terms)))


def _einsum_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    terms, result = _equation(signature)
    sizes = _letter_sizes(signature, terms)
    return (TensorType(dtype=operand(signature, 0).dtype, shape=tuple(sizes[letter] for letter in result)),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="MatMul",
        rule=_matmul_rule,
        infer=_matmul_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(0, 1),
    ),
    OperatorRecord(
        type="Gemm",
        rule=_gemm_rule,
        infer=_gemm_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(0, 1, 2),
    ),
    OperatorRecord(
        type="Einsum",
        rule=_einsum_rule,
        infer=_einsum_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(0, 1),
        trainable_operands=(0, 1),
    ),
)
"""Records of the matrix products."""
