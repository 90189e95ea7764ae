"""How long planning takes on the standard instances, and how near the optimum it is proven to be.

``end_to_end_s`` is a cold ``tap-plan`` (median wall clock of several runs), ``peak_mb`` the most memory of its
processes together; ``search_s`` is ``search()`` alone in one process (tables, elimination and master), without import
and parse: the solver is loaded and the graphs of all microbatch counts are bound before. Meshes have at most two axes,
unless it says otherwise.

    python -m tests.bench.bench_search --json build/search.json [--runs 5] [--markdown] [--only NAME ...]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from click import Context

from tap_planner import api
from tap_planner.cluster import MeshAxis, mesh_text
from tap_planner.plan import PlanRequest
from tap_planner_cli.plan import command as tap_plan
from tap_planner_cli.plan import make_options
from tests.bench.instances import DATA, DEVICE, markdown, table, write_json
from tests.bench.processes import measured

STANDARD = {"batch": 1536, "seq": 2048, "mesh": "dp=128,tp=8", "cluster": f"128x8:{DEVICE}"}
"""GPT-3 175B on 128 nodes of 8."""
RUNS = 5
_GPT3 = f"--cluster {STANDARD['cluster']} --batch {STANDARD['batch']} --dim seq={STANDARD['seq']}"
_SMALL = f"--cluster 4x8:{DEVICE} --batch 256"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A call of ``tap-plan``."""

    model: str
    arguments: str
    is_search_alone: bool = False
    """Whether the search is timed by itself as well."""


PLANNINGS = {
    "175B, one mesh, no limit": Planning(
        model="hm_gpt3_175b",
        arguments=f"{_GPT3} --mesh {STANDARD['mesh']} --max-memory none --gap 0%",
        is_search_alone=True,
    ),
    "175B, one mesh": Planning(
        model="hm_gpt3_175b", arguments=f"{_GPT3} --mesh {STANDARD['mesh']} --gap 0%", is_search_alone=True
    ),
    "175B": Planning(model="hm_gpt3_175b", arguments=_GPT3),
    "175B, <= 3 axes": Planning(model="hm_gpt3_175b", arguments=f"{_GPT3} --max-axes 3"),
    "175B, pipelines": Planning(model="hm_gpt3_175b", arguments=f"{_GPT3} --stages auto --schedule auto"),
    "175B, pipelines, <= 3 axes": Planning(
        model="hm_gpt3_175b", arguments=f"{_GPT3} --stages auto --schedule auto --max-axes 3"
    ),
    "405B": Planning(model="hm_llama3_405b", arguments="--cluster 128x8:h100-sxm5-80gb --batch 1024 --dim seq=4096"),
    "70B": Planning(model="hm_llama3_70b", arguments="--cluster 16x8:h100-sxm5-80gb --batch 512 --dim seq=4096"),
    "Mixtral": Planning(model="hm_mixtral_8x7b", arguments="--cluster 8x8:h100-sxm5-80gb --batch 256 --dim seq=4096"),
    "T5": Planning(model="t5_tiny", arguments=f"{_SMALL} --dim seq=512 --dim dec_seq=512"),
    "U-Net": Planning(model="unet_tiny", arguments=_SMALL),
    "U-Net, deep": Planning(model="deep_unet", arguments=_SMALL),
}


def search_s(model: Path, planning: Planning) -> float:
    """Time of the search alone."""
    from ortools.sat.python import cp_model  # noqa: F401  loaded on first use else

    from tap_planner.search import SearchSpace, search

    with Context(tap_plan) as context:
        tap_plan.parse_args(context, [str(model), *planning.arguments.split()])
        given: dict[str, Any] = dict(context.params)
    prepared = api.prepare_search(PlanRequest(model=model, cluster=given["cluster"], options=make_options(given)))
    for count in SearchSpace(prepared.request).counts:
        prepared.request.folded(count)
    started = time.perf_counter()
    search(prepared.request)
    return time.perf_counter() - started


def measure(data: Path, name: str, runs: int) -> dict[str, object]:
    """One row of the table."""
    planning = PLANNINGS[name]
    model = data / f"{planning.model}.onnx"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "plan.json"
        program = str(Path(sys.executable).with_name("tap-plan"))
        line = [program, str(model), *planning.arguments.split(), "-q", "-o", str(output)]
        ended = [measured(line) for _ in range(runs)]
        plan = json.loads(output.read_text(encoding="utf-8"))
    certificate = plan["certificate"]
    alone = [search_s(model, planning) for _ in range(runs)] if planning.is_search_alone else []
    axes = [MeshAxis(name=axis["name"], size=axis["size"]) for axis in plan["mesh"]["axes"]]
    names = [axis.name for axis in axes]
    return {
        "instance": name,
        "end_to_end_s": round(statistics.median(run.seconds for run in ended), 2),
        "search_s": round(statistics.median(alone), 2) if alone else "",
        "objective_ms": round(certificate["objective_ns"] / 1e6, 3),
        "gap": "0" if certificate["status"] == "optimal" else f"{_gap_percent(certificate):.2f} %",
        "mesh": mesh_text(axes, [names.index(name) for name in plan["mesh"].get("device_order", ())]),
        "peak_mb": round(max(run.peak_bytes for run in ended) / 1e6),
        "runs": runs,
    }


def _gap_percent(certificate: dict[str, Any]) -> float:
    return 100 * (1 - certificate["bound_ns"] / certificate["objective_ns"])


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", nargs="+", choices=PLANNINGS, default=list(PLANNINGS), metavar="NAME")
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for name in options.only:
        rows.append(measure(options.data, name, options.runs))
        print(rows[-1], file=sys.stderr, flush=True)
    print((markdown if options.markdown else table)(rows))
    write_json(options.json, rows)
    return rows


def test_search() -> None:
    """The figures can be taken; times are printed and never asserted."""
    rows = main(["--runs", "1", "--only", "175B, one mesh", "T5"])
    assert [row["gap"] for row in rows] == ["0", "0"]


if __name__ == "__main__":
    main()
