"""Worked cases: one thing of a cluster changes, and the plan with it.

    python -m tests.bench.topologies [--json] [--cases nvls,racks]

Each case plans LLaMA 3 8B on two clusters that differ in one line, and prices the plan of the first on the second: what
it would cost not to know of the difference.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from tap_planner import api
from tap_planner.cluster import Cluster, load_cluster, mesh_text, part_of
from tap_planner.plan import PlanDocument, PlanOptions, expand
from tap_planner.program import lower
from tap_planner.simulate import price_program

MODEL = Path(__file__).parent.parent / "data" / "hm_llama3_8b_fused.onnx"
_FREE = PlanOptions(loss="mean", max_memory_bytes="none", zero=0, recompute="none", microbatches=1)
_RACKS = """\
device: a100-sxm4-80gb
levels:
  - {size: 4, bandwidth: 300 GB/s, latency: 3 us}
  - {size: 2, bandwidth: 25 GB/s, nics: 4, latency: 8 us}
  - {size: 2, bandwidth: 25 GB/s, nics: 8, latency: 12 us, oversubscription: %s}
"""
_GROUPS = """\
node_groups:
  - {name: a, nodes: 1, devices_per_node: 4, device: a100-sxm4-80gb}
  - {name: b, nodes: 1, devices_per_node: 4, device: %s}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 4, latency: 8 us}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Two clusters, and what is planned on both."""

    before: str
    after: str
    batch: int
    seq: int
    options: PlanOptions = field(default=_FREE)
    mesh: str | None = None


def _one_node(device: str, node: str) -> str:
    return f"device: {device}\nnodes: 1\ndevices_per_node: 8\n{node}"


CASES: Mapping[str, Case] = {
    "nvls": Case(
        before=_one_node("h100-sxm5-80gb", "intra_node: {reduces: false}\n"),
        after=_one_node("h100-sxm5-80gb", "intra_node: {reduces: true}\n"),
        batch=4,
        seq=4096,
        mesh="tp=8",
    ),
    "pcie": Case(
        before=_one_node("l40s", "intra_node: {kind: pcie, bandwidth: 32 GB/s}\n"),
        after=_one_node("l40s", "intra_node: {kind: pcie, bandwidth: 32 GB/s, host_bandwidth: 32 GB/s}\n"),
        batch=8,
        seq=1024,
    ),
    "cube mesh": Case(
        before=_one_node("v100-sxm2-32gb", "intra_node: {kind: switch, bandwidth: 150 GB/s}\n"),
        after=_one_node("v100-sxm2-32gb", ""),
        batch=16,
        seq=512,
    ),
    "unlike nodes": Case(
        before=_GROUPS % "a100-sxm4-80gb",
        after=_GROUPS % "a100-sxm4-40gb",
        batch=16,
        seq=2048,
        options=PlanOptions(loss="mean"),
    ),
    "racks": Case(before=_RACKS % 1, after=_RACKS % 8, batch=16, seq=2048),
}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The plans of a case."""

    before: PlanDocument
    after: PlanDocument
    kept_ns: int
    """Objective A of the first plan on the second cluster."""
    kept_fits: bool
    """Whether its memory suffices there."""


def answer(case: Case) -> Answer:
    """Plan a case on both clusters."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        plans: list[PlanDocument] = []
        clusters: list[Cluster] = []
        for text in (case.before, case.after):
            path.write_text(text, encoding="utf-8")
            clusters.append(load_cluster(path))
            plans.append(api.make_plan(_request(case, path)))
        prepared = api.prepare_search(_request(case, path))
    before, after = plans
    lies = (tuple(axis.size for axis in before.mesh.axes), before.mesh.order)
    mesh = next(mesh for mesh in prepared.request.meshes if (mesh.shape, mesh.order) == lies)
    used = part_of(clusters[1], mesh)
    price = price_program(lower(prepared.graphs(before.pipeline.microbatches), expand(before)), used)
    return Answer(
        before=before,
        after=after,
        kept_ns=price.objective_ns,
        kept_fits=price.memory_bytes <= used.usable_memory_bytes,
    )


def _request(case: Case, cluster: Path) -> api.PlanRequest:
    precision = "fp16" if "v100" in case.before else "bf16"
    options = replace(case.options, batch=case.batch, dims={"seq": case.seq}, mesh=case.mesh, precision=precision)
    return api.PlanRequest(model=MODEL, cluster=str(cluster), options=options)


def communicated(document: PlanDocument) -> Counter[str]:
    """Bytes by kind and axes, of all phases: payloads of a step."""
    found: Counter[str] = Counter()
    for entry in document.collectives:
        found[f"{entry.kind} {'+'.join(entry.axes)}"] += entry.count * entry.bytes
    return found


def main() -> None:
    """Answer and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--cases", default=",".join(CASES))
    given = parser.parse_args()
    found = {name: answer(CASES[name]) for name in given.cases.split(",")}
    rows = [
        {
            "case": name,
            "before": _shown(one.before),
            "after": _shown(one.after),
            "kept_ms": one.kept_ns / 1e6,
            "kept_fits": one.kept_fits,
        }
        for name, one in found.items()
    ]
    if given.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        kept = f"{row['kept_ms']:.1f} ms{'' if row['kept_fits'] else ', does not fit'}"
        print(f"{row['case']}\n  before: {row['before']}\n  after:  {row['after']}\n  kept:   {kept}")


def _shown(document: PlanDocument) -> str:
    axes = mesh_text(document.mesh.axes, document.mesh.order)
    sent = ", ".join(f"{what} {size / 2**20:.0f} MiB" for what, size in communicated(document).most_common(4))
    return f"{axes}, {document.certificate.objective_ns / 1e6:.1f} ms; {sent}"


if __name__ == "__main__":
    main()
