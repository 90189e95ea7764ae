"""The folded search against the unfolded one-hot integer program of Alpa (``one_hot.py``), on the same tables.

Training with AdamW in bf16, ZeRO 1, one microbatch, no recomputation, no memory limit, a fixed mesh of two axes. Times
are those of solving alone: tables are made beforehand on both sides (of folded ones only the first: later ones count).
A solver that did not finish in its time is shown with ``>=``, one that ran out of memory (16 GiB) as failed. Its
solution is priced again in integers; ``equal`` says that it costs what the search proved optimal.

    python -m tests.bench.ilp --json build/ilp.json [--time-limit 1800] [--layers 2 6 12 24 48 96] [--models gpt ...]
        [--solvers highs cp-sat] [--markdown]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from tap_planner.api import PreparedSearch, prepare_search
from tap_planner.plan import PlanOptions, PlanRequest
from tests.bench.deep_models import resized
from tests.bench.instances import DATA, DEVICE, markdown, table, write_json
from tests.bench.one_hot import OneHot, Solved, one_hot, solve_cp_sat, solve_highs
from tests.bench.tables import Folded, Tables, folded_search, unfolded_tables
from tests.bench.windowed_gpt import windowed_gpt

LAYERS = (2, 6, 12, 24, 48, 96)
TIME_LIMIT_S = 1800.0
RUNS = 5
SOLVERS: Mapping[str, Callable[[OneHot, float], Solved]] = {"highs": solve_highs, "cp-sat": solve_cp_sat}
WINDOWED_DIMS = {"segments": 32, "windows": 32, "positions": 32}


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model of any depth, on a mesh."""

    build: Callable[[Path, int], onnx.ModelProto]
    """(folder of the ONNX files, layers) -> model."""
    cluster: str
    options: PlanOptions


def _options(batch: int, dims: Mapping[str, int], mesh: str) -> PlanOptions:
    return PlanOptions(
        batch=batch,
        dims=dims,
        mesh=mesh,
        loss="mean",
        zero=1,
        recompute="none",
        microbatches=1,
        max_memory_bytes="none",
    )


SUBJECTS: Mapping[str, Subject] = {
    "gpt": Subject(
        build=lambda data, layers: resized(data / "hm_gpt3_175b.onnx", layers),
        cluster=f"4x8:{DEVICE}",
        options=_options(1536, {"seq": 2048}, "dp=4,tp=8"),
    ),
    "windowed_gpt": Subject(
        build=lambda data, layers: windowed_gpt(layers),
        cluster=f"4x8:{DEVICE}",
        options=_options(32, WINDOWED_DIMS, "dp=4,tp=8"),
    ),
}
"""GPT-3 at the width of 175B with any number of layers; the same over windows, with over 50 strategies an operator."""


def prepare(subject: Subject, data: Path, layers: int) -> PreparedSearch:
    """Bind the model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        path.write_bytes(subject.build(data, layers).SerializeToString())
        return prepare_search(PlanRequest(model=path, cluster=subject.cluster, options=subject.options))


def compare(name: str, data: Path, layers: int, solvers: Sequence[str], limit_s: float) -> dict[str, object]:
    """One row: the search and every solver on one model."""
    prepared = prepare(SUBJECTS[name], data, layers)
    tables, unfolded_s = unfolded_tables(prepared)
    folded = folded_search(prepared, RUNS)
    check_same_tables(tables, folded)
    program = one_hot(tables)
    row: dict[str, object] = {
        "model": name,
        "layers": layers,
        "operators": tables.num_operators,
        "strategies_each": round(tables.mean_strategies, 1),
        "binaries": len(program.costs),
        "rows": len(program.low),
        "tables_s": round(folded.tables_s, 3),
        "unfolded_tables_s": round(unfolded_s, 3),
        "objective_ms": f"{folded.ns / 1e6:.3f}",
        "gap_ns": folded.ns - folded.bound_ns,
        "search_s": round(folded.solve_s, 4),
    }
    for solver in solvers:
        solved = SOLVERS[solver](program, limit_s)
        row.update(_outcome(solver, solved, tables, folded))
    return row


def check_same_tables(tables: Tables, folded: Folded) -> None:
    """The unfolded tables price the search's plan as the folded ones do."""
    assert tables.evaluate(folded.values) == folded.ns


def _outcome(solver: str, solved: Solved, tables: Tables, folded: Folded) -> dict[str, object]:
    sign = "" if solved.finished else "failed after " if solved.failed else ">= "
    ns = None if solved.values is None else tables.evaluate(solved.values)
    if ns is None:
        verdict = "no solution found"
    elif ns == folded.ns:
        verdict = "equal" if solved.finished else "equal, unproven"
    else:
        verdict = f"{100 * (ns - folded.ns) / folded.ns:+.4f} %"
    return {
        f"{solver}_s": f"{sign}{solved.seconds:.2f}",
        f"{solver}_ratio": f"{sign}{solved.seconds / folded.solve_s:.0f}",
        f"{solver}_optimum": verdict,
    }


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here, after every row")
    parser.add_argument("--time-limit", type=float, default=TIME_LIMIT_S, help="seconds for each solver")
    parser.add_argument("--layers", type=int, nargs="+", default=list(LAYERS))
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--solvers", nargs="*", choices=list(SOLVERS), default=list(SOLVERS))
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for name in options.models:
        for layers in options.layers:
            rows.append(compare(name, options.data, layers, options.solvers, options.time_limit))
            print(rows[-1], file=sys.stderr, flush=True)
            write_json(options.json, rows)
    print((markdown if options.markdown else table)(rows))
    return rows


if __name__ == "__main__":
    main()
