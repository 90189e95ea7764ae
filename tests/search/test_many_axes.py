"""Meshes of three axes: after those of fewer, with limited effort, and all of them bounded."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.cluster import Cluster
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.requests import limit_bytes
from tap_planner.search import SearchResult, lane, least_ns, search, verify_leaves

DATA = Path(__file__).parents[1] / "data"


def prepared(**given: object) -> api.PreparedSearch:
    """GPT on two nodes of four."""
    options = PlanOptions(batch=8, dims={"seq": 16}, loss="mean", **given)  # type: ignore[arg-type]
    request = PlanRequest(model=DATA / "hm_gpt_tiny.onnx", cluster="2x4:a100-sxm4-80gb", options=options)
    return api.prepare_search(request)


def searched(max_axes: int) -> SearchResult:
    """The result, its leaves verified."""
    given = prepared(max_axes=max_axes, gap_basis_points=0)
    result = search(given.request)

    def limit(cluster: Cluster) -> int | None:
        return limit_bytes(cluster, given.options)

    assert verify_leaves(given.requests, limit, result.leaves, replay=False) == ()
    assert {leaf.mesh.count("=") for leaf in result.leaves} == set(range(1, max_axes + 1))
    return result


@pytest.mark.parametrize("most", [0, 1])
def test_what_effort_leaves_out_keeps_the_bound_of_its_work(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little effort there is: of a mesh, and of a microbatch count, that is never looked at it is known that
    all of its operators take their time."""
    monkeypatch.setattr(lane, "MAX_EFFORT", most)
    given = prepared(max_axes=3, gap_basis_points=0)
    result = search(given.request)
    assert 0 < least_ns(given.graph, given.cluster, "bf16") <= result.bound_ns <= result.objective_ns
    assert verify_leaves(given.requests, lambda _: None, result.leaves, replay=False) == ()


@pytest.mark.full
def test_three_axes_are_searched_within_the_effort(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without any effort the best plan of two axes is found, and the bound holds for what more effort finds."""
    two, three = searched(2), searched(3)
    assert two.objective_ns == two.bound_ns and three.bound_ns <= three.objective_ns <= two.objective_ns
    monkeypatch.setattr(lane, "MAX_EFFORT", 0)
    idle = searched(3)
    assert idle.objective_ns == two.objective_ns and idle.bound_ns <= three.objective_ns
    assert idle.statistics.solved < three.statistics.solved


def test_a_mesh_of_three_axes_that_was_asked_for_is_searched_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The effort is limited only where there are meshes of fewer axes."""
    monkeypatch.setattr(lane, "MAX_EFFORT", 0)
    result = search(prepared(mesh="a=2,b=2,c=2", gap_basis_points=100).request)
    assert result.objective_ns <= result.bound_ns * 1.01
