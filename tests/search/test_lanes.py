"""Lanes of the search: by turns in one process or each in its own, the answer is the same, and no process stays."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tap_planner import api
from tap_planner.errors import InfeasibleError
from tap_planner.plan import PlanOptions, PlanRequest, to_text
from tap_planner.processes import use_processes
from tap_planner.search import lanes, search
from tap_planner.search.lane import Lane

pytestmark = pytest.mark.usefixtures("without_buffers")

DATA = Path(__file__).parents[1] / "data"
TIGHT = 250_000


@pytest.fixture(autouse=True)
def forked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Lanes of small models get processes, too; what was started is counted, and has ended after the test."""
    started: list[str] = []
    original = lanes.ForkedWorker.__init__

    def count(worker: lanes.ForkedWorker, lane: Lane, others: list[lanes.ForkedWorker]) -> None:
        started.append("lane")
        original(worker, lane, others)

    monkeypatch.setattr(lanes, "MIN_WORK", 0)
    monkeypatch.setattr(lanes.ForkedWorker, "__init__", count)
    yield started
    assert multiprocessing.active_children() == []


def request(**given: object) -> PlanRequest:
    """GPT on two nodes of four: meshes of one and two axes."""
    options = {"batch": 8, "dims": {"seq": 16}, "loss": "mean", **given}
    return PlanRequest(
        model=DATA / "hm_gpt_tiny.onnx",
        cluster="2x4:a100-sxm4-80gb",
        options=PlanOptions(**options),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("limit", ["device", TIGHT])
def test_the_plan_does_not_depend_on_the_number_of_processes(forked: list[str], limit: int | str) -> None:
    """Byte for byte, proof and statistics included."""
    asked = request(max_memory_bytes=limit, gap_basis_points=100, microbatches=1, recompute="none")
    texts = {to_text(api.make_plan(asked))}
    assert forked == []
    for count in (1, 2):
        with use_processes(count):
            texts.add(to_text(api.make_plan(asked)))
    assert len(texts) == 1 and len(forked) >= lanes.LANES


def test_two_lanes_find_what_each_mesh_gives_alone() -> None:
    """The best of all meshes, each searched by itself to the end, is the optimum that the lanes prove together."""
    together = search(api.prepare_search(request(gap_basis_points=0)).request)
    prepared = api.prepare_search(request(gap_basis_points=0))
    alone = [
        search(api.prepare_search(request(gap_basis_points=0, mesh=str(mesh))).request)
        for mesh in prepared.request.meshes
    ]
    assert together.objective_ns == together.bound_ns == min(result.objective_ns for result in alone)
    assert {leaf.mesh for leaf in together.leaves} == {str(mesh) for mesh in prepared.request.meshes}


@pytest.mark.parametrize("limit", [TIGHT, 2 * TIGHT, 4 * TIGHT])
def test_larger_microbatch_counts_are_bounded_before_stages_that_take_long(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """Bounds may rise from one count to the next and fall at the one after: what takes long waits until its whole
    setting is bounded, or the next count is expected to be worse."""
    original, long = Lane._advance, 0

    def advance(lane: Lane, candidate: Any) -> Any:
        nonlocal long
        if lane._takes_long(candidate):
            long += 1
            tail = lane._tails[candidate.setting]
            is_end = tail.microbatches == max(lane._counts) or tail.last
            assert is_end or not tail.screened or lane._costs_nothing(candidate.setting, max(lane._counts))
        return original(lane, candidate)

    monkeypatch.setattr(Lane, "_advance", advance)
    search(api.prepare_search(request(max_memory_bytes=limit, gap_basis_points=0)).request)
    assert long or limit != TIGHT


def test_that_nothing_fits_is_the_same_answer(forked: list[str]) -> None:
    """With the least memory that any plan needs, and all parts of the space."""
    asked = request(max_memory_bytes=1)
    found: list[tuple[str, int | None]] = []
    for count in (1, 2):
        with use_processes(count), pytest.raises(InfeasibleError) as caught:
            search(api.prepare_search(asked).request)
        found.append((caught.value.message, caught.value.least_memory_bytes))
    assert found[0] == found[1] and len(forked) == lanes.LANES


def test_a_lost_process_is_made_up_for(
    forked: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when the system ends one for want of memory."""
    expected = search(api.prepare_search(request()).request)
    original, here = Lane.advance, os.getpid()

    def advance(lane: Lane) -> object:
        if os.getpid() != here:
            os._exit(9)
        return original(lane)

    monkeypatch.setattr(Lane, "advance", advance)
    with use_processes(2), caplog.at_level(logging.WARNING, logger="tap_planner"):
        found = search(api.prepare_search(request()).request)
    assert found.objective_ns == expected.objective_ns and found.leaves == expected.leaves
    assert len(forked) == lanes.LANES and "a process of the search was lost" in caplog.text


def test_a_failure_inside_a_lane_is_shown_where_it_happens(forked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised in this process, with its traceback."""

    def fail(lane: Lane) -> None:
        raise ZeroDivisionError("a fault")

    monkeypatch.setattr(Lane, "advance", fail)
    with use_processes(2), pytest.raises(ZeroDivisionError, match="a fault") as caught:
        search(api.prepare_search(request()).request)
    assert len(forked) == lanes.LANES and caught.traceback[-1].name == "fail"


def test_an_interrupt_ends_the_processes(forked: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while lanes are at work."""

    def interrupt(worker: lanes.ForkedWorker) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(lanes.ForkedWorker, "receive", interrupt)
    with use_processes(2), pytest.raises(KeyboardInterrupt):
        search(api.prepare_search(request()).request)
    assert len(forked) == lanes.LANES


def test_a_program_with_threads_is_not_forked(forked: list[str]) -> None:
    """A lock that another thread holds would stay locked in the copy."""
    done = threading.Event()
    thread = threading.Thread(target=done.wait)
    thread.start()
    try:
        with use_processes(2):
            assert search(api.prepare_search(request()).request).objective_ns > 0
    finally:
        done.set()
        thread.join()
    assert forked == []
