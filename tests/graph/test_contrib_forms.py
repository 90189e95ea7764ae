"""Fused operators of the com.microsoft domain become standard ones where they are exactly that."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx.parser
import pytest

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.operators import lookup
from tests.graph.models import data_model, saved, symbols

_HEADER = '<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>\n'


def _bound(folder: Path, inputs: str, weights: str, body: str, *, training: bool = False) -> Graph:
    text = f"{_HEADER}g ({inputs}) => (float[*] y) <{weights}> {{ {body} }}".replace("float[*] y", "float y")
    model = onnx.parser.parse_model(text)
    options = BindOptions(batch=4, training=training, loss=LossOptions(kind="mean"))
    return bind(saved(folder, model), options)


def _weight(name: str, *shape: int) -> str:
    count = 1
    for size in shape:
        count *= size
    return f"float[{','.join(map(str, shape))}] {name} = {{{', '.join(['1'] * count)}}}"


_X = "float[batch, 3, 8] x"
_FORMS = [
    (_X, "", "y = com.microsoft.Gelu(x)", "Gelu", {"approximate": "none"}),
    (_X, "", "y = com.microsoft.FastGelu(x)", "Gelu", {"approximate": "tanh"}),
    (_X, "", "y = com.microsoft.QuickGelu<alpha = 1.5>(x)", "Swish", {"alpha": 1.5}),
    (_X, _weight("w", 8, 4), "y = com.microsoft.FusedMatMul(x, w)", "MatMul", {}),
    (_X, _weight("w", 8, 4), "y = com.microsoft.TransposeMatMul<transB = 0>(x, w)", "MatMul", {}),
    (
        _X,
        _weight("w", 4, 8),
        "y = com.microsoft.FusedMatMul<transB = 1>(x, w)",
        "com.microsoft::FusedMatMul",
        {"alpha": 1.0, "transA": 0, "transB": 1, "transBatchA": 0, "transBatchB": 0},
    ),
    (_X, _weight("b", 8), "y = com.microsoft.BiasAdd(x, b, x)", "Sum", {}),
    (_X, _weight("b", 8), "y = com.microsoft.BiasDropout(x, b)", "Add", {}),
    (_X, _weight("w", 8), "y = SimplifiedLayerNormalization(x, w)", "RMSNormalization", {"axis": 2}),
    (
        _X,
        _weight("w", 3, 1, 2),
        'y, s = com.microsoft.CausalConvWithState<dilation = 1, activation = "silu">(x, w)',
        "CausalConvWithState",
        {"activation": "silu"},
    ),
    (
        _X,
        "",
        'y, s = com.microsoft.LinearAttention<q_num_heads = 2, kv_num_heads = 2, update_rule = "linear">(x, x, x)',
        "LinearAttention",
        {"update_rule": "linear", "q_num_heads": 2},
    ),
    (
        "float[batch, 8] x",
        _weight("w", 8, 4),
        "y = com.microsoft.FusedGemm(x, w)",
        "Gemm",
        {"transA": 0, "transB": 0},
    ),
    (
        "float[batch, 4, 5, 5] x",
        f"{_weight('s', 4)}, {_weight('b', 4)}",
        "y = com.microsoft.GroupNorm<groups = 2, activation = 0, channels_last = 0>(x, s, b)",
        "GroupNormalization",
        {"num_groups": 2},
    ),
    (
        "float[batch, 3, 8] x, int64[batch, 3] p",
        f"{_weight('c', 5, 2)}, {_weight('s', 5, 2)}",
        "y = com.microsoft.RotaryEmbedding(x, p, c, s)",
        "RotaryEmbedding",
        {"num_heads": 2, "interleaved": 0},
    ),
]


@pytest.mark.parametrize(("inputs", "weights", "body", "type", "attributes"), _FORMS, ids=lambda v: str(v)[:40])
def test_exact_counterparts(
    inputs: str, weights: str, body: str, type: str, attributes: dict[str, object], tmp_path: Path
) -> None:
    """The operator has the standard type, attributes and every operand of the fused one."""
    graph = _bound(tmp_path, inputs, weights, body)
    (operator,) = graph.operators
    assert operator.type == type
    assert {name: operator.signature.attribute(name) for name in attributes} == attributes
    assert {p.name for p in graph.parameters} <= {name for name in operator.inputs if name is not None}


@pytest.mark.parametrize(
    ("body", "weights"),
    [
        ("y = SimplifiedLayerNormalization(x, w)", _weight("w", 8)),
        ("y = com.microsoft.BiasAdd(x, w, x)", _weight("w", 8)),
        ("y = com.microsoft.BiasGelu(x, w)", _weight("w", 8)),
        ("y = com.microsoft.SkipLayerNormalization(x, x, w)", _weight("w", 8)),
        ("y = com.microsoft.FusedMatMul<alpha = 0.5>(x, w)", _weight("w", 8, 4)),
        ("y = com.microsoft.Attention<num_heads = 2>(x, w)", _weight("w", 8, 24)),
    ],
)
def test_weights_of_fused_operators_are_trained(body: str, weights: str, tmp_path: Path) -> None:
    """A stored tensor at a weight's place is a trainable parameter, whatever the operator becomes."""
    graph = _bound(tmp_path, _X, weights, body, training=True)
    assert [(p.name, p.trainable) for p in graph.parameters] == [("w", True)]


def test_rotary_tables_are_not_trained(tmp_path: Path) -> None:
    """Tables of angles are no parameters that learn."""
    inputs, weights = "float[batch, 3, 8] x, int64[batch, 3] p", f"{_weight('c', 5, 2)}, {_weight('s', 5, 2)}"
    graph = _bound(tmp_path, inputs, weights, "y = com.microsoft.RotaryEmbedding(x, p, c, s)", training=True)
    assert not any(p.trainable for p in graph.parameters)


_GROUPS = "y, k, v = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 2>(x, x, x, , , n, {total})"


def test_the_total_length_is_structure(tmp_path: Path) -> None:
    """GroupQueryAttention: a constant total length becomes an attribute, which decides the size of the cache."""
    inputs, weights = f"{_X}, int32[batch] n", "int32 t = {5}"
    graph = _bound(tmp_path, inputs, weights, _GROUPS.format(total="t") + " z = Identity(k)")
    (operator,) = graph.operators
    assert operator.signature.attribute("total_sequence_length") == 5
    assert operator.signature.inputs[6] is None


def test_a_total_length_that_depends_on_data_is_named(tmp_path: Path) -> None:
    """A total length that is an input must be fixed; the error says how."""
    with pytest.raises(UnsupportedGraphError, match=r"GroupQueryAttention.*'t'.*decides shapes") as caught:
        _bound(tmp_path, f"{_X}, int32[batch] n, int32 t", "", _GROUPS.format(total="t"))
    assert "--value t=N" in caught.value.hint


def test_dropout_by_chance_is_refused(tmp_path: Path) -> None:
    """BiasDropout in training mode is no sum."""
    weights = f"{_weight('b', 8)}, float ratio = {{0.5}}, bool on = {{1}}"
    with pytest.raises(UnsupportedGraphError, match=r"BiasDropout.*by chance"):
        _bound(tmp_path, _X, weights, "y = com.microsoft.BiasDropout(x, b, , ratio, on)")


_UNTIED = frozenset(("bert_tiny_ortext", "gpt2_tiny_ortext", "t5_tiny_ortext"))
"""Where onnxruntime stores the tied embedding a second time, transposed."""
FUSED_MODELS = (
    *("bert_tiny_ortext", "bert_tiny_orttransformers", "gpt2_tiny_ortext", "hm_llama_tiny_fused"),
    *("hm_llama_tiny_ortext", "llama_tiny_op23", "llama_tiny_ortext", "t5_tiny_ortext", "vit_tiny_ortext"),
)


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", FUSED_MODELS)
def test_optimised_models_are_known(name: str, training: bool) -> None:
    """Models that onnxruntime optimised, and those with the standard's fused operators, hold no unknown operator."""
    model = data_model(name)
    dims = {dim: 16 for dim in ("seq", "dec_seq") if dim in symbols(model)}
    graph = bind(model, BindOptions(batch=4, dims=dims, training=training, loss=LossOptions(kind="mean")))
    assert all(lookup(operator.type).known for operator in graph.operators)
    if training:
        plain = data_model({"llama_tiny_op23": "llama_tiny"}.get(name, name.rsplit("_", 1)[0]))
        trained = {
            p.name for p in bind(plain, BindOptions(batch=4, dims=dims, training=True)).parameters if p.trainable
        }
        found = [p for p in graph.parameters if p.trainable]
        assert len(found) == len(trained) + (name in _UNTIED)
