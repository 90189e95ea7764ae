"""What becomes of every test model, the onnx package's CNNs, and every case: the tables of docs/coverage.md.

Models are bound for inference and for training, folded, and planned on 2x2 A100s by one cold ``tap-plan`` (training
where it can be trained, else inference). Cases are given to one cold ``tap-plan`` each, with the dims that their README
binds and the values that ``OFFERED`` holds; the outcome is its last line.

    python -m tests.bench.coverage --models DIR --cases DIR [--json FILE] [--markdown] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from tap_planner.errors import TapError
from tap_planner.folding import fold
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.operators import lookup
from tests.bench.instances import DATA, DEVICE, light_models, markdown, table, write_json

BATCH = 8
SIZES: Mapping[str, int] = {"seq": 16, "dec_seq": 8, "past": 8, "past_len": 8}
"""Symbolic dims besides the batch; others are 8."""
TIMEOUT_S = 600
_BIND = re.compile(r"^Bind: (\{.*\})$", re.MULTILINE)
CLUSTER = f"2x2:{DEVICE}"
MODES = ("infer", "train")


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """A model bound and folded, or why it could not be."""

    graph: Graph | None
    problem: str
    folded_percent: float
    bind_s: float
    fold_s: float


def symbolic_dims(path: Path) -> tuple[str, ...]:
    """Names of the symbolic dims of a file's inputs, in order."""
    model = onnx.load(path, load_external_data=False)
    stored = {tensor.name for tensor in model.graph.initializer}
    names: dict[str, None] = {}
    for value in model.graph.input:
        if value.name not in stored:
            names.update((dim.dim_param, None) for dim in value.type.tensor_type.shape.dim if dim.dim_param)
    return tuple(names)


def takes_batch(path: Path, dims: Sequence[str]) -> bool:
    """Whether the batch is free: it is symbolic, or the network is one of those that are re-batched."""
    return "batch" in dims or path.stem.startswith("light_")


def bound(path: Path, dims: Sequence[str], mode: str) -> Bound:
    """Bind and fold a model.

    Args:
        path: ONNX file.
        dims: its symbolic dims.
        mode: ``infer`` or ``train``.
    """
    options = BindOptions(
        batch=BATCH if takes_batch(path, dims) else None,
        dims={name: SIZES.get(name, 8) for name in dims if name != "batch"},
        training=mode == "train",
    )
    started = time.perf_counter()
    try:
        graph = bind(load_model(path), options)
    except TapError as error:
        return Bound(graph=None, problem=error.message, folded_percent=0.0, bind_s=0.0, fold_s=0.0)
    between = time.perf_counter()
    folded = fold(graph)
    return Bound(
        graph=graph,
        problem="",
        folded_percent=100 * folded.folded_share,
        bind_s=between - started,
        fold_s=time.perf_counter() - between,
    )


def model_row(path: Path, folder: Path) -> dict[str, object]:
    """One model: bound in both modes, planned once."""
    dims = symbolic_dims(path)
    found = {mode: bound(path, dims, mode) for mode in MODES}
    graphs = [found[mode].graph for mode in MODES]
    graph = graphs[0] or graphs[1]
    unknown = (
        sorted({o.type for o in graph.operators if not lookup(o.type).known and o.type != "Loss"}) if graph else []
    )
    mode = "train" if graphs[1] is not None else "infer"
    sizes = {name: SIZES.get(name, 8) for name in dims if name != "batch"}
    options = [word for name, size in sizes.items() for word in ("--dim", f"{name}={size}")]
    options += ["--batch", str(BATCH)] if takes_batch(path, dims) else []
    return {
        "model": path.stem,
        "operators": len(graph.operators) if graph else "-",
        "parameters": len(graph.parameters) if graph else "-",
        "unknown": ", ".join(unknown) or "none",
        "infer": found["infer"].problem or "bound",
        "train": found["train"].problem or "bound",
        "folded %": f"{found[mode].folded_percent:.1f}",
        "bind s": f"{found[mode].bind_s:.2f}",
        "fold s": f"{found[mode].fold_s:.2f}",
        "plan on 2x2": planned(path, CLUSTER, [*options, "--mode", mode], folder) if graph else "-",
    }


def planned(path: Path, cluster: str, options: Sequence[str], folder: Path) -> str:
    """The outcome of one cold tap-plan in a line: exit code, and the plan or the error.

    Args:
        path: ONNX file.
        cluster: file or shorthand.
        options: of tap-plan.
        folder: for the plan and the report.
    """
    plan, report = folder / "plan.json", folder / "report.json"
    for written in (plan, report):
        written.unlink(missing_ok=True)
    command = [str(Path(sys.executable).with_name("tap-plan")), str(path), "--cluster", cluster, *options]
    started = time.perf_counter()
    try:
        done = subprocess.run(
            [*command, "-o", str(plan), "--report", str(report)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"no answer in {TIMEOUT_S} s"
    seconds = time.perf_counter() - started
    return f"{done.returncode}: {_said(done, plan, report)} ({seconds:.1f} s)"


def _said(done: subprocess.CompletedProcess[str], plan: Path, report: Path) -> str:
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.startswith(("error:", "internal error:"))]
        hints = [f"; {line}" for line in done.stderr.splitlines() if line.startswith("hint:")]
        return lines[0].partition("error: ")[2] + "".join(hints) if lines else "no message"
    document, found = (json.loads(file.read_text(encoding="utf-8")) for file in (plan, report))
    axes = " x ".join(f"{axis['name']}={axis['size']}" for axis in document["mesh"]["axes"])
    warnings = [line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith("warning:")]
    notes = [f"; {warning}" for warning in warnings if "no loss was given" not in warning]
    return f"{found['status']}, {axes}, {found['objective_ns'] / 1e6:.3f} ms{''.join(notes)}"


def models(folder: Path, scratch: Path) -> Iterator[Path]:
    """The ONNX files of a folder by name; compressed ones are written out to ``scratch``."""
    for path in sorted(folder.iterdir()):
        if path.suffix == ".onnx":
            yield path
        elif path.name.endswith(".onnx.xz") and not path.with_suffix("").exists():
            plain = scratch / path.stem
            plain.write_bytes(lzma.decompress(path.read_bytes()))
            yield plain


OFFERED: Mapping[str, tuple[str, ...]] = {
    "if_selected_by_input_value/model": ("--value", "sr=16000"),
    "nameless_and_shapeless/no_rank": ("--shape", "x=4,8"),
    "nameless_and_shapeless/unnamed_dim": ("--dim", "x.0=4"),
    "sequences_and_strings/strings": ("--dim", "n=4"),
    "shape_from_data/nonzero": ("--dim", "k=24"),
    "shape_from_data/reshape_input": ("--value", "shp=8,3"),
}
"""Values that the first error asks for; the table shows both outcomes."""


def case_rows(folder: Path, scratch: Path) -> Iterator[dict[str, object]]:
    """Every model of one case."""
    text = (folder / "README.md").read_text(encoding="utf-8")
    found = _BIND.search(text)
    dims: dict[str, int] = json.loads(found[1]) if found else {}
    paths = sorted(folder.glob("*.onnx"))
    for path in paths:
        cluster = folder / "cluster.yaml"
        clusters = [cluster] if cluster.exists() else sorted(folder.glob("*.yaml"))
        for each in clusters:
            options = _options(path, dims)
            name = f"{folder.name}/{path.stem}" + ("" if each == cluster else f" on {each.name}")
            yield {"case": name, "given": " ".join(options), "tap-plan": _line(path, each, options, scratch, folder)}
            offered = OFFERED.get(f"{folder.name}/{path.stem}", ())
            if offered:
                more = [*options, *offered]
                yield {"case": name, "given": " ".join(more), "tap-plan": _line(path, each, more, scratch, folder)}


def _options(path: Path, dims: Mapping[str, int]) -> list[str]:
    """Options that bind the README's dims; a batch that it leaves open is 4."""
    options: list[str] = []
    for name, size in dims.items():
        options += ["--batch", str(size)] if name == "batch" else ["--dim", f"{name}={size}"]
    if "batch" not in dims and "batch" in _readable_dims(path):
        options += ["--batch", "4"]
    return options


def _readable_dims(path: Path) -> tuple[str, ...]:
    try:
        return symbolic_dims(path)
    except Exception:  # whatever protobuf says of files that are no models
        return ()


def _line(path: Path, cluster: Path, options: Sequence[str], scratch: Path, folder: Path) -> str:
    line = planned(path, str(cluster), [*options, "--mode", "infer"], scratch)
    return line.replace(f"{folder}/", "")


def measure(
    model_folder: Path, case_folder: Path, only: Sequence[str], progress: Callable[[object], None]
) -> dict[str, list[dict[str, object]]]:
    """Both tables.

    Args:
        model_folder: holds ``*.onnx`` and ``*.onnx.xz``.
        case_folder: holds a folder per case.
        only: names to look at; empty: all.
        progress: told of every row.
    """
    result: dict[str, list[dict[str, object]]] = {"models": [], "cases": []}
    with tempfile.TemporaryDirectory() as scratch:
        for path in (*models(model_folder, Path(scratch)), *(instance.path for instance in light_models())):
            if not only or path.stem in only:
                result["models"].append(model_row(path, Path(scratch)))
                progress(result["models"][-1])
        for folder in sorted(path for path in case_folder.iterdir() if path.is_dir()):
            if not only or folder.name in only:
                for row in case_rows(folder, Path(scratch)):
                    result["cases"].append(row)
                    progress(row)
    return result


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--cases", type=Path, default=DATA / "cases", help="folder of the cases")
    parser.add_argument("--json", type=Path, help="write the rows here")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--only", nargs="*", default=(), help="only these models and cases")
    options = parser.parse_args(arguments)
    result = measure(options.models, options.cases, options.only, lambda row: print(row, file=sys.stderr, flush=True))
    shown = markdown if options.markdown else table
    print(shown(result["models"]), "", shown(result["cases"]), sep="\n")
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
