"""Which traversal order is best for which model: families of models, orders, placers, and 2 to 8 devices.

Every model is placed as a training step at a batch at which work weighs more than launches, and as an inference of one
example, in float16: on 2, 3, 4 and 8 V100s with NVLink, on 4 L4s with PCIe, and in a box of an A100, an L4 and a CPU.
An order's makespan is the least of its placers'; ``auto`` is ``place``: all orders and placers, then improvement. Small
problems are given to CP-SAT as well.

    python -m tests.bench.traversal_orders [--data DIR] [--models NAME ...] [--clusters NAME ...] [--exact 0.3]
        [--processes 1] [--from build/orders.json] [--json build/orders.json] [--markdown]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

from tap_planner.cluster import Cluster, load_cluster, parse_cluster
from tap_planner.device_placement import (
    ORDERS,
    ExactStatus,
    Placing,
    Problem,
    Try,
    lower_bound_ns,
    place,
    solve_exactly,
)
from tap_planner.device_placement.building import problem_of
from tests.bench.instances import DATA, markdown, table, write_json
from tests.bench.order_tables import MODES, NUMBERING, OTHERS, PLACED_BY, Row, tables
from tests.bench.placed_models import MODELS, Placed, features

PRECISION = "fp16"
UNLIKE = """name: box
library: nccl
node_groups:
  - {name: big, nodes: 1, devices_per_node: 1, device: a100-pcie-80gb}
  - {name: small, nodes: 1, devices_per_node: 1, device: l4}
  - {name: host, nodes: 1, devices_per_node: 1, device: cpu-core}
inter_node: {bandwidth: 32 GB/s, nics_per_node: 1, latency: 3 us, paces: {direct: {efficiency: 0.8}}}
"""
"""Devices of one host are nodes here, whose NICs are their PCIe links; a CPU core takes part."""
V100 = "v100-sxm2-32gb"
CLUSTERS: Mapping[str, str] = {
    **{f"{count} V100": f"1x{count}:{V100}" for count in (2, 3, 4, 8)},
    "4 L4": "1x4:l4",
    "A100 + L4 + CPU": UNLIKE,
}
EXACT_GROUPS = 70
"""Most groups of what CP-SAT is given."""
EXACT_CLUSTERS = ("2 V100", "4 V100")


def cluster_of(name: str) -> Cluster:
    """One of :data:`CLUSTERS`."""
    text = CLUSTERS[name]
    return parse_cluster(text, file="box") if "\n" in text else load_cluster(text)


# -- measuring ---------------------------------------------------------------------------------------------------


def rows_of(placed: Placed, clusters: Sequence[str], data: Path, exact_s: float) -> list[Row]:
    """All figures of a model, one row for each mode and cluster."""
    found: list[Row] = []
    for mode in MODES:
        training = mode == "training"
        graph = placed.graph(data, training=training)
        for cluster in clusters:
            started = time.perf_counter()
            problem = problem_of(graph, cluster_of(cluster), precision=PRECISION, training=training).problem
            row: Row = {"model": placed.name, "family": placed.family, "mode": mode, "cluster": cluster}
            row |= {"operators": len(graph.operators), "tasks": problem.num_tasks, **features(problem)}
            row |= figures(problem, exact_s if cluster in EXACT_CLUSTERS else 0.0)
            found.append(row)
            seconds = time.perf_counter() - started
            print(placed.name, mode, cluster, f"{seconds:.1f} s", file=sys.stderr, flush=True)
    return found


def figures(problem: Problem, exact_s: float) -> Row:
    """Makespans by order and placer, of one device, of ``auto``, and what is proven."""
    placing = place(problem)
    more = place(problem, OTHERS, improve=False)
    tried = [*placing.tries, *more.tries]
    nameless = place(replace(problem, group_names=()), ("lexico-topo",), improve=False)
    single = int(problem.task_ns.sum(axis=0).min())  # also where it lacks memory
    by_order = {name: _least(tried, lambda t, name=name: t.order == name) for name in (*ORDERS, *OTHERS)}
    by_order[NUMBERING] = _least(nameless.tries, lambda t: t.order != "")
    by_placer = {name: _least(tried, lambda t, name=name: t.placer == name and t.order in ORDERS) for name in PLACED_BY}
    best = placing.best
    assert best is not None
    return {
        "single_ns": single,
        "single_fits": any(t.placer == "single-device" and t.fits for t in tried),
        "orders_ns": by_order,
        "placers_ns": by_placer,
        "auto_ns": best.makespan_ns,
        "auto_order": best.order,
        "auto_placer": best.placer,
        **_proven(problem, placing, exact_s),
    }


def _least(tried: Iterable[Try], wanted: Callable[[Try], bool]) -> int | None:
    """The least makespan of the tries that fit, as the placers made them."""
    plain = (t for t in tried if t.fits and not t.placer.endswith("improved") and t.priority != "placed-rank")
    return min((t.makespan_ns for t in plain if wanted(t)), default=None)


def _proven(problem: Problem, placing: Placing, exact_s: float) -> Row:
    """The best bound; for small problems CP-SAT's, which starts from what was found."""
    simple = lower_bound_ns(problem)
    if not exact_s or problem.num_groups > EXACT_GROUPS or placing.best is None:
        return {"bound_ns": simple, "exact": "", "exact_ns": None}
    found = solve_exactly(
        problem, hint=placing.best.placement, priority=placing.priority, deterministic_seconds=exact_s
    )
    proven = found.status is ExactStatus.OPTIMAL
    return {
        "bound_ns": max(simple, found.bound_ns),
        "exact": "optimum" if proven else "bound",
        "exact_ns": found.makespan_ns,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS), choices=list(CLUSTERS))
    parser.add_argument("--exact", type=float, default=0.3, help="CP-SAT's deterministic seconds; 0: not at all")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--from", dest="known", type=Path, help="print the tables of figures that were written before")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown")
    options = parser.parse_args(arguments)
    if options.known is not None:
        rows: list[Row] = json.loads(options.known.read_text(encoding="utf-8"))["rows"]
    else:
        models = [placed.name for placed in MODELS if not options.models or placed.name in options.models]
        rows = _measured(models, options)
    found = tables(rows)
    for caption, lines in found.items():
        print(caption, markdown(lines) if options.markdown else table(lines), "", sep="\n\n")
    write_json(options.json, {"rows": rows})
    return found


def _measured(models: Sequence[str], options: argparse.Namespace) -> list[Row]:
    """Model by model; what is known so far is written."""
    job = partial(_rows_named, clusters=options.clusters, data=options.data, exact_s=options.exact)
    rows: list[Row] = []
    with ExitStack() as stack:
        parts: Iterable[list[Row]] = map(job, models)
        if options.processes > 1:
            pool = stack.enter_context(multiprocessing.get_context("spawn").Pool(options.processes))
            parts = pool.imap(job, models)
        for part in parts:
            rows += part
            write_json(options.json, {"rows": rows})
    return rows


def _rows_named(name: str, *, clusters: Sequence[str], data: Path, exact_s: float) -> list[Row]:
    return rows_of(next(placed for placed in MODELS if placed.name == name), clusters, data, exact_s)


if __name__ == "__main__":
    main()
