"""Weights: which stored tensors are parameters, what they weigh, and that their values decide nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tap_planner import api
from tap_planner.apply.reference import run_reference
from tap_planner.apply.weights import StoredWeights
from tap_planner.errors import ApplyError, ModelError
from tap_planner.graph import BindOptions, Graph, LossOptions, WeightReader, bind, load_model, weights
from tap_planner.plan import ApplyRequest, PlanOptions, PlanRequest, to_text
from tests.graph.models import DATA, add_weight, data_model, saved, text_model

_CASES = DATA / "cases"
_DIMS = {"seq": 16}


def _case(name: str, batch: int, *, training: bool = False) -> Graph:
    options = BindOptions(batch=batch, training=training, loss=LossOptions(kind="mean"))
    return bind(load_model(_CASES / name / "model.onnx"), options)


def _parameters(graph: Graph) -> dict[str, tuple[str, tuple[int, ...], bool]]:
    return {item.name: (item.type.dtype, item.type.shape, item.trainable) for item in graph.parameters}


def _infer(model: Path, cluster: str, **options: Any) -> Any:
    return api.make_plan(PlanRequest(model=model, cluster=cluster, options=PlanOptions(mode="infer", **options)))


# -- values decide nothing -----------------------------------------------------------------------------------------


def _quantised_layers(draw: Callable[[str, tuple[int, ...]], np.ndarray]) -> onnx.ModelProto:
    """Two layers of everything: fake-quantised activations, int8 and packed weights, biases, rotary tables."""
    nodes = [helper.make_node("Gather", ["table_q", "ids"], ["e_q"]), _restore("e_q", "table", "h0")]
    tensors = [
        numpy_helper.from_array(draw("table_q", (32, 16)).astype(np.int8), "table_q"),
        *_scale(draw, "table", np.int8),
    ]
    for layer in range(2):
        p = f"l{layer}"
        nodes += [
            helper.make_node("QuantizeLinear", [f"h{layer}", f"{p}_a_s", f"{p}_a_z"], [f"{p}_hq"]),
            _restore(f"{p}_hq", f"{p}_a", f"{p}_h"),
            _restore(f"{p}_w_q", f"{p}_w", f"{p}_w", axis=1),
            helper.make_node("MatMul", [f"{p}_h", f"{p}_w"], [f"{p}_m"]),
            helper.make_node("Add", [f"{p}_m", f"{p}_b"], [f"{p}_n"]),
            helper.make_node("MatMul", ["positions", f"{p}_f"], [f"{p}_angles"]),
            helper.make_node("MatMulNBits", ["positions", f"{p}_g_q", f"{p}_g_s"], [f"{p}_more"], domain=_MS, **_BITS),
            helper.make_node("Add", [f"{p}_angles", f"{p}_more"], [f"{p}_sum"]),
            helper.make_node("Cos", [f"{p}_sum"], [f"{p}_cos"]),
            helper.make_node("Mul", [f"{p}_n", f"{p}_cos"], [f"h{layer + 1}"]),
        ]
        tensors += [
            numpy_helper.from_array(draw(f"{p}_w_q", (16, 16)).astype(np.int8), f"{p}_w_q"),
            *_scale(draw, f"{p}_w", np.int8, 16),
            *_scale(draw, f"{p}_a", np.uint8),
            numpy_helper.from_array(draw(f"{p}_b", (16,)).astype(np.float32), f"{p}_b"),
            numpy_helper.from_array(draw(f"{p}_f", (1, 16)).astype(np.float32), f"{p}_f"),
            numpy_helper.from_array(draw(f"{p}_g_q", (16, 1, 8)).astype(np.uint8), f"{p}_g_q"),
            numpy_helper.from_array(np.abs(draw(f"{p}_g_s", (16,))).astype(np.float32), f"{p}_g_s"),
        ]
    nodes.append(helper.make_node("MatMul", ["h2", "head"], ["y"]))
    tensors += [
        numpy_helper.from_array(draw("head", (16, 8)).astype(np.float32), "head"),
        numpy_helper.from_array(np.arange(4, dtype=np.float32).reshape(4, 1), "positions"),
    ]
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", 4])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, ["batch", 4, 8])
    graph = helper.make_graph(nodes, "layers", [ids], [y], tensors)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(_MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=9)


_MS = "com.microsoft"
_BITS: dict[str, Any] = {"K": 1, "N": 16, "bits": 4, "block_size": 16}


def _restore(data: str, name: str, result: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node("DequantizeLinear", [data, f"{name}_s", f"{name}_z"], [result], **attributes)


def _scale(draw: Callable[[str, tuple[int, ...]], np.ndarray], name: str, kind: type, *shape: int) -> list[TensorProto]:
    return [
        numpy_helper.from_array(np.abs(draw(f"{name}_s", shape)).astype(np.float32) * 0.01 + 0.001, f"{name}_s"),
        numpy_helper.from_array(np.abs(draw(f"{name}_z", shape)).astype(kind), f"{name}_z"),
    ]


def _drawn(seed: int) -> Callable[[str, tuple[int, ...]], np.ndarray]:
    rng = np.random.default_rng(seed)
    return lambda name, shape: rng.integers(1, 100, shape)


def _all_equal(name: str, shape: tuple[int, ...]) -> np.ndarray:
    return np.zeros(shape, np.int64)


@pytest.mark.parametrize("mode", ["train", "infer"])
def test_values_of_weights_decide_nothing(mode: str, tmp_path: Path) -> None:
    """Two files that differ in values alone (weights, scales, zero points, biases, rotary tables; in one of them all
    are equal zeros) give the same plan, byte for byte, but for the digest of the file."""
    texts = []
    for folder, draw in ((tmp_path / "a", _drawn(1)), (tmp_path / "b", _drawn(2)), (tmp_path / "c", _all_equal)):
        folder.mkdir()
        file = saved(folder, _quantised_layers(draw))
        options = PlanOptions(batch=4, mode=mode, precision="fp32", mesh="a=2,b=2")  # type: ignore[arg-type]
        document = api.make_plan(PlanRequest(model=file.path, cluster="2x2:a100-sxm4-80gb", options=options))
        text = to_text(document)
        assert file.sha256 in text
        texts.append(_without_digests(text, file.sha256))
    assert texts[0] == texts[1] == texts[2]


def _without_digests(text: str, sha256: str) -> str:
    """The plan without the file's digest and without its own, which rests on that."""
    kept = text.replace(sha256, "FILE")
    return kept[: kept.index('"digests"')]


def test_values_of_weights_do_not_keep_layers_apart(tmp_path: Path) -> None:
    """Layers with scales of their own fold as well as layers with equal ones."""
    graph = bind(saved(tmp_path, _quantised_layers(_drawn(3))), BindOptions(batch=4))
    assert {"l0_a_s", "l1_a_s", "l0_w_z", "table_s"} <= set(_parameters(graph))
    kinds = [operator.signature for operator in graph.operators if operator.id.startswith(("l0", "h1"))]
    assert kinds == [operator.signature for operator in graph.operators if operator.id.startswith(("l1", "h2"))]


def test_structure_may_be_read(tmp_path: Path) -> None:
    """The target of a Reshape is structure: another value gives another graph."""
    shapes = []
    for sizes in ("2, 3", "3, 2"):
        body = f"g (float[B, 6] x) => (float[B, n, m] y) <int64[3] s = {{0, {sizes}}}> {{ y = Reshape (x, s) }}"
        graph = bind(text_model(tmp_path, body), BindOptions(dims={"B": 4}))
        shapes.append(graph.tensors[graph.outputs[0]].type.shape)
    assert shapes == [(4, 2, 3), (4, 3, 2)]


# -- roles and sizes -----------------------------------------------------------------------------------------------


def test_quantised_weights_are_frozen_parameters() -> None:
    """int8 weights with their scales and zero points are parameters that training leaves alone; float ones train."""
    options = BindOptions(batch=8, dims=_DIMS, training=True, loss=LossOptions(kind="mean"))
    found = _parameters(bind(data_model("bert_tiny_int8dyn"), options))
    table = "m.cls.predictions.decoder.weight"
    assert found[f"{table}_quantized"] == ("uint8", (160, 64), False)
    assert found[f"{table}_scale"] == ("float32", (), False) and found[f"{table}_zero_point"] == ("uint8", (), False)
    frozen = {name for name, (_, _, trainable) in found.items() if not trainable}
    assert all(name.endswith(("_quantized", "_scale", "_zero_point")) for name in frozen) and len(frozen) == 9
    assert sum(trainable for _, _, trainable in found.values()) == 39


@pytest.mark.parametrize(("name", "matrices"), [("hm_llama_tiny_int4nbits", 15), ("hm_mixtral_tiny_int4nbits", 11)])
@pytest.mark.parametrize("training", [False, True])
def test_packed_weights_are_frozen_parameters(
    name: str, matrices: int, training: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every MatMulNBits reads two parameters but that of the rotary table, which stays a constant that is not read."""
    monkeypatch.setattr(weights, "read_external", _refuse)
    graph = bind(data_model(name), BindOptions(batch=8, dims=_DIMS, training=training, loss=LossOptions(kind="mean")))
    products = [operator for operator in graph.operators if operator.type == "com.microsoft::MatMulNBits"]
    found = _parameters(graph)
    packed = {key: value for key, value in found.items() if key.endswith(("_Q4", "_scales"))}
    assert len(products) == matrices and len(packed) == 2 * matrices
    assert not any(trainable for _, _, trainable in packed.values())
    assert any(trainable for _, _, trainable in found.values()) is training
    assert set(graph.constants.outside()) == {"const_4_Q4"}


def _refuse(*arguments: object) -> np.ndarray:
    raise AssertionError("a weights file was read to plan")


def test_rotary_table_of_packed_weights_has_the_right_value(tmp_path: Path) -> None:
    """The deferred constant computes what onnxruntime's operator does: positions times restored frequencies."""
    proto = onnx.load(DATA / "hm_llama_tiny_int4nbits.onnx", load_external_data=False)
    graph = bind(saved(tmp_path, proto), BindOptions(batch=2, dims={"seq": 4}))
    packed = np.random.default_rng(0).integers(0, 256, (8, 1, 16), dtype=np.uint8)
    scales = next(numpy_helper.to_array(t) for t in proto.graph.initializer if t.name == "const_4_scales")
    name = next(name for name in graph.tensors if "Cos" in name)
    value = graph.constants.value(name, lambda key, _: packed if key == "const_4_Q4" else None)
    angles = np.arange(4)[:, None] * ((packed[:, 0, 0] & 15).astype(float) - 8) * scales.reshape(-1)
    half = value.reshape(4, -1)[:, :8]
    np.testing.assert_allclose(half, np.cos(angles), rtol=1e-5, atol=1e-6)


def test_scales_of_integers_are_not_trained(tmp_path: Path) -> None:
    """An int8 weight that is restored by Cast and Mul is frozen with its scale; a float one beside it trains."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 20]> g (float[4, 8] x) => (float[4, 8] y) {
            c = Cast <to = 1> (q)
            d = Mul (c, s)
            m = MatMul (x, d)
            y = MatMul (m, w)
        }"""
    )
    for name, shape, dtype in (("q", (8, 8), np.int8), ("s", (1, 8), np.float32), ("w", (8, 8), np.float32)):
        model.graph.initializer.append(numpy_helper.from_array(np.ones(shape, dtype), name))
    options = BindOptions(batch=4, training=True, loss=LossOptions(kind="mean"))
    found = _parameters(bind(saved(tmp_path, model), options))
    assert {name: trainable for name, (_, _, trainable) in found.items()} == {"q": False, "s": False, "w": True}


def test_sizes_of_small_types() -> None:
    """Two int4 in a byte, a bfloat16 weight in the precision's: 20 + 10 x 2 + 30 x 2 bytes; rounded up per tensor."""
    case = _CASES / "int4_bf16_sizes"
    document = _infer(case / "model.onnx", "1x1:a100-sxm4-80gb", batch=2)
    assert document.predicted.memory_bytes["parameters"] == 20 + 20 + 60
    document = _infer(case / "model.onnx", "1x1:a100-sxm4-80gb", batch=2, precision="fp32")
    assert document.predicted.memory_bytes["parameters"] == 20 + 40 + 120


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(ml_dtypes.int2, 4), (ml_dtypes.uint4, 8), (ml_dtypes.float8_e4m3fn, 15), (np.int16, 30), (np.int32, 60)],
)
def test_bytes_of_stored_types(kind: type, expected: int, tmp_path: Path) -> None:
    """15 elements of a quantised type: the last byte is filled up."""
    q = numpy_helper.from_array(np.ones((3, 5), kind), "q")
    s = numpy_helper.from_array(np.array(0.5, np.float32), "s")
    nodes = [helper.make_node("DequantizeLinear", ["q", "s"], ["w"]), helper.make_node("MatMul", ["x", "w"], ["y"])]
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", d]) for n, d in (("x", 3), ("y", 5)))
    graph = helper.make_graph(nodes, "one", [x], [y], [q, s])
    file = saved(tmp_path, helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11))
    document = _infer(file.path, "1x1:a100-sxm4-80gb", batch=2, precision="fp32")
    assert document.predicted.memory_bytes["parameters"] == expected + 4


def test_tied_weight_counts_once() -> None:
    """The embedding that the head reads again is one parameter; half the bytes of two."""
    case = _CASES / "tied_embedding_vocab50257_tp8"
    graph = bind(load_model(case / "model.onnx"), BindOptions(batch=2, dims={"seq": 4}))
    assert [item.name for item in graph.parameters] == ["emb"]
    shape = graph.parameters[0].type.shape
    document = _infer(case / "model.onnx", "1x1:a100-sxm4-80gb", batch=2, dims={"seq": 4})
    assert document.predicted.memory_bytes["parameters"] == shape[0] * shape[1] * 2


def test_initializers_that_are_inputs() -> None:
    """In files of IR 3 they are weights: the only input is x."""
    graph = _case("init_as_input_ir3", 2)
    assert graph.inputs == ("x",) and set(_parameters(graph)) == {"w1", "w2"}


def test_weights_in_nodes() -> None:
    """Weights of Constant and ConstantOfShape nodes are parameters; the alias and its transpose read the same one."""
    graph = _case("weights_in_constant_nodes", 2)
    assert set(_parameters(graph)) == {"w", "w2"}
    reads = [tensor.read for tensor in graph.tensors.values() if tensor.read is not None]
    assert sorted((read.parameter, read.dims) for read in reads) == [("w", (0, 1)), ("w", (1, 0)), ("w2", (0, 1))]


# -- execution -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["qdq_int8_per_channel", "weights_in_constant_nodes", "init_as_input_ir3"])
def test_cases_give_the_outputs_of_onnxruntime(name: str) -> None:
    """The stored outputs were made by onnxruntime from the file's own weights."""
    graph = _case(name, 2)
    with np.load(_CASES / name / "model.io.npz") as stored:
        feeds = {key[3:]: stored[key] for key in stored.files if key.startswith("in:")}
        wanted = {key[4:]: stored[key] for key in stored.files if key.startswith("out:")}
    reader = WeightReader(load_model(_CASES / name / "model.onnx"))
    result = run_reference(graph, StoredWeights(reader), feeds)
    assert set(wanted) == set(graph.output_names)
    for shown in graph.output_names:
        away = np.abs(result.outputs[shown] - wanted[shown])
        step = 0.05 if name.startswith("qdq") else 0.0  # where float32 and float64 round a half differently
        assert away.max() <= step + 1e-5 and np.mean(away > 1e-5) < 0.01


# -- sparse tensors ------------------------------------------------------------------------------------------------


def _sparse(values: np.ndarray, indices: np.ndarray, dims: tuple[int, ...], name: str = "w") -> onnx.SparseTensorProto:
    made = onnx.SparseTensorProto()
    made.values.CopyFrom(numpy_helper.from_array(values, name))
    made.indices.CopyFrom(numpy_helper.from_array(indices, f"{name}_indices"))
    made.dims.extend(dims)
    return made


def _sparse_model(sparse: onnx.SparseTensorProto, *, in_node: bool = False) -> onnx.ModelProto:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    if in_node:
        nodes.insert(0, helper.make_node("Constant", [], ["w"], sparse_value=sparse))
    x, y = (helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", d]) for n, d in (("x", 6), ("y", 4)))
    graph = helper.make_graph(nodes, "sparse", [x], [y])
    if not in_node:
        graph.sparse_initializer.append(sparse)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=8)


@pytest.mark.parametrize("in_node", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_sparse_weights_are_held_dense(in_node: bool, flat: bool, tmp_path: Path) -> None:
    """A sparse tensor is a parameter of its dense shape and weighs as such; its value is that of scipy's layout."""
    rows, columns = np.array([0, 2, 5]), np.array([3, 0, 1])
    indices = rows * 4 + columns if flat else np.stack([rows, columns], 1)
    file = saved(tmp_path, _sparse_model(_sparse(np.array([1, 2, 3], np.float32), indices, (6, 4)), in_node=in_node))
    graph = bind(file, BindOptions(batch=2))
    assert _parameters(graph) == {"w": ("float32", (6, 4), False)}
    dense = np.zeros((6, 4), np.float32)
    dense[rows, columns] = [1, 2, 3]
    np.testing.assert_array_equal(WeightReader(file).read("w"), dense)
    document = _infer(file.path, "1x1:a100-sxm4-80gb", batch=2, precision="fp32")
    assert document.predicted.memory_bytes["parameters"] == 24 * 4


@pytest.mark.parametrize(
    ("indices", "dims", "words"),
    [
        (np.array([0, 2, 24]), (6, 4), "outside the shape"),
        (np.array([0, -1, 3]), (6, 4), "outside the shape"),
        (np.array([0, 1]), (6, 4), "3 sparse elements"),
        (np.zeros((3, 3), np.int64), (6, 4), "indices of 3 dims"),
        (np.array([0, 2, 3]), (2**40, 2**40), "too large"),
        (np.array([0, 2, 3]), (-6, 4), "negative dim"),
    ],
)
def test_damaged_sparse_weights_are_named(
    indices: np.ndarray, dims: tuple[int, ...], words: str, tmp_path: Path
) -> None:
    """What does not fit is refused before anything is made."""
    file = saved(tmp_path, _sparse_model(_sparse(np.array([1, 2, 3], np.float32), indices, dims)))
    with pytest.raises(ModelError, match=f"tensor 'w'.*{words}"):
        WeightReader(file).read("w")


# -- external data -------------------------------------------------------------------------------------------------


def _external(folder: Path, **fields: str) -> Path:
    """A product with a 6 x 4 weight whose entry says ``fields``, beside a file of 96 bytes."""
    (folder / "weights.bin").write_bytes(np.arange(24, dtype=np.float32).tobytes())
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 6] x) => (float[batch, 4] y) { y = MatMul (x, w) }'
    )
    add_weight(model, "w", (6, 4), location=fields.pop("location", "weights.bin"))
    entries = model.graph.initializer[0].external_data
    for key, value in fields.items():
        for index in [index for index, entry in enumerate(entries) if entry.key == key]:
            del entries[index]
        entry = entries.add()
        entry.key, entry.value = key, value
    return saved(folder, model).path


_LIES = {
    "offset past the end": ({"offset": "4"}, "ends at 96, needs 100"),
    "offset before the start": ({"offset": "-4"}, "96 bytes at -4"),
    "offset beyond all numbers": ({"offset": str(2**70)}, "ends at 96"),
    "length too short": ({"length": "92"}, "92 bytes at 0, but its shape needs 96"),
    "length too long": ({"length": str(2**66)}, "but its shape needs 96"),
    "length negative": ({"length": "-96"}, "-96 bytes"),
    "no number": ({"length": "many"}, "not readable"),
    "absent": ({"location": "other.bin"}, "'other.bin' cannot be read in folder"),
    "a folder": ({"location": "folder"}, "'folder' cannot be read in folder"),
    "outside": ({"location": "../weights.bin"}, "'../weights.bin' is not a plain path"),
    "absolute": ({"location": "/etc/hostname"}, "'/etc/hostname' is not a plain path"),
    "nowhere": ({"location": ""}, "'' is not a plain path"),
}


@pytest.mark.parametrize("name", _LIES)
def test_lying_external_data(name: str, tmp_path: Path) -> None:
    """Planning needs dims and type alone; execution is refused with the tensor and what is wrong, exit code 5."""
    fields, words = _LIES[name]
    (tmp_path / "folder").mkdir()
    path = _external(tmp_path, **fields)
    document = _infer(path, "1x2:a100-sxm4-80gb", batch=2)
    plan = tmp_path / "plan.json"
    plan.write_text(to_text(document))
    reader = WeightReader(load_model(path))
    assert not reader.available("w")
    with pytest.raises(ModelError, match="tensor 'w'"):
        reader.read("w")
    with pytest.raises(ApplyError) as caught:
        api.apply_plan(ApplyRequest(plan=plan, model=path))
    assert caught.value.exit_code == 5 and "'w'" in caught.value.message and words in caught.value.message
    assert api.apply_plan(ApplyRequest(plan=plan, model=path, init_random=True, verify=True)).passed


@pytest.mark.parametrize("name", ["absolute", "backslash", "dotdot", "empty", "nested_dotdot"])
def test_no_path_leads_out_of_the_folder(name: str) -> None:
    """The error names tensor and location as the file has it."""
    model = load_model(_CASES / "external_path_traversal" / f"{name}.onnx")
    bind(model, BindOptions(batch=2))
    entry = next(item.value for item in model.proto.graph.initializer[0].external_data if item.key == "location")
    problem = WeightReader(model).problem("w1")
    assert problem is not None and "'w1'" in problem.message and repr(entry) in problem.message


def test_large_stored_integers_are_not_read_to_plan(tmp_path: Path) -> None:
    """An index table of 2^30 elements outside the file is planned though the file holds nothing."""
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 20]> g (float[batch, 4] x) => (float[n, 4] y) { y = Gather (x, w) }'
    )
    add_weight(model, "w", (2**30,))
    model.graph.initializer[0].data_type = TensorProto.INT64
    graph = bind(saved(tmp_path, model), BindOptions(batch=2))
    assert graph.tensors[graph.outputs[0]].type.shape == (2**30, 4)
