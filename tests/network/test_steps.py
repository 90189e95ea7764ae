"""Whole training steps on two nodes: the plan that is chosen by volume, and the one that knows the topology."""

from __future__ import annotations

import pytest

from tests.network.plans import Case, Measured, measure_steps, two_plans
from tests.network.ranks import Ranks

pytestmark = pytest.mark.full

STEPS = 8
"""The best of so many counts: others use the machine too."""


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """The plans by volume and by topology."""
    return two_plans(tmp_path_factory.mktemp("plans"))


@pytest.fixture(scope="module")
def measured(ranks: Ranks, cases: dict[str, Case]) -> dict[str, Measured]:
    """Steps of both plans."""
    return measure_steps(ranks, cases, STEPS)


def test_the_plans_differ(cases: dict[str, Case]) -> None:
    """Who counts bytes alone sends no more of them, but over the network what the other keeps inside the nodes, and is
    predicted slower."""
    volume, topology = cases["volume"], cases["topology"]
    assert volume.document.sent_bytes <= topology.document.sent_bytes
    assert sum(volume.leaving_bytes) > 1.5 * sum(topology.leaving_bytes) > 0
    assert volume.step_ns > 1.5 * topology.step_ns


@pytest.mark.parametrize("name", ["volume", "topology"])
def test_bytes_of_steps(cases: dict[str, Case], measured: dict[str, Measured], name: str) -> None:
    """In a whole step each node sends within 2 % of what is predicted from the plan's list of collectives."""
    assert measured[name].bytes_by_node == pytest.approx(cases[name].leaving_bytes, rel=0.02)


def test_the_ratio_of_steps(cases: dict[str, Case], measured: dict[str, Measured]) -> None:
    """The plan that knows the topology is faster by at least the predicted ratio less 15 %."""
    predicted = cases["volume"].step_ns / cases["topology"].step_ns
    ratio = measured["volume"].best_s / measured["topology"].best_s
    assert ratio >= 0.85 * predicted, f"{ratio:.2f} times, predicted {predicted:.2f}: {measured}"
