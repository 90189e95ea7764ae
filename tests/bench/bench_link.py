"""Collectives and training steps on two namespaces joined by 100 Mbit/s: bytes and times, predicted and measured.

python -m tests.bench.bench_link [--payload-kib 1024] [--json build/link.json]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tap_planner.cost import leaving_bytes
from tests.bench.instances import markdown, write_json
from tests.network.namespaces import joined_namespaces, unavailable
from tests.network.places import KINDS, LINK_BITS_PER_S, PLACES, costs_on
from tests.network.plans import measure_steps, two_plans
from tests.network.probes import run_collective
from tests.network.ranks import Ranks, ranks_on

BEST_OF = 6
STEPS = 8

Row = dict[str, object]


def collectives(ranks: Ranks, payload: int) -> list[Row]:
    """Every collective in every place."""
    rows: list[Row] = []
    for place, (mesh_shape, axes) in PLACES.items():
        costs = costs_on(mesh_shape)
        for kind in KINDS:
            ranks.call(run_collective, mesh_shape, kind, axes, payload)
            runs = [ranks.measured(run_collective, mesh_shape, kind, axes, payload) for _ in range(BEST_OF)]
            rows.append(
                {
                    "collective": kind,
                    "groups": place,
                    "bytes predicted": max(leaving_bytes(costs, kind, axes, payload)),
                    "measured": max(max(traffic.bytes_by_node) for _, traffic in runs),
                    "ms predicted": f"{costs.cost(kind, axes, payload).ns / 1e6:.1f}",
                    "ms measured": f"{min(max(times) for times, _ in runs) * 1e3:.1f}",
                }
            )
    return rows


def steps(ranks: Ranks, folder: Path) -> list[Row]:
    """A step of the plan chosen by volume, and of the one that knows the topology."""
    cases = two_plans(folder)
    measured = measure_steps(ranks, cases, STEPS)
    return [
        {
            "plan chosen by": name,
            "sent by a device, at least": case.document.sent_bytes,
            "bytes predicted": max(case.leaving_bytes),
            "measured": max(measured[name].bytes_by_node),
            "ms predicted": f"{case.step_ns / 1e6:.0f}",
            "ms measured": f"{measured[name].best_s * 1e3:.0f}",
        }
        for name, case in cases.items()
    ]


def main(arguments: Sequence[str] | None = None) -> dict[str, list[Row]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--payload-kib", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write the figures here")
    options = parser.parse_args(arguments)
    reason = unavailable()
    if reason is not None:
        sys.exit(reason)
    with (
        tempfile.TemporaryDirectory() as folder,
        joined_namespaces(LINK_BITS_PER_S) as nodes,
        ranks_on(nodes, 2) as ranks,
    ):
        result = {"collectives": collectives(ranks, options.payload_kib * 1024), "steps": steps(ranks, Path(folder))}
    for rows in result.values():
        print(markdown(rows), end="\n\n")
    write_json(options.json, result)
    return result


def test_link() -> None:
    """All that leaves a node is within 2 % of the prediction."""
    if reason := unavailable():
        pytest.skip(reason)
    for rows in main([]).values():
        for row in rows:
            assert row["measured"] == pytest.approx(row["bytes predicted"], rel=0.02, abs=1024)


if __name__ == "__main__":
    main()
