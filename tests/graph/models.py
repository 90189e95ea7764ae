"""Small models for tests: written as ONNX text, or taken from tests/data and the onnx package."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import onnx
import onnx.parser
from onnx import TensorProto

from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind, load_model

DATA = Path(__file__).parents[1] / "data"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
LIGHT_NAMES = tuple(sorted(path.stem for path in LIGHT.glob("light_*.onnx")))
TINY = ("gpt2_tiny", "bert_tiny", "llama_tiny", "vit_tiny", "resnet_small", "t5_tiny", "gshard_moe_tiny")
BIG = ("hm_llama3_8b", "hm_llama3_70b", "hm_gpt3_175b", "hm_mixtral_8x7b")


def data_model(name: str) -> ModelFile:
    """A model of tests/data."""
    return load_model(DATA / f"{name}.onnx")


def light_model(name: str) -> ModelFile:
    """A CNN of the onnx package."""
    return load_model(LIGHT / f"{name}.onnx")


def symbols(model: ModelFile) -> set[str]:
    """Symbolic dims of the inputs."""
    return {
        dim.dim_param
        for value in model.proto.graph.input
        for dim in value.type.tensor_type.shape.dim
        if dim.HasField("dim_param")
    }


def bound(model: ModelFile, *, batch: int = 8, seq: int = 64, training: bool = False) -> Graph:
    """Bind with ``batch`` and, where the model has it, sequence length ``seq``."""
    dims = {name: seq for name in ("seq", "dec_seq") if name in symbols(model)}
    return bind(model, BindOptions(batch=batch, dims=dims, training=training, loss=LossOptions(kind="mean")))


def text_model(folder: Path, body: str, *, name: str = "model.onnx", opset: int = 20, ir: int = 8) -> ModelFile:
    """A model from ONNX text (the graph alone)."""
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]>\n{body}')
    return saved(folder, model, name)


def saved(folder: Path, model: onnx.ModelProto, name: str = "model.onnx") -> ModelFile:
    """Write a model and load it again."""
    path = folder / name
    path.write_bytes(model.SerializeToString())
    return load_model(path)


def add_weight(model: onnx.ModelProto, name: str, shape: tuple[int, ...], *, location: str = "weights.bin") -> None:
    """Add a float initializer whose data lies in an absent file."""
    tensor = model.graph.initializer.add()
    tensor.name = name
    tensor.data_type = TensorProto.FLOAT
    tensor.dims.extend(shape)
    tensor.data_location = TensorProto.EXTERNAL
    entry = tensor.external_data.add()
    entry.key, entry.value = "location", location


def infer_shapes(model: ModelFile, graph: Graph) -> Mapping[str, tuple[int, ...]]:
    """Static shapes that ONNX's own inference finds for the bound model (an independent source)."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model.proto)
    for value in copy.graph.input:
        if value.name in graph.inputs:
            dims = value.type.tensor_type.shape.dim
            del dims[:]
            for size in graph.tensor(value.name).type.shape:
                dims.add().dim_value = size
    del copy.graph.value_info[:]
    for value in copy.graph.output:
        value.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(copy, data_prop=True).graph
    found: dict[str, tuple[int, ...]] = {}
    for value in (*inferred.value_info, *inferred.output):
        shape = value.type.tensor_type.shape.dim
        if all(dim.HasField("dim_value") for dim in shape) and value.type.tensor_type.HasField("shape"):
            found[value.name] = tuple(dim.dim_value for dim in shape)
    return found
