"""A model on two nodes: the plan that is chosen by volume, and the one that knows the topology; and their steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import onnx.parser

from tap_planner import api
from tap_planner.apply import ApplyJob
from tap_planner.cluster import load_cluster, parse_mesh
from tap_planner.cost import CollectiveModel, leaving_bytes_of_step
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest, expand
from tap_planner.requests import bind_options
from tests.graph.models import add_weight, saved
from tests.network.places import CLUSTER
from tests.network.ranks import Ranks
from tests.network.steps import get_ready, run_step

_WIDTHS = (256, 1024, 256, 1024, 256)
_OPTIONS = PlanOptions(
    batch=1024,
    precision="fp32",
    optimizer="sgd",
    loss="mean",
    recompute="none",
    microbatches=1,
    max_memory_bytes=6_000_000,  # a device cannot hold everything, and so has to communicate
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan, and what is said of its step on the true cluster."""

    document: PlanDocument
    model: Path
    leaving_bytes: tuple[int, ...]
    step_ns: int

    @property
    def job(self) -> ApplyJob:
        """For tap-apply."""
        return ApplyJob(
            model=self.model,
            options=bind_options(self.document.options),
            decisions=expand(self.document),
            graph_digest=self.document.model.graph_digest,
            random_weights=True,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What was seen of a step."""

    bytes_by_node: tuple[int, int]
    seconds: tuple[float, ...]

    @property
    def best_s(self) -> float:
        """The fastest."""
        return min(self.seconds)


def two_plans(folder: Path) -> dict[str, Case]:
    """The plans chosen by ``volume`` and by ``topology``; the model is written into a folder."""
    model = _model(folder)
    return {cost: _planned(model, replace(_OPTIONS, cost=cost)) for cost in ("volume", "topology")}


def _model(folder: Path) -> Path:
    """Four matrices with activations between them."""
    last = len(_WIDTHS) - 1
    lines = [f"a{i} = MatMul(h{i}, w{i})\nh{i + 1} = Relu(a{i})" for i in range(last)]
    text = f"g (float[batch, {_WIDTHS[0]}] h0) => (float[batch, {_WIDTHS[-1]}] h{last}) {{ {' '.join(lines)} }}"
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\n{text}')
    for number, shape in enumerate(itertools.pairwise(_WIDTHS)):
        add_weight(proto, f"w{number}", shape)
    saved(folder, proto)
    return folder / "model.onnx"


def _planned(model: Path, options: PlanOptions) -> Case:
    document = api.make_plan(PlanRequest(model=model, cluster=CLUSTER, options=options))
    cluster = load_cluster(CLUSTER)
    mesh = parse_mesh(",".join(f"{axis.name}={axis.size}" for axis in document.mesh.axes), cluster)
    return Case(
        document=document,
        model=model,
        leaving_bytes=leaving_bytes_of_step(CollectiveModel(cluster, mesh), document.collectives),
        step_ns=api.simulate_plan(document, model).step_ns,
    )


def measure_steps(ranks: Ranks, cases: Mapping[str, Case], steps: int) -> dict[str, Measured]:
    """Run so many steps of each plan, in turn: whatever else the machine does meets all of them."""
    for name, case in cases.items():
        ranks.call(get_ready, name, case.job)
        ranks.call(run_step, name)  # makes connections
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    sent: dict[str, tuple[int, int]] = {}
    for _ in range(steps):
        for name, taken in seconds.items():
            times, traffic = ranks.measured(run_step, name)
            taken.append(max(times))
            sent[name] = traffic.bytes_by_node
    return {name: Measured(bytes_by_node=sent[name], seconds=tuple(seconds[name])) for name in cases}
