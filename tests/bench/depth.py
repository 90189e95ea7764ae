"""How the search's time grows with depth: GPT at the width of 175B with 12 to 1000 layers, on one fixed mesh.

Training as in the standard instance (128 nodes of 8, ``dp=128,tp=8``, batch 1536, sequence 2048, AdamW, bf16); the
search chooses ZeRO, recomputation and microbatches and proves the optimum (gap 0). Three limits: none, the device's
memory, and one that binds at every depth (halfway between the least memory that any plan needs and that of the plan
without a limit). Times are of the search alone: tables, elimination, master. The graphs are bound and folded before,
and what is asked about a graph whatever the mesh (readers, places, batch, blocks) is found out; ``graph_s`` is what the
latter takes, once for each microbatch count: like import it grows with the model.

    python -m tests.bench.depth --json build/depth.json [--layers 12 24 48 96 192 1000] [--runs 5] [--markdown]
        [--svg docs/search-depth.svg] [--from-json build/depth.json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import InfeasibleError
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.search import SearchRequest, SearchResult, search
from tests.bench.bench_search import STANDARD
from tests.bench.chart import Line, line_chart
from tests.bench.deep_models import resized
from tests.bench.instances import DATA, markdown, table, write_json

LAYERS = (12, 24, 48, 96, 192, 1000)
RUNS = 5
LIMITS = ("none", "device", "binding")


def prepare(data: Path, layers: int) -> tuple[SearchRequest, float]:
    """The request without a limit, its graphs bound and folded; and the seconds that facts about one graph take."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(resized(data / "hm_gpt3_175b.onnx", layers).SerializeToString())
        options = PlanOptions(
            batch=int(STANDARD["batch"]),
            dims={"seq": int(STANDARD["seq"])},
            mesh=str(STANDARD["mesh"]),
            loss="mean",
            gap_basis_points=0,
            max_memory_bytes="none",
        )
        prepared = api.prepare_search(PlanRequest(model=path, cluster=str(STANDARD["cluster"]), options=options))
        seconds: list[float] = []
        graphs = prepared.request.graphs
        graphs.folded(1)
        started = time.perf_counter()
        sizes = graphs.sizes
        sizes_s = time.perf_counter() - started
        assert sizes.signatures
        for microbatches in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128):
            graphs.folded(microbatches)  # binding is no part of the search
            started = time.perf_counter()
            graphs.index(microbatches)
            graphs.batch(microbatches)
            graphs.hints(microbatches)
            seconds.append(time.perf_counter() - started)
    return prepared.request, sizes_s + statistics.median(seconds)


def least_memory(request: SearchRequest) -> int:
    """The least memory that any plan of the space is proven to need."""
    with pytest.raises(InfeasibleError) as caught:
        search(replace(request, limit_bytes=1))
    assert caught.value.least_memory_bytes is not None
    return caught.value.least_memory_bytes


def timed(request: SearchRequest, runs: int) -> tuple[float, SearchResult]:
    """Median seconds of the search, and its answer, which is the same every time."""
    seconds: list[float] = []
    results: list[SearchResult] = []
    for _ in range(runs):
        started = time.perf_counter()
        results.append(search(request))
        seconds.append(time.perf_counter() - started)
    assert len({(result.objective_ns, result.bound_ns, result.memory_bytes) for result in results}) == 1
    return statistics.median(seconds), results[0]


def measure(data: Path, layers: int, runs: int) -> dict[str, object]:
    """One row: the search of one depth under each limit."""
    request, graph_s = prepare(data, layers)
    row: dict[str, object] = {
        "layers": layers,
        "operators": len(request.folded(1).graph.operators),
        "graph_s": round(graph_s, 3),
    }
    free_s, free = timed(request, runs)
    halfway = (least_memory(request) + free.memory_bytes) // 2
    limits = {"device": request.cluster.usable_memory_bytes, "binding": halfway}
    found = {"none": (free_s, free)}
    found.update((name, timed(replace(request, limit_bytes=limit), runs)) for name, limit in limits.items())
    for name in LIMITS:
        seconds, result = found[name]
        row[f"{name}_s"] = round(seconds, 3)
        row[f"{name}_gap_ns"] = result.objective_ns - result.bound_ns
        row[f"{name}_gb"] = round(result.memory_bytes / 1e9, 2)
    return row


def with_ratios(rows: Sequence[dict[str, object]]) -> list[dict[str, object]]:
    """The rows with each time over that of the smallest depth."""
    first = rows[0]
    return [
        row | {f"{name}_ratio": round(_number(row, name) / _number(first, name), 2) for name in LIMITS} for row in rows
    ]


def _number(row: dict[str, object], name: str) -> float:
    value = row[f"{name}_s"]
    assert isinstance(value, float)
    return value


def chart(rows: Sequence[dict[str, object]]) -> str:
    """The times as a picture."""
    names = {"none": "no memory limit", "device": "limit of the device", "binding": "limit that binds"}
    lines = [
        Line(name=text, points=tuple((int(str(row["layers"])), _number(row, name)) for row in rows))
        for name, text in names.items()
    ]
    title = "Search time of GPT at the width of 175B on 128x8 devices"
    return line_chart(lines, title=title, x_label="layers", y_label="seconds")


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure, print the table, write the JSON and the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--from-json", type=Path, help="take the figures from here instead of measuring")
    parser.add_argument("--svg", type=Path, help="write the picture here")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    if options.from_json is not None:
        rows = json.loads(options.from_json.read_text(encoding="utf-8"))
    else:
        measured: list[dict[str, object]] = []
        for layers in options.layers:
            measured.append(measure(options.data, layers, options.runs))
            print(measured[-1], file=sys.stderr, flush=True)
        rows = with_ratios(measured)
    print((markdown if options.markdown else table)(rows))
    write_json(options.json, rows)
    if options.svg is not None:
        options.svg.write_text(chart(rows), encoding="utf-8")
    return rows


if __name__ == "__main__":
    main()
