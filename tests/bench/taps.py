"""What knowing the topology saves: TAPS's table on our own baseline.

    python -m tests.bench.taps [--data DIR] [--json] [--models alexnet,gpt] [--nodes 2,4] [--gbits 25] [--whole-steps]

Each model is planned twice for nodes of eight V100-like devices with one NIC a node: with communication priced by its
volume (``--cost volume``) and by the topology. Of both plans the communication of a step is then priced by the
topology, each collective with its latency. No ZeRO, no recompute, one microbatch, no memory limit, and no device
repeats a matrix product or convolution that another does (a rule for both plans: on a slow network it can be fastest to
repeat all work and send nothing): what differs is who splits what over which devices. Both are chosen by communication
alone: operators take next to no time. With ``--whole-steps`` they take what they take on a V100, and a plan may send
more in order to compute less.

A plan by volume says nothing about which of its axes lies inside the node: all orders cost the same. *Saving* takes the
order that is best for it, *worst ties* the worst one. *Flat* allows rings only, as a planner does that knows no
hierarchical collectives. *Grid* prices both by the measured V100 grid (2 nodes of 8 with 25 Gbit/s).
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import onnx

from tap_planner import api
from tap_planner.cluster import Cluster, Mesh, MeshAxis, load_cluster, mesh_text
from tap_planner.cost import CollectiveModel
from tap_planner.plan import CollectiveEntry, PlanDocument, PlanOptions, parse_constraint
from tests.bench.collective_rows import DATA
from tests.bench.grid_times import GridTimes, read_grid

MODELS_FOLDER = Path(__file__).parent.parent / "data"
LIGHT = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
NODES = (2, 4, 8, 16)
GBITS = (25, 100, 400)
DEVICES_PER_NODE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model at a fixed batch per device."""

    path: Path
    batch: int
    products: tuple[str, ...]
    """Types of its matrix products and convolutions."""
    dims: tuple[tuple[str, int], ...] = ()


AXES = ("dp", "tp")
CASES = {
    "alexnet": Case(path=LIGHT / "light_bvlc_alexnet.onnx", batch=32, products=("Conv", "Gemm")),
    "vgg": Case(path=LIGHT / "light_vgg19.onnx", batch=32, products=("Conv", "Gemm")),
    "resnet50": Case(path=LIGHT / "light_resnet50.onnx", batch=32, products=("Conv", "Gemm")),
    "gpt": Case(path=MODELS_FOLDER / "hm_gpt3_175b.onnx", batch=4, products=("MatMul",), dims=(("seq", 2048),)),
    "llama": Case(path=MODELS_FOLDER / "hm_llama3_8b.onnx", batch=4, products=("MatMul",), dims=(("seq", 2048),)),
    "moe": Case(path=MODELS_FOLDER / "hm_mixtral_8x7b.onnx", batch=4, products=("MatMul",), dims=(("seq", 2048),)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Communication of a step of both plans in ms, priced by the topology, and what the better plan saves."""

    model: str
    nodes: int
    gbits: int
    volume_mesh: str
    topology_mesh: str
    volume_ms: float
    topology_ms: float
    saving: float
    worst_ties: float
    flat: float
    grid: float | None
    """On the measured grid; None elsewhere, and where it lacks a collective."""


_FREE = (
    "{like: v100-sxm2-32gb, launch: 1 ns, backward_launch: 1 ns, memory_bandwidth: 900000 TB/s, "
    "peak_flops: {float16: 900000 TFLOP/s, float32: 900000 TFLOP/s}}"
)
"""A device whose operators take next to no time."""


def cluster_text(nodes: int, gbits: int, *, whole_steps: bool = False) -> str:
    """The cluster.yaml of one column."""
    device = "v100-sxm2-32gb" if whole_steps else _FREE
    return (
        f"name: v100-{nodes}x{DEVICES_PER_NODE}\ndevice: {device}\nnodes: {nodes}\n"
        f"devices_per_node: {DEVICES_PER_NODE}\n"
        f"inter_node: {{bandwidth: {gbits} Gbit/s, nics_per_node: 1, transport: ethernet}}\n"
    )


def plan_of(case: Case, cluster: Path, cost: str) -> PlanDocument:
    """The plan that one way of pricing finds."""
    devices = load_cluster(cluster).num_devices
    options = PlanOptions(
        batch=case.batch * devices,
        precision="fp16",
        loss="mean",
        dims=dict(case.dims),
        cost=cost,
        zero=0,
        recompute="none",
        microbatches=1,
        max_memory_bytes="none",
        constraints=tuple(parse_constraint(f"{type_}: {axis}!=none") for type_ in case.products for axis in AXES),
    )
    return api.make_plan(api.PlanRequest(model=case.path, cluster=str(cluster), options=options))


Price = Callable[[str, Mesh, tuple[int, ...], int], float]
"""(kind, mesh, axes, payload in bytes) -> ns."""


def communication_ns(document: PlanDocument, order: Sequence[int], price: Price) -> float:
    """Collectives of a step, the plan's axes laid on the devices in ``order``, outermost first."""
    axes = [document.mesh.axes[axis] for axis in order]
    mesh = Mesh(axes=tuple(MeshAxis(name=axis.name, size=axis.size) for axis in axes))
    number = {axis.name: index for index, axis in enumerate(axes)}

    def one(entry: CollectiveEntry) -> float:
        return entry.count * price(entry.kind, mesh, tuple(sorted(number[name] for name in entry.axes)), entry.bytes)

    return sum(one(entry) for entry in document.collectives)


class Topology:
    """Prices of a cluster, with all algorithms of the library or rings only.

    Args:
        cluster: the topology.
        rings: whether groups of ranks know no other algorithm than rings.
    """

    def __init__(self, cluster: Cluster, *, rings: bool = False) -> None:
        self._cluster, self._rings = cluster, rings
        self._models: dict[Mesh, CollectiveModel] = {}

    def __call__(self, kind: str, mesh: Mesh, axes: tuple[int, ...], num_bytes: int) -> float:
        model = self._models.setdefault(mesh, CollectiveModel(self._cluster, mesh))
        if not self._rings:
            return model.cost(kind, axes, num_bytes).ns
        lines = [line for line in model.algorithms(kind, axes) if line.name in ("ring", "pairwise", "direct")]
        return min(line.alpha_ns + num_bytes * line.ns_per_byte for line in lines) if num_bytes else 0.0


def compare(name: str, nodes: int, gbits: int, grid: GridTimes, *, whole_steps: bool = False) -> Row:
    """Plan a model both ways and price both."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        path.write_text(cluster_text(nodes, gbits, whole_steps=whole_steps), encoding="utf-8")
        cluster = load_cluster(path)
        plans = {cost: plan_of(CASES[name], path, cost) for cost in ("volume", "topology")}
    volume, topology = plans["volume"], plans["topology"]
    orders = list(itertools.permutations(range(len(volume.mesh.axes))))
    as_planned = topology.mesh.order or range(len(topology.mesh.axes))
    true, flat = Topology(cluster), Topology(cluster, rings=True)
    ties = [communication_ns(volume, order, true) for order in orders]
    best = communication_ns(topology, as_planned, true)
    measured = None
    if (nodes, gbits) == (2, 25):
        by_grid = [communication_ns(volume, order, grid) for order in orders]
        own = communication_ns(topology, as_planned, grid)
        measured = _saving(min(by_grid), own) if own < float("inf") else None
    return Row(
        model=name,
        nodes=nodes,
        gbits=gbits,
        volume_mesh=_label(volume),
        topology_mesh=_label(topology),
        volume_ms=min(ties) / 1e6,
        topology_ms=best / 1e6,
        saving=_saving(min(ties), best),
        worst_ties=_saving(max(ties), best),
        flat=_saving(
            min(communication_ns(volume, order, flat) for order in orders), communication_ns(topology, as_planned, flat)
        ),
        grid=measured,
    )


def _saving(before: float, after: float) -> float:
    return 1 - after / before if before else 0.0


def _label(document: PlanDocument) -> str:
    return mesh_text(document.mesh.axes, document.mesh.order)


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--models", default=",".join(CASES))
    parser.add_argument("--nodes", default=",".join(map(str, NODES)))
    parser.add_argument("--gbits", default=",".join(map(str, GBITS)))
    parser.add_argument("--whole-steps", action="store_true")
    given = parser.parse_args()
    grid = read_grid(given.data)
    rows: list[Row] = []
    for name, gbits, nodes in itertools.product(
        given.models.split(","), given.gbits.split(","), given.nodes.split(",")
    ):
        rows.append(compare(name, int(nodes), int(gbits), grid, whole_steps=given.whole_steps))
        print(rows[-1], file=sys.stderr, flush=True)
    print(json.dumps([asdict(row) for row in rows], indent=2) if given.json else markdown(rows))


def markdown(rows: Sequence[Row]) -> str:
    """The table, and the mean of each bandwidth."""
    head = "| model | nodes | Gbit/s | by volume | by topology | saving | worst ties | flat | grid |"
    lines = [head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
    for row in rows:
        grid = "" if row.grid is None else f"{row.grid:.1%}"
        lines.append(
            f"| {row.model} | {row.nodes} | {row.gbits} | {row.volume_ms:.1f} ms, {row.volume_mesh} | "
            f"{row.topology_ms:.1f} ms, {row.topology_mesh} | {row.saving:.1%} | {row.worst_ties:.1%} | "
            f"{row.flat:.1%} | {grid} |"
        )
    for gbits in dict.fromkeys(row.gbits for row in rows):
        same = [row.saving for row in rows if row.gbits == gbits]
        lines.append(f"\nAt {gbits} Gbit/s: mean saving {sum(same) / len(same):.1%}, largest {max(same):.1%}, ")
        lines[-1] += f"least {min(same):.1%}."
    return "\n".join(lines)


if __name__ == "__main__":
    main()
