"""The explicit end of a graph in inference, and which inputs are caches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from tap_planner.apply.weights import random_part
from tap_planner.folding import fold
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tests.graph.decoders import EIGHT_LAYERS, decoder_step, with_values
from tests.graph.executing import outputs_of
from tests.graph.models import DATA, data_model, saved, text_model

SMALL: dict[str, Any] = {"layers": 2, "d": 32, "heads": 4, "kv_heads": 2, "ff": 48, "vocabulary": 40}


def ended(folder: Path, body: str, *, opset: int = 20, **options: object) -> Graph:
    """A text model bound for inference."""
    return bind(text_model(folder, body, opset=opset), BindOptions(ends=True, **options))  # type: ignore[arg-type]


def pairs(graph: Graph) -> dict[str, str]:
    """Cache and the output that is its next state, by ONNX name."""
    shown = dict(zip(graph.outputs, graph.output_names, strict=True))
    return {past: shown[graph.operators[index].outputs[0]] for past, index in graph.caches.items()}


def test_every_output_gets_an_end_beside_its_producer(tmp_path: Path) -> None:
    """The end of an inner value stands right behind what makes it; values that nothing makes end last."""
    graph = ended(
        tmp_path,
        """g (float[2,4] x, float[2,4] z) => (float y, float inner, float z, float again) {
            again = Identity (inner)
            inner = Relu (x)
            y = Neg (inner)
        }""",
    )
    ends = [(o.type, o.inputs[0], o.outputs[0]) for o in graph.operators]
    assert ends == [
        ("Relu", "x", "inner"),
        ("Output", "inner", "inner__output"),
        ("Output", "inner", "again__output"),
        ("Neg", "inner", "y"),
        ("Output", "y", "y__output"),
        ("Output", "z", "z__output"),
    ]
    assert graph.outputs == ("y__output", "inner__output", "z__output", "again__output")
    assert graph.output_names == ("y", "inner", "z", "again")


def test_names_that_are_taken(tmp_path: Path) -> None:
    """An end never takes a name that the file uses."""
    graph = ended(tmp_path, "g (float[2] y__output) => (float y) { y = Relu (y__output) }")
    assert graph.outputs == ("y__output_",)


def test_training_has_no_ends() -> None:
    """In training all outputs stay as they are, asked for or not."""
    file, loss = data_model("llama_decode_tiny"), LossOptions(kind="mean")
    plain, asked = (
        bind(file, BindOptions(batch=4, dims={"past": 16}, training=True, ends=ends, loss=loss))
        for ends in (False, True)
    )
    assert plain.digest == asked.digest
    assert not plain.caches and plain.new_positions is None


def test_a_decoder_folds_as_before() -> None:
    """Ends of caches are part of their layer: the same operators of the model are repeats of others."""
    plain, ended = (
        fold(bind(data_model("llama_decode_tiny"), BindOptions(batch=4, dims={"past": 16}, ends=ends)))
        for ends in (False, True)
    )
    ((before,), (after,)) = plain.runs, ended.runs
    assert (before.count, after.count) == (2, 2)
    assert after.period == before.period + 2
    assert ended.folded_share == plain.folded_share
    assert ended.chained_share == plain.chained_share == before.period / len(plain.graph.operators)
    ids = [operator.id for operator in ended.graph.operators if operator.type != "Output"]
    assert ids == [operator.id for operator in plain.graph.operators]


def test_caches_of_a_real_export() -> None:
    """Keys and values to which a Concat appends, by layer; a step advances them by one position."""
    graph = bind(data_model("llama_decode_tiny"), BindOptions(batch=4, dims={"past": 16}, ends=True))
    expected = {f"past.{layer}.{kind}": f"present.{layer}.{kind}" for layer in range(2) for kind in ("key", "value")}
    assert pairs(graph) == expected
    assert graph.new_positions == 1


_GROUP = """<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>
g (float[2,3,32] q, float[2,3,16] k, float[2,3,16] v, float[2,2,9,8] a, float[2,2,9,8] b, int32[2] ends)
    => (float y, float c, float d) {
    total = Constant <value: tensor = int32 {9}> ()
    y, c, d = com.microsoft.GroupQueryAttention <num_heads: int = 4, kv_num_heads: int = 2> (q, k, v, a, b, ends, total)
}"""


def test_caches_of_a_shared_buffer(tmp_path: Path) -> None:
    """GroupQueryAttention writes three new positions into caches of nine: the sizes stay."""
    graph = bind(saved(tmp_path, onnx.parser.parse_model(_GROUP)), BindOptions(ends=True))
    assert pairs(graph) == {"a": "c", "b": "d"}
    assert graph.new_positions == 3


@pytest.mark.parametrize(
    ("body", "expected", "new_positions"),
    [
        pytest.param(
            """g (float[2,5,4] c, float[2,1,4] x, int64[2] at) => (float n) {
                n = TensorScatter <axis = 1> (c, x, at)
            }""",
            {"c": "n"},
            1,
            id="TensorScatter",
        ),
        pytest.param(
            """g (float[2,5] c, float[2,2] x, int64[2,2] at) => (float n) {
                n = ScatterElements <axis = 1> (c, x, at)
            }""",
            {"c": "n"},
            2,
            id="ScatterElements",
        ),
        pytest.param(
            """g (float[2,2,5,4] c, float[2,1,4] k, float[2,1,4] v) => (float n) {
                one = Constant <value_ints = [1]> ()
                zero = Constant <value_ints = [0]> ()
                halves = Constant <value_ints = [1, 1]> ()
                old_k, old_v = Split <axis = 0> (c, halves)
                new_k = Unsqueeze (k, zero)
                new_v = Unsqueeze (v, zero)
                all_k = Concat <axis = 2> (old_k, kk)
                all_v = Concat <axis = 2> (old_v, vv)
                kk = Transpose <perm = [0, 1, 2, 3]> (new_k)
                vv = Transpose <perm = [0, 1, 2, 3]> (new_v)
                n = Concat <axis = 0> (all_k, all_v)
            }""",
            {"c": "n"},
            1,
            id="keys and values stacked",
        ),
        pytest.param(
            "g (float[2,5] c, float[2,5] x) => (float y, float n) { n = Identity (c) y = Relu (x) }",
            {"c": "n"},
            None,
            id="handed on",
        ),
        pytest.param(
            """g (float[2,5] past_b, float[2,5] past_a, float[2,1] x) => (float present_a, float present_b) {
                both = Concat <axis = 1> (past_a, past_b)
                halves = Constant <value_ints = [5, 5]> ()
                present_a, present_b = Split <axis = 1> (both, halves)
            }""",
            {"past_a": "present_a", "past_b": "present_b"},
            None,
            id="names break the tie",
        ),
        pytest.param(
            "g (float[2,5] c, float[2,5] x) => (float n) { n = Add (c, x) }", {}, None, id="computed: no cache"
        ),
        pytest.param(
            "g (float[2,5] c) => (int64[2,5] n) { n = Cast <to = 7> (c) }", {}, None, id="another type: no cache"
        ),
        pytest.param(
            "g (float[2,5] c, float[2,5] x) => (float n) { n = Concat <axis = 0> (c, x, x) }",
            {"c": "n"},
            4,
            id="an input with others behind it",
        ),
    ],
)
def test_what_is_a_cache(body: str, expected: dict[str, str], new_positions: int | None, tmp_path: Path) -> None:
    """The structure decides: contents that are moved, with new ones beside them or in their place."""
    graph = ended(tmp_path, body, opset=24, batch_dim=None)
    assert pairs(graph) == expected
    assert graph.new_positions == new_positions


def test_the_stored_decoder_is_what_is_written_here() -> None:
    """``hm_llama3_8b_decode_8l`` is the generator's, at the sizes of LLaMA 3 8B (its config.json)."""
    stored = onnx.load(DATA / "hm_llama3_8b_decode_8l.onnx", load_external_data=False)
    assert stored == decoder_step(**EIGHT_LAYERS)
    layer = 4096 * 4096 * 2 + 4096 * 1024 * 2 + 3 * 4096 * 14336 + 2 * 4096
    sizes = [int(np.prod(tensor.dims)) for tensor in stored.graph.initializer if len(tensor.dims) < 3]
    assert sum(sizes) == 8 * layer + 2 * 128256 * 4096 + 4096


@pytest.mark.parametrize("caches", ["attention", "concat"])
def test_the_decoder_computes_what_onnxruntime_does(caches: str, tmp_path: Path) -> None:
    """Logits and caches of a small one are the runtime's."""
    model = decoder_step(**SMALL, caches=caches)
    arrays = {
        tensor.name: _values(tensor.name, tuple(tensor.dims))
        for tensor in model.graph.initializer
        if tensor.data_location == onnx.TensorProto.EXTERNAL
    }
    file = saved(tmp_path, with_values(model, arrays))
    graph = bind(file, BindOptions(batch=3, dims={"past": 5}, ends=True))
    feeds = {name: _values(name, graph.tensors[name].type.shape) for name in graph.inputs}
    feeds["input_ids"] = np.array([[3], [0], [39]])
    session = onnxruntime.InferenceSession(str(file.path), providers=["CPUExecutionProvider"])
    expected = session.run(None, feeds)
    found = outputs_of(file, graph, feeds)
    assert len(expected) == 5
    for value, theirs in zip(session.get_outputs(), expected, strict=True):
        np.testing.assert_allclose(found[value.name], np.asarray(theirs), rtol=1e-4, atol=1e-5)


def _values(name: str, shape: tuple[int, ...]) -> np.ndarray:
    uniform = random_part(name, shape, [np.arange(size) for size in shape], 0)
    return (uniform - 0.5).astype(np.float32)
