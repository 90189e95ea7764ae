"""Every operator of ONNX's default domain is planned, or refused by a message that says why."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from tap_planner.apply.operators import FUNCTIONS
from tap_planner.errors import ApplyError, UnsupportedGraphError
from tap_planner.graph import BindOptions, ModelFile, bind
from tap_planner.graph.upgrade import MAX_OPSET
from tap_planner.operators import known_types
from tests.operators.backend_nodes import run_model
from tests.operators.onnx_nodes import node_model

_ELSEWHERE = {
    **dict.fromkeys(("Constant", "EyeLike", "OptionalHasElement"), "made while the model is read"),
    **dict.fromkeys(("BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix"), "tables of constants"),
    **dict.fromkeys(("CastLike", "CenterCropPad", "Flatten", "Scatter", "Squeeze", "Unsqueeze"), "another operator"),
    **dict.fromkeys(("Optional", "OptionalGetElement"), "its element"),
    **dict.fromkeys(("If", "Loop", "Scan", "SequenceMap"), "control flow"),
    **dict.fromkeys(
        (
            *("ConcatFromSequence", "SequenceAt", "SequenceConstruct", "SequenceEmpty", "SequenceErase"),
            *("SequenceInsert", "SequenceLength", "SplitToSequence"),
        ),
        "sequences end while the model is read",
    ),
}
_REFUSED = ("ImageDecoder", "RegexFullMatch", "StringConcat", "StringNormalizer", "StringSplit")
"""Texts and encoded images."""


def test_every_operator_of_the_newest_set_is_known() -> None:
    """No schema of the default domain is without a record and a function, but for those that need none."""
    names = {schema.name for schema in onnx.defs.get_all_schemas_with_history() if schema.domain == ""}
    assert onnx.defs.onnx_opset_version() == MAX_OPSET
    assert names - set(known_types()) - set(_ELSEWHERE) == set(_REFUSED)
    assert names & set(known_types()) - set(_ELSEWHERE) <= set(FUNCTIONS)


def _bind(model: onnx.ModelProto) -> None:
    file = ModelFile(path=Path("node.onnx"), proto=model, sha256="0" * 64, opset=21)
    bind(file, BindOptions(training=False))


@pytest.mark.parametrize("type", _REFUSED)
def test_texts_are_refused_by_name(type: str) -> None:
    """Operators on texts name themselves, say why they are not planned and what to do."""
    kind = TensorProto.UINT8 if type == "ImageDecoder" else TensorProto.STRING
    count = 2 if type == "StringConcat" else 1
    inputs = [helper.make_tensor_value_info(f"x{index}", kind, [3]) for index in range(count)]
    outputs = ["y", "z"] if type == "StringSplit" else ["y"]
    node = helper.make_node(type, [value.name for value in inputs], outputs)
    graph = helper.make_graph([node], "g", inputs, [helper.make_empty_tensor_value_info(name) for name in outputs])
    with pytest.raises(UnsupportedGraphError, match=f"{type}.*not planned") as caught:
        _bind(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)]))
    assert "extract_model" in caught.value.hint


@pytest.mark.parametrize(
    ("type", "operands"),
    [
        ("NonZero", [np.array([[1.0, 0.0], [2.0, 3.0]], np.float32)]),
        ("Compress", [np.ones(4, np.float32), np.array([True, False, True])]),
        ("Unique", [np.array([3, 3, 4])]),
        ("NonMaxSuppression", [np.ones((1, 3, 4), np.float32), np.ones((1, 1, 3), np.float32), np.array([2])]),
    ],
)
def test_unknown_counts_are_asked_for_and_wrong_ones_refused(type: str, operands: list[np.ndarray]) -> None:
    """How many elements a selection keeps must be declared; if it keeps another number, that is an error."""
    model, feeds = node_model(type, operands, {}, 1, 21)
    constants = {"x2"} & set(feeds)
    with pytest.raises(UnsupportedGraphError, match="depend"):
        run_model(model, feeds, constants)
    shape = {"NonZero": [2, 5], "NonMaxSuppression": [5, 3]}.get(type, [5])
    model.graph.output[0].type.tensor_type.shape.dim.extend(
        onnx.TensorShapeProto.Dimension(dim_value=size) for size in shape
    )
    kind = TensorProto.FLOAT if type == "Compress" else TensorProto.INT64
    model.graph.output[0].type.tensor_type.elem_type = kind
    with pytest.raises(ApplyError, match="planned are 5") as caught:
        run_model(model, feeds, constants)
    assert caught.value.hint
