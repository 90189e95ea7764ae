"""Times and the work of operators."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import catalogue_device
from tap_planner.cost import ComputeModel, Work, is_attention, operator_work, to_ns
from tap_planner.errors import ClusterError, UnsupportedGraphError, UsageError
from tap_planner.operators import ComputeKind, FactorRule, OperatorRecord

A100 = catalogue_device("a100-sxm4-80gb")


def record(type_: str, kind: ComputeKind, saved_inputs: tuple[int, ...] = (), saved_outputs: tuple[int, ...] = ()):
    """A record of which only the cost-relevant part is real."""
    rule = FactorRule(factors=(), inputs=(), outputs=())
    return OperatorRecord(
        type=type_,
        rule=lambda signature: rule,
        infer=lambda signature, count: (),
        kind=kind,
        saved_inputs=saved_inputs,
        saved_outputs=saved_outputs,
    )


def test_matrix_product_time() -> None:
    """A large bf16 product runs at 75 % of 312 TFLOP/s; a small one takes what its launch takes, more backward."""
    flops = 2 * 8192**3
    model = ComputeModel(A100, "bf16")
    expected = flops / (312e12 * 0.75) * 1e9
    assert model.time_ns(flops, 1, ComputeKind.CONTRACTION) == pytest.approx(expected, abs=1)
    assert model.time_ns(flops, 1, ComputeKind.CONTRACTION, backward=True) == pytest.approx(expected, abs=1)
    assert model.time_ns(1, 1, ComputeKind.CONTRACTION) == 25_000
    assert model.time_ns(1, 1, ComputeKind.CONTRACTION, backward=True) == 155_000


def test_memory_time() -> None:
    """A gigabyte takes 1 / (2039 GB/s x 0.94), and an empty product or a view nothing."""
    model = ComputeModel(A100, "bf16")
    assert model.time_ns(0, 10**9, ComputeKind.MEMORY) == pytest.approx(1e9 / (2039e9 * 0.94) * 1e9, abs=1)
    assert model.time_ns(0, 0, ComputeKind.MEMORY) == 0
    assert model.time_ns(0, 10**9, ComputeKind.VIEW) == 0


@pytest.mark.parametrize(("flops", "num_bytes"), [(10**12, 10**9), (10**12, 10**7), (10**9, 10**9)])
def test_work_is_the_sum_of_products_and_traffic(flops: int, num_bytes: int) -> None:
    """Bytes hide behind FLOPs no more than FLOPs behind bytes; only the launch hides behind both."""
    model = ComputeModel(A100, "bf16")
    alone = model.time_ns(flops, 0, ComputeKind.CONTRACTION) + model.time_ns(0, num_bytes, ComputeKind.CONTRACTION)
    exact = (flops / (312e12 * 0.75) + num_bytes / (2039e9 * 0.94)) * 1e9
    found = model.time_ns(flops, num_bytes, ComputeKind.CONTRACTION)
    assert found == pytest.approx(exact, abs=1)
    assert found <= alone


def test_fused_attention_reaches_a_share_of_its_own() -> None:
    """Fused attention may come less near to the peak than products; where no share is known it comes as near."""
    flops = 10**15
    model = ComputeModel(A100, "bf16")
    found = model.time_ns(flops, 0, ComputeKind.CONTRACTION, attention=True)
    assert found == pytest.approx(flops / (312e12 * 0.535) * 1e9, abs=1)
    assert model.times_ns(np.array([flops]), np.array([0]), ComputeKind.CONTRACTION, attention=True).tolist() == [found]
    alike = ComputeModel(dataclasses.replace(A100, attention_efficiency_permille=None), "bf16")
    times = [
        one.time_ns(flops, 0, ComputeKind.CONTRACTION, attention=fused)
        for one in (alike, model)
        for fused in (True, False)
    ]
    assert times[0] == times[1] == times[3] < times[2]


@pytest.mark.parametrize("type_", ["Attention", "com.microsoft::MultiHeadAttention"])
def test_operators_that_are_fused_attention(type_: str) -> None:
    """They are known by their type; the products of attention that is not fused are products."""
    assert is_attention(record(type_, ComputeKind.CONTRACTION))
    assert not is_attention(record("MatMul", ComputeKind.CONTRACTION))


@given(st.lists(st.tuples(st.integers(0, 10**16), st.integers(0, 10**12))), st.sampled_from(ComputeKind), st.booleans())
def test_vectorised_equals_scalar(work: list[tuple[int, int]], kind: ComputeKind, backward: bool) -> None:
    """Arrays give the same integers as single calls."""
    model = ComputeModel(A100, "fp32")
    flops, num_bytes = (np.array([item[i] for item in work], dtype=np.int64) for i in (0, 1))
    found = model.times_ns(flops, num_bytes, kind, backward=backward).tolist()
    assert found == [model.time_ns(f, b, kind, backward=backward) for f, b in work]


@pytest.mark.parametrize(
    ("device", "precision", "dtype"),
    [
        ("a100-sxm4-80gb", "fp32", "float32"),
        ("a100-sxm4-80gb", "fp16", "float16"),
        ("v100-sxm2-32gb", "bf16", "float16"),
        ("cpu-core", "bf16", "float32"),
        ("cpu-core", "fp64", "float64"),
        ("a100-sxm4-80gb", "fp64", "float32"),
    ],
)
def test_peak_that_serves(device: str, precision: str, dtype: str) -> None:
    """A missing peak falls back to the next that can serve."""
    assert ComputeModel(catalogue_device(device), precision).peak_dtype == dtype


def test_no_peak() -> None:
    """A device that cannot serve the precision is named."""
    only_int8 = dataclasses.replace(A100, name="npu", peak_flops={"int8": 10**12})
    with pytest.raises(ClusterError, match="npu has no peak for the precision bf16"):
        ComputeModel(only_int8, "bf16")
    with pytest.raises(UsageError, match="fp8"):
        ComputeModel(A100, "fp8")


def test_element_bytes() -> None:
    """Floats take the precision's size, others their own; int4 is packed."""
    model = ComputeModel(A100, "bf16")
    assert [model.element_bytes(dtype) for dtype in ("float32", "float64", "bfloat16")] == [2, 2, 2]
    assert [model.element_bytes(dtype) for dtype in ("int64", "bool", "int4", "float8e4m3fn")] == [8, 1, 1, 1]
    assert (model.tensor_bytes("int4", 7), model.tensor_bytes("float32", 7)) == (4, 14)
    with pytest.raises(UnsupportedGraphError, match="undefined"):
        model.element_bytes("undefined")


def test_contraction_work() -> None:
    """(m, k) (k, n): 2 m k n FLOPs forward and twice that backward."""
    m, k, n = 4, 5, 6
    work = operator_work(
        record("MatMul", ComputeKind.CONTRACTION, saved_inputs=(0, 1)),
        factor_sizes=(m, k, n),
        input_bytes=(4 * m * k, 4 * k * n),
        output_bytes=(4 * m * n,),
        gradient_operands=2,
        gradient_bytes=4 * (m * k + k * n),
    )
    operands, result = 4 * (m * k + k * n), 4 * m * n
    assert work == Work(
        forward_flops=2 * m * k * n,
        forward_bytes=operands + result,
        backward_flops=4 * m * k * n,
        backward_bytes=2 * result + operands + operands,
    )


def test_memory_work() -> None:
    """Relu backward reads the output's gradient and the output, and writes the input's gradient."""
    work = operator_work(
        record("Relu", ComputeKind.MEMORY, saved_outputs=(0,)),
        factor_sizes=(100,),
        input_bytes=(400,),
        output_bytes=(400,),
        gradient_operands=1,
        gradient_bytes=400,
    )
    assert work == Work(forward_flops=0, forward_bytes=800, backward_flops=0, backward_bytes=1200)


def test_no_backward_without_gradients() -> None:
    """In inference only the forward counts; a view does nothing at all."""
    matmul = record("MatMul", ComputeKind.CONTRACTION, saved_inputs=(0,))
    work = operator_work(matmul, factor_sizes=(2,), input_bytes=(8,), output_bytes=(8,), gradient_operands=0)
    assert (work.backward_flops, work.backward_bytes) == (0, 0)
    view = record("Reshape", ComputeKind.VIEW)
    work = operator_work(view, factor_sizes=(2,), input_bytes=(8,), output_bytes=(8,), gradient_operands=1)
    assert work == Work(forward_flops=0, forward_bytes=0, backward_flops=0, backward_bytes=0)


def test_attention_work() -> None:
    """Two products forward, four backward."""
    work = operator_work(
        record("Attention", ComputeKind.CONTRACTION),
        factor_sizes=(2, 3, 5, 7, 2 * 11),
        input_bytes=(1, 1, 1),
        output_bytes=(1,),
        gradient_operands=3,
    )
    assert work.forward_flops == 4 * 2 * 3 * 5 * 7 * 11
    assert work.backward_flops == 2 * work.forward_flops


def test_rounding_is_up() -> None:
    """A started nanosecond counts."""
    assert [to_ns(0.0), to_ns(1e-9), to_ns(1.2e-9)] == [0, 1, 2]
