"""The registry: what is known, what stands in for the unknown, and what records promise."""

from __future__ import annotations

import pytest

import tap_planner.operators
from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators import (
    ComputeKind,
    FactorKind,
    OperatorSignature,
    known_types,
    lookup,
    rule_of,
)
from tests.operators.operator_cases import CASES
from tests.operators.operator_reference import index_type, signature, tensor

_MODEL_TYPES = (
    *("Abs", "Add", "And", "ArgMax", "AveragePool", "BatchNormalization", "Cast", "Clip", "Concat"),
    *("ConstantOfShape", "Conv", "ConvTranspose", "Cos", "CumSum", "Div", "Dropout", "Einsum", "Equal", "Erf"),
    *("Exp", "Expand", "Gather", "GatherElements", "GatherND", "Gelu", "Gemm", "GlobalAveragePool", "Greater"),
    *("GreaterOrEqual", "GroupNormalization", "InstanceNormalization", "IsNaN", "LRN", "LayerNormalization", "Less"),
    *("LessOrEqual", "Log", "LogSoftmax", "Loss", "MatMul", "Max", "MaxPool", "Min", "Mul", "Neg", "Not", "OneHot"),
    *("Or", "Pad", "Pow", "RMSNormalization", "Range", "Reciprocal", "ReduceMax", "ReduceMean", "ReduceSum", "Relu"),
    *("Reshape", "Resize", "ScatterElements", "ScatterND", "Shape", "Sigmoid", "Sin", "Slice", "Softmax", "Split"),
    *("Sqrt", "Sub", "Sum", "Tanh", "Tile", "TopK", "Transpose", "Trilu", "Where"),
)

_WITHOUT_CASE = {
    "Shape",
    "Size",
    "ConstantOfShape",
    "Range",
    "BitShift",
    "BitwiseNot",
    "Acosh",
    "Swish",
    "If",
    "Loop",
    "Scan",
}


@pytest.mark.parametrize("type", _MODEL_TYPES)
def test_types_of_the_models_are_known(type: str) -> None:
    """Every operator type that exported models use has a record under its own name."""
    assert lookup(type).known
    assert lookup(type).type == type


def test_every_rule_is_tested() -> None:
    """Each known type occurs in the cases on which rules and shapes are checked, but for the listed ones."""
    tested = {sig.type for sig in CASES}
    without = {type for type in known_types() if type not in tested}
    assert without <= _WITHOUT_CASE | {"GlobalLpPool", "Upsample"}


def test_unknown_operator_is_replicated() -> None:
    """An operator that nobody knows has a record that says so, and no factor of it may be split."""
    sig = OperatorSignature(type="com.example::Magic", attributes=(), inputs=(tensor(2, 3), None), outputs=(tensor(4),))
    assert not lookup(sig.type).known
    rule = rule_of(sig)
    assert {factor.kind for factor in rule.factors} == {FactorKind.FIXED}
    assert rule.inputs[1] is None
    assert rule.partial == ()


def test_unknown_operator_has_no_shapes() -> None:
    """The shapes of an unknown operator cannot be inferred; the error names it."""
    with pytest.raises(UnsupportedGraphError, match=r"com\.example::Magic"):
        signature("com.example::Magic", tensor(2, 3))


def test_equal_signatures_share_one_rule() -> None:
    """The rule of a signature is worked out once."""
    assert rule_of(signature("Relu", tensor(2, 3))) is rule_of(signature("Relu", tensor(2, 3)))


def test_public_names_exist() -> None:
    """Every name in __all__ is there."""
    assert all(hasattr(tap_planner.operators, name) for name in tap_planner.operators.__all__)


def test_compute_kinds() -> None:
    """Products use the matrix units, a Reshape costs nothing, the rest moves bytes."""
    contraction = {type for type in known_types() if lookup(type).kind is ComputeKind.CONTRACTION}
    assert contraction >= {"MatMul", "Gemm", "Einsum", "Conv", "ConvTranspose", "Attention", "MatMulInteger"}
    assert not contraction & {"Add", "Softmax", "Gather", "LayerNormalization", "MaxPool", "QuantizeLinear"}
    views = {type for type in known_types() if lookup(type).kind is ComputeKind.VIEW}
    assert views == {"Reshape", "Identity", "Output", "Transfer"}


def _names(sig: OperatorSignature, dims: tuple[tuple[int, ...], ...] | None) -> list[list[str]]:
    return [[rule_of(sig).factors[factor].name for factor in content] for content in dims or ()]


def _kinds(sig: OperatorSignature, dims: tuple[tuple[int, ...], ...] | None) -> list[list[str]]:
    return [[rule_of(sig).factors[factor].kind.value for factor in content] for content in dims or ()]


def test_stacked_matmul_has_a_factor_per_leading_dim() -> None:
    """x[b, s, k] @ W[k, n]: batch and sequence are factors of their own, k is a sum, and the weight holds k and n."""
    sig = signature("MatMul", tensor(2, 4, 6), tensor(6, 8))
    assert _names(sig, rule_of(sig).inputs[0]) == [["b0"], ["m"], ["k"]]
    assert _names(sig, rule_of(sig).inputs[1]) == [["k"], ["n"]]
    assert _kinds(sig, rule_of(sig).inputs[1]) == [["sum"], ["parallel"]]


def test_bias_of_gemm_is_additive() -> None:
    """Gemm's third operand counts once where k is split."""
    assert rule_of(signature("Gemm", tensor(4, 6), tensor(6, 8), tensor(8))).additive == {2}
    assert rule_of(signature("Gemm", tensor(4, 6), tensor(6, 8))).additive == frozenset()


def test_heads_are_the_outer_factor_of_a_split_hidden_dim() -> None:
    """[B, S, H] -> [B, S, heads, width]: heads may be split, the width inside them may not."""
    sig = signature("Reshape", tensor(2, 4, 12288), shape=(2, 4, 96, 128))
    assert _kinds(sig, rule_of(sig).inputs[0]) == [["parallel"], ["parallel"], ["parallel", "fixed"]]


def test_fused_qkv_reshape_allows_heads_inside_three_blocks() -> None:
    """[B, S, 3H] -> [B, S, 3, N, D]: heads may be split inside each of the three blocks."""
    sig = signature("Reshape", tensor(2, 4, 192), shape=(2, 4, 3, 8, 8))
    assert _kinds(sig, rule_of(sig).inputs[0])[2] == ["parallel", "parallel", "fixed"]


def test_merged_batch_and_heads_are_both_parallel() -> None:
    """[B, H, S, D] -> [B*H, S, D]: heads inside the batch may be split though there are many blocks."""
    sig = signature("Reshape", tensor(32, 12, 4, 8), shape=(384, 4, 8))
    assert _kinds(sig, rule_of(sig).outputs[0])[0] == ["parallel", "parallel"]


def test_dims_that_do_not_refine_share_their_outermost_factor() -> None:
    """[6, 4] -> [8, 3]: the common outer 2 may be split, the rest may not."""
    sig = signature("Reshape", tensor(6, 4), shape=(8, 3))
    rule = rule_of(sig)
    assert rule.inputs[0] is not None
    assert rule.inputs[0][0][0] == rule.outputs[0][0][0]
    assert rule.factors[rule.outputs[0][0][0]].size == 2
    assert [factor.kind.value for factor in rule.factors].count("parallel") == 1


def test_equal_split_shares_the_part() -> None:
    """Split of fused QKV: the input's dim is (3, f), every output's f, so that a shard inside the blocks passes."""
    sig = signature("Split", tensor(4, 12), num_outputs=3, axis=1, split=(4, 4, 4))
    assert _names(sig, rule_of(sig).inputs[0])[1] == ["c", "f"]
    assert _kinds(sig, rule_of(sig).inputs[0])[1] == ["fixed", "parallel"]
    assert all(_names(sig, dims)[1] == ["f"] for dims in rule_of(sig).outputs)


def test_grouped_convolution_splits_groups_only() -> None:
    """In a grouped convolution channels move with their group; a plain one splits in- and out-channels."""
    window = {"kernel_shape": (1, 1), "strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1)}
    grouped = signature("Conv", tensor(4, 6, 8, 8), tensor(9, 2, 1, 1), **window, group=3)
    assert _kinds(grouped, rule_of(grouped).outputs[0])[1] == ["parallel", "fixed"]
    assert {factor.kind for factor in rule_of(grouped).factors} == {FactorKind.PARALLEL, FactorKind.FIXED}
    plain = signature("Conv", tensor(4, 6, 8, 8), tensor(9, 6, 1, 1), **window, group=1)
    assert _kinds(plain, rule_of(plain).inputs[1])[:2] == [["parallel"], ["sum"]]


@pytest.mark.parametrize(
    ("sig", "multiplications"),
    [
        (signature("MatMul", tensor(2, 4, 6), tensor(6, 8)), 2 * 4 * 6 * 8),
        (signature("Gemm", tensor(4, 6), tensor(6, 8)), 4 * 6 * 8),
        (signature("Einsum", tensor(4, 3, 6), tensor(4, 5, 6), equation="gse,gte->sgt"), 4 * 3 * 5 * 6),
        (
            signature("Conv", tensor(4, 6, 8, 9), tensor(9, 2, 3, 3), group=3, pads=(1, 1, 1, 1), strides=(2, 2)),
            4 * 9 * 2 * 9 * 4 * 5,
        ),
        (signature("ConvTranspose", tensor(4, 6, 8, 9), tensor(6, 4, 3, 3), group=1), 4 * 6 * 4 * 9 * 72),
        (signature("Attention", tensor(2, 6, 4, 8), tensor(2, 3, 5, 8), tensor(2, 3, 5, 8)), 2 * 2 * 6 * 4 * 5 * 8),
        (signature("Attention", tensor(2, 6, 4, 8), tensor(2, 6, 5, 8), tensor(2, 6, 5, 3)), 2 * 6 * 4 * 5 * (8 + 3)),
        (signature("com.microsoft::FusedMatMul", tensor(6, 4), tensor(8, 6), transA=1, transB=1), 4 * 6 * 8),
        (
            signature("com.microsoft::Attention", tensor(2, 3, 5), tensor(5, 48), num_heads=4),
            2 * 3 * 5 * 48 + 2 * (2 * 4 * 3 * 3 * 4),
        ),
    ],
    ids=lambda value: value.type if isinstance(value, OperatorSignature) else "",
)
def test_factors_multiply_to_the_work(sig: OperatorSignature, multiplications: int) -> None:
    """The product of a contraction's factors, without layout, is the number of its multiplications (FLOPs = 2 x)."""
    rule, product = rule_of(sig), 1
    for index, factor in enumerate(rule.factors):
        product *= 1 if index in rule.layout else factor.size
    assert product == multiplications


def test_integers_are_never_summed_or_partial() -> None:
    """Integer tensors have neither SUM factors nor partial ways."""
    for sig in (
        signature("Gather", index_type(10, 6), index_type(4), axis=0),
        signature("ReduceSum", index_type(4, 6), axes=(1,), keepdims=0),
        signature("Add", index_type(4), index_type(4)),
        signature("Cast", tensor(4), to="int64"),
    ):
        assert FactorKind.SUM not in {factor.kind for factor in rule_of(sig).factors}
        assert rule_of(sig).partial == ()


@pytest.mark.parametrize("type", ["Relu", "Exp", "Gelu", "Max", "Softmax", "LayerNormalization", "MaxPool", "Pow"])
def test_nonlinear_operators_let_no_partial_through(type: str) -> None:
    """P(sum) is reduced before an operator that is not linear."""
    assert not any(rule_of(sig).partial for sig in CASES if sig.type == type)


@pytest.mark.parametrize("type", ["Equal", "Not", "ArgMax", "OneHot", "Shape", "Floor", "IsNaN"])
def test_no_gradient_flows_through_discrete_operators(type: str) -> None:
    """Operators with discrete results have no differentiable operand."""
    assert lookup(type).differentiable_operands == ()


def test_weight_roles() -> None:
    """Weights, biases, tables and scales are trainable operands; statistics and indices are not."""
    assert lookup("Gemm").trainable_operands == (0, 1, 2)
    assert lookup("Conv").trainable_operands == (1, 2)
    assert lookup("Gather").trainable_operands == (0,)
    assert lookup("BatchNormalization").trainable_operands == (1, 2)
    assert lookup("BatchNormalization").differentiable_operands == (0, 1, 2)
    assert lookup("Where").differentiable_operands == (1, 2)
