"""Output types equal those of ONNX's own shape inference and of its reference evaluator."""

from __future__ import annotations

from typing import Any

import onnx
import pytest

from tap_planner.errors import UnsupportedGraphError
from tap_planner.operators import OperatorSignature, lookup
from tests.operators.operator_cases import CASES, LOSSES, name_of
from tests.operators.operator_reference import random_values, run, signature, tensor, to_model

_ONNX_CASES = [sig for sig in CASES if sig not in LOSSES]


@pytest.mark.parametrize("sig", CASES, ids=name_of)
def test_shapes_equal_execution(sig: OperatorSignature) -> None:
    """The inferred shapes and dtypes are those that execution gives."""
    results = run(sig, random_values(sig))
    assert [found.shape for found in sig.outputs] == [result.shape for result in results]
    if sig.type not in ("LayerNormalization", "RMSNormalization"):
        assert [found.dtype for found in sig.outputs] == [str(result.dtype) for result in results]


@pytest.mark.parametrize("sig", _ONNX_CASES, ids=name_of)
def test_shapes_equal_onnx_shape_inference(sig: OperatorSignature) -> None:
    """The inferred shapes are those of onnx.shape_inference wherever that knows them."""
    inferred = onnx.shape_inference.infer_shapes(to_model(sig), data_prop=True)
    for found, output in zip(inferred.graph.output, sig.outputs, strict=True):
        if not found.type.tensor_type.HasField("shape"):
            continue
        dims = found.type.tensor_type.shape.dim
        known = [dim.dim_value for dim in dims if dim.HasField("dim_value")]
        assert len(known) < len(dims) or tuple(known) == output.shape


@pytest.mark.parametrize(
    ("type", "shapes", "attributes"),
    [
        ("MatMul", [(2, 3), (4, 5)], {}),
        ("Add", [(2, 3), (4,)], {}),
        ("Gemm", [(2, 3), (4, 5)], {}),
        ("Reshape", [(2, 3)], {"shape": (7,)}),
        ("Expand", [(2, 3)], {"shape": (2, 4)}),
        ("Concat", [(2, 3), (3, 3)], {"axis": 1}),
        ("Split", [(2, 3)], {"axis": 1, "split": (1, 1)}),
        ("Einsum", [(2, 3), (4, 5)], {"equation": "ij,jk->ik"}),
        ("Conv", [(1, 3, 8, 8), (4, 2, 3, 3)], {}),
        ("TopK", [(2, 3)], {"axis": 1, "k": 4}),
    ],
)
def test_wrong_shapes_are_named(type: str, shapes: list[tuple[int, ...]], attributes: dict[str, Any]) -> None:
    """Operands that do not fit raise an error that names the operator."""
    with pytest.raises(UnsupportedGraphError, match=type) as caught:
        signature(type, *(tensor(*shape) for shape in shapes), **attributes)
    assert caught.value.hint


def test_missing_attribute_is_named() -> None:
    """A structural attribute that is absent is named."""
    with pytest.raises(UnsupportedGraphError, match="'shape'"):
        signature("Reshape", tensor(2, 3))


def test_sources_infer_from_attributes() -> None:
    """Shape, Size, ConstantOfShape and Range have the types that their attributes say."""
    assert signature("Shape", tensor(2, 3, 4)).outputs[0].shape == (3,)
    assert signature("Shape", tensor(2, 3, 4), start=1, end=-1).outputs[0].shape == (1,)
    assert signature("Size", tensor(2, 3)).outputs[0].shape == ()
    assert signature("ConstantOfShape", shape=(2, 5)).outputs[0].shape == (2, 5)
    assert signature("Range", start=0, limit=7, delta=2).outputs[0].shape == (4,)
    assert signature("Range", start=7, limit=0, delta=-3).outputs[0].shape == (3,)


def test_softmax_over_several_dims_keeps_the_type() -> None:
    """The Softmax of old opsets, over several dims, keeps its operand's type."""
    assert lookup("Softmax").infer(signature("Softmax", tensor(2, 3, 4), axes=(1, 2)), 1) == (tensor(2, 3, 4),)
