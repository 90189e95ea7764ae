"""Space split over devices: random networks run as one process does, and issue the exchanges that the plan lists."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import onnx
import pytest

from tap_planner.apply import (
    ApplyJob,
    LockstepCommunicator,
    apply_job,
)
from tap_planner.apply.communicator import FromNeighbours
from tap_planner.graph import BindOptions, Graph, LossOptions, bind, load_model
from tap_planner.plan import Decisions
from tap_planner.program import Collective, Phase
from tests.apply.lockstep_runs import calls_by_phase, listed, verified
from tests.apply.spatial_models import SpatialPlan, spatial_graph, spatial_model

_MESHES = ((1, 2), (2, 2), (1, 4))
_SIZES = ((16, 8), (8, 12), (24,), (8, 4, 6))


def exchanges_of(graph: Graph, decisions: Decisions) -> tuple[Collective, ...]:
    """The exchanges that a plan lists."""
    return listed(graph, decisions, "halo_exchange")


def check(seed: int, size: tuple[int, ...], mesh_shape: tuple[int, ...], recompute: str = "none") -> Counter[Phase]:
    """One random network under one random plan; returns the number of exchanges by phase."""
    graph = spatial_graph(seed, size)
    decisions = SpatialPlan(graph, mesh_shape, seed, recompute=recompute).build()
    report = verified(graph, decisions)
    assert report.passed, "\n".join(report.lines())
    return calls_by_phase(exchanges_of(graph, decisions))


@pytest.mark.parametrize("mesh_shape", _MESHES, ids=str)
def test_random_networks(mesh_shape: tuple[int, ...]) -> None:
    """Outputs, gradients and collectives are those of one process and of the plan, in one to three dims of space."""
    found: Counter[Phase] = Counter()
    for seed in range(24):
        found += check(seed, _SIZES[seed % len(_SIZES)], mesh_shape)
    assert found[Phase.FORWARD] > found[Phase.BACKWARD] > 0


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_recomputed_exchanges(recompute: str) -> None:
    """A region that is recomputed exchanges again where its windowed operators run again, and lists it."""
    found: Counter[Phase] = Counter()
    for seed in range(16):
        found += check(seed, (16, 8), (2, 2), recompute)
    assert found[Phase.RECOMPUTE] > 0


def test_a_lost_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that arrive as zeros make outputs and gradients differ: the exchange is no decoration."""
    graph = spatial_graph(3, (24,))
    decisions = SpatialPlan(graph, (1, 4), 3).build()
    assert exchanges_of(graph, decisions) and verified(graph, decisions).passed
    real = LockstepCommunicator.halo_exchange

    def losing(self: LockstepCommunicator, *given: Any) -> FromNeighbours:
        before, after = real(self, *given)
        return before, [None if part is None else part * 0 for part in after]

    monkeypatch.setattr(LockstepCommunicator, "halo_exchange", losing)
    findings = verified(graph, decisions).findings
    assert any(finding.startswith("output ") for finding in findings)
    assert any(finding.startswith("gradient ") for finding in findings)


@pytest.mark.full
def test_processes_exchange_as_lockstep_does(tmp_path: Path) -> None:
    """Four gloo processes on 2x2 and 1x4 verify, with as many collectives as lockstep."""
    for seed, mesh_shape in ((1, (2, 2)), (5, (1, 4))):
        path = tmp_path / f"space{seed}.onnx"
        onnx.save(spatial_model(seed, (16, 8)).proto, path)
        options = BindOptions(batch=2, training=True, loss=LossOptions(kind="mean"))
        graph = bind(load_model(path), options)
        decisions = SpatialPlan(graph, mesh_shape, seed).build()
        assert exchanges_of(graph, decisions)
        job = ApplyJob(
            model=path,
            options=options,
            decisions=decisions,
            graph_digest=graph.digest,
            random_weights=True,
            verify=True,
        )
        result, lockstep = apply_job(job, num_processes=4), apply_job(job)
        assert result is not None and result.report is not None and lockstep is not None
        assert result.report.passed, "\n".join(result.report.lines())
        assert result.num_collectives == lockstep.num_collectives > 0


@pytest.mark.full
@pytest.mark.parametrize("mesh_shape", [*_MESHES, (2, 4), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("size", _SIZES, ids=str)
def test_many_random_networks(size: tuple[int, ...], mesh_shape: tuple[int, ...]) -> None:
    """The same for forty networks per size and mesh, with and without recomputation."""
    for seed in range(40):
        check(seed, size, mesh_shape, ("none", "full", "selective")[seed % 3])
