"""Fused models: outputs are those of onnxruntime, and whatever is split, execution equals the single process."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import onnxruntime
import pytest

from tap_planner.apply import synthetic_inputs
from tap_planner.apply.reference import run_reference
from tap_planner.apply.weights import StoredWeights
from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, WeightReader, bind, load_model
from tap_planner.operators import rule_of
from tap_planner.sharding import block_hints, enumerate_strategies
from tests.apply.lockstep_runs import verified
from tests.apply.random_plans import RandomPlan
from tests.graph.models import DATA, saved, symbols

_CASE = DATA / "cases" / "com_microsoft_fused_ops"
_SEEDS = (0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full))

_HEADER = '<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>\n'
_ENCODER = """
g (int32[batch, 6] ids, int32[batch, 6] kinds, int32[batch, 6] mask) => (float[batch, 6, 16] y) {
    e, unused, sum = com.microsoft.EmbedLayerNormalization(ids, kinds, words, places, types, gamma, beta)
    a = com.microsoft.Attention<num_heads = 4>(e, qkv, qkv_bias, mask)
    n, , , s = com.microsoft.SkipLayerNormalization<epsilon = 0.00001>(a, sum, gamma, beta, bias)
    u = MatMul(n, up)
    f = com.microsoft.BiasGelu(u, up_bias)
    d = MatMul(f, down)
    y = com.microsoft.SkipLayerNormalization<epsilon = 0.00001>(d, s, gamma)
}
"""
_DECODER = """
g (float[batch, 5, 64] x, int32[batch] ends) => (float[batch, 5, 64] y, float[batch, 2, 5, 16] key) {
    n = SimplifiedLayerNormalization<epsilon = 0.00001>(x, gamma)
    q = MatMul(n, q_weight)
    k = MatMul(n, k_weight)
    v = MatMul(n, v_weight)
    a, key, value = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
        (q, k, v, , , ends, total, cos_cached, sin_cached)
    o = com.microsoft.FusedMatMul<transB = 1, alpha = 0.5>(a, o_weight)
    h, , , s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.00001>(o, x, gamma)
    m = com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1>(h, h, h, qkv_bias)
    g = com.microsoft.QuickGelu<alpha = 1.0>(m)
    y = com.microsoft.FastGelu(g, bias)
}
"""
_ENCODER_WEIGHTS = {
    "words": (11, 16),
    "places": (8, 16),
    "types": (2, 16),
    "gamma": (16,),
    "beta": (16,),
    "bias": (16,),
    "qkv": (16, 48),
    "qkv_bias": (48,),
    "up": (16, 32),
    "up_bias": (32,),
    "down": (32, 16),
}
_DECODER_WEIGHTS = {
    "gamma": (64,),
    "q_weight": (64, 64),
    "k_weight": (64, 32),
    "v_weight": (64, 32),
    "o_weight": (64, 64),
    "qkv_bias": (192,),
    "bias": (64,),
    "cos_cached": (9, 8),
    "sin_cached": (9, 8),
}
_MODELS = {"encoder": (_ENCODER, _ENCODER_WEIGHTS), "decoder": (_DECODER, _DECODER_WEIGHTS)}


def _model(folder: Path, name: str) -> ModelFile:
    """A small model of fused operators, with random weights in the file."""
    body, weights = _MODELS[name]
    model = onnx.parser.parse_model(_HEADER + body)
    rng = np.random.default_rng(0)
    for weight, shape in weights.items():
        array = rng.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, weight))
    if name == "decoder":
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(5, np.int32), "total"))
    return saved(folder, model, f"{name}.onnx")


def _inputs(graph: Graph) -> dict[str, np.ndarray]:
    inputs = synthetic_inputs(graph)
    if "ends" in inputs:
        inputs["ends"][:] = 4
    return inputs


def _bound(file: ModelFile, *, training: bool) -> Graph:
    dims = {dim: 8 for dim in ("seq", "dec_seq") if dim in symbols(file)}
    return bind(file, BindOptions(batch=4, dims=dims, training=training, loss=LossOptions(kind="mean")))


@pytest.mark.parametrize("name", _MODELS)
def test_outputs_are_those_of_onnxruntime(name: str, tmp_path: Path) -> None:
    """A model with the file's own weights gives what onnxruntime gives."""
    file = _model(tmp_path, name)
    graph = _bound(file, training=False)
    inputs = _inputs(graph)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = onnxruntime.InferenceSession(str(tmp_path / f"{name}.onnx"), options, providers=["CPUExecutionProvider"])
    kinds = {value.name: np.int32 if "int32" in value.type else np.float32 for value in session.get_inputs()}
    expected = session.run(None, {key: inputs[key].astype(kind) for key, kind in kinds.items()})
    found = run_reference(graph, StoredWeights(WeightReader(file)), inputs).outputs
    for value, theirs in zip(session.get_outputs(), expected, strict=True):
        np.testing.assert_allclose(found[value.name], np.asarray(theirs), rtol=1e-4, atol=1e-5)


def _verify(graph: Graph, mesh_shape: tuple[int, ...], seed: int) -> None:
    decisions = RandomPlan(graph, mesh_shape, seed, loss_kind="mean").build()
    report = verified(graph, decisions, _inputs(graph))
    assert report.passed, "\n".join(report.lines())


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", _MODELS)
def test_small_models_under_random_plans(name: str, training: bool, seed: int, tmp_path: Path) -> None:
    """Splits of batch, heads, queries, columns and rows, and of caches beside results: all is the same."""
    _verify(_bound(_model(tmp_path, name), training=training), (2, 2), seed)


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize(
    "name",
    [
        *("bert_tiny_ortext", "gpt2_tiny_ortext", "hm_llama_tiny_fused"),
        *(
            pytest.param(name, marks=pytest.mark.full)
            for name in ("bert_tiny_orttransformers", "hm_llama_tiny_ortext", "llama_tiny_op23", "llama_tiny_ortext")
        ),
        *(pytest.param(name, marks=pytest.mark.full) for name in ("t5_tiny_ortext", "vit_tiny_ortext")),
    ],
)
def test_optimised_models_under_random_plans(name: str, training: bool, seed: int) -> None:
    """Models that onnxruntime optimised run under plans that no search would make."""
    _verify(_bound(load_model(DATA / f"{name}.onnx"), training=training), (2, 2), seed)


def test_the_case_gives_its_outputs() -> None:
    """The stored outputs of the case of fused operators come out, from its stored inputs and weights."""
    file = load_model(_CASE / "model.onnx")
    graph = bind(file, BindOptions(batch=2, dims={"seq": 4}))
    with np.load(_CASE / "model.io.npz") as stored:
        inputs, expected = {"x": stored["in:x"].astype(np.float64)}, stored["out:y"]
    found = run_reference(graph, StoredWeights(WeightReader(file)), inputs).outputs["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_packed_projections_are_split_by_heads() -> None:
    """Attention's packed weight and bias are split inside each of three equal groups of columns."""
    graph = bind(load_model(_CASE / "model.onnx"), BindOptions(batch=2, dims={"seq": 4}))
    operator = graph.operators[0]
    rule = rule_of(operator.signature)
    strategies = enumerate_strategies(operator.signature, rule, (2,), block_hints(graph)[operator.id], [False] * 3)
    (by_heads,) = [strategy for strategy in strategies if strategy.names(rule) == ("h",)]
    assert [str(item[0]) for item in by_heads.inputs if item] == ["R", "S(1, blocks=3)", "S(0, blocks=3)"]
    assert str(by_heads.outputs[0][0]) == "S(2)"
