"""How long large models take from the file to the folded graph, and how much of each model folds.

Each row of the first table is a process of its own: import of the package, parsing, binding (with shapes), folding,
and the most memory it held. The second table compares ways to infer shapes on the same models; the third is the
folding of every model of the data folder.

    python -m tests.bench.bench_import --json build/import.json [--data DIR] [--runs 3]
"""

from __future__ import annotations

import argparse
import json
import lzma
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import onnx

from tap_planner.folding import fold
from tap_planner.graph import BindOptions, ModelFile, bind, load_model
from tests.bench.deep_models import deepened, residual_chain
from tests.bench.instances import DATA, markdown, table, write_json

_CHILD = """
import json, sys, time
start = time.perf_counter()
from pathlib import Path
from tap_planner.folding import fold
from tap_planner.graph import BindOptions, bind, load_model
options = json.loads(sys.argv[2])
imported = time.perf_counter()
model = load_model(Path(sys.argv[1]))
loaded = time.perf_counter()
graph = bind(model, BindOptions(batch=8, dims=options, training=True))
bound = time.perf_counter()
folded = fold(graph)
done = time.perf_counter()
peak_kib = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
print(json.dumps({
    "nodes": len(model.proto.graph.node),
    "operators": len(graph.operators),
    "import_s": round(imported - start, 2),
    "load_s": round(loaded - imported, 2),
    "bind_s": round(bound - loaded, 2),
    "fold_s": round(done - bound, 2),
    "total_s": round(done - start, 2),
    "peak_gb": round(peak_kib * 1024 / 1e9, 2),
    "folded_percent": round(100 * folded.folded_share, 1),
}))
"""
RUNS = 3
SIZES = {"seq": 64, "dec_seq": 32, "past": 64}


def scale_models(data: Path, folder: Path) -> dict[str, Path]:
    """Large models, written to a folder."""
    made = {
        "hm_gpt3_175b": data / "hm_gpt3_175b.onnx",
        "hm_deepish_700l": folder / "hm_deepish_700l.onnx",
        "gpt, 3225 layers": folder / "gpt.onnx",
        "chain of 25000 residual blocks": folder / "chain.onnx",
    }
    made["hm_deepish_700l"].write_bytes(lzma.decompress((data / "hm_deepish_700l.onnx.xz").read_bytes()))
    made["gpt, 3225 layers"].write_bytes(deepened(data / "hm_gpt_tiny.onnx", 3225).SerializeToString())
    made["chain of 25000 residual blocks"].write_bytes(residual_chain(25_000).SerializeToString())
    return made


def scale(name: str, path: Path, runs: int) -> dict[str, object]:
    """Median by total time of several fresh processes."""
    sizes = json.dumps(dims_of(load_model(path)))
    command = [sys.executable, "-c", _CHILD, str(path), sizes]
    found = [
        json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout) for _ in range(runs)
    ]
    return {"model": name, **sorted(found, key=lambda row: row["total_s"])[len(found) // 2]}


def dims_of(model: ModelFile) -> dict[str, int]:
    """A value for every symbolic dim besides the batch."""
    names = {dim.dim_param for value in model.proto.graph.input for dim in value.type.tensor_type.shape.dim}
    return {name: SIZES[name] for name in sorted(names & SIZES.keys())}


def inference(name: str, path: Path) -> dict[str, object]:
    """Seconds that each way of inferring shapes takes on a model, and how many values it leaves without a shape."""
    model = load_model(path)
    dims = dims_of(model)
    started = time.perf_counter()
    inferred = onnx.shape_inference.infer_shapes(_bound_inputs(model.proto, dims), data_prop=True)
    theirs = time.perf_counter() - started
    known = {value.name for value in inferred.graph.value_info if _is_static(value)}
    made = {name for node in model.proto.graph.node for name in node.output}
    started = time.perf_counter()
    bind(model, BindOptions(batch=8, dims=dims, training=True))
    return {
        "model": name,
        "onnx_shape_inference_s": round(theirs, 2),
        "values_without_shape": len(made - known - {value.name for value in inferred.graph.output}),
        "our_binding_s": round(time.perf_counter() - started, 2),
        "ours_without_shape": 0,
    }


def _bound_inputs(proto: onnx.ModelProto, dims: Mapping[str, int]) -> onnx.ModelProto:
    copy = onnx.ModelProto()
    copy.CopyFrom(proto)
    for value in copy.graph.input:
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.dim_value = dims.get(dim.dim_param, 8)
    return copy


def _is_static(value: onnx.ValueInfoProto) -> bool:
    shape = value.type.tensor_type.shape
    return value.type.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in shape.dim)


def folding(path: Path) -> dict[str, object]:
    """How much of a model is repeats of other parts."""
    model = load_model(path)
    graph = bind(model, BindOptions(dims=dims_of(model), batch=None if _fixed_batch(model) else 8))
    folded = fold(graph)
    return {
        "model": path.stem,
        "operators": len(graph.operators),
        "unique": len(folded.representatives()),
        "folded_percent": round(100 * folded.folded_share, 1),
        "in_runs_percent": round(100 * folded.chained_share, 1),
        "runs": " ".join(f"{run.count}x{run.period}" for run in folded.runs) or "-",
        "shared_blocks": " ".join(f"{len(block.starts)}x{block.size}" for block in folded.shared) or "-",
    }


def _fixed_batch(model: ModelFile) -> bool:
    return not any(
        dim.dim_param == "batch" for value in model.proto.graph.input for dim in value.type.tensor_type.shape.dim
    )


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        models = scale_models(options.data, Path(folder))
        result: dict[str, list[dict[str, object]]] = {
            "scale": [scale(name, path, options.runs) for name, path in models.items()],
            "inference": [inference(name, path) for name, path in models.items()],
            "folding": [folding(path) for path in sorted(options.data.glob("*.onnx"))],
        }
    show = markdown if options.markdown else table
    print(*(show(rows) for rows in result.values()), sep="\n\n")
    write_json(options.json, result)
    return result


def test_import() -> None:
    """The figures can be taken; times are printed and never asserted."""
    assert len(main(["--runs", "1"])["scale"]) == 4


if __name__ == "__main__":
    main()
