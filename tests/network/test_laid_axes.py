"""Bytes that leave a node where the second axis lies outermost, counted on a link: gloo's rings go by rank."""

from __future__ import annotations

import pytest

from tap_planner.cost import leaving_bytes
from tests.network.places import KINDS, costs_on
from tests.network.probes import broadcast, run_collective
from tests.network.ranks import Ranks
from tests.network.test_collectives import PAYLOAD_BYTES, STRAY_BYTES, TOLERANCE

MESH = (2, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1)])
def test_bytes_of_collectives(laid_ranks: Ranks, axes: tuple[int, ...], kind: str) -> None:
    """The first axis stays in the node, the second leaves it, and a ring of all crosses at every step."""
    laid_ranks.call(run_collective, MESH, kind, axes, PAYLOAD_BYTES)  # connections are made at the first time
    _, traffic = laid_ranks.measured(run_collective, MESH, kind, axes, PAYLOAD_BYTES)
    expected = leaving_bytes(costs_on(MESH, "a1,a0"), kind, axes, PAYLOAD_BYTES)
    assert traffic.bytes_by_node == pytest.approx(expected, rel=TOLERANCE, abs=STRAY_BYTES)


def test_bytes_of_a_broadcast(laid_ranks: Ranks) -> None:
    """The first round crosses the network, both messages of the second stay where they are."""
    laid_ranks.call(broadcast, PAYLOAD_BYTES)
    _, traffic = laid_ranks.measured(broadcast, PAYLOAD_BYTES)
    expected = leaving_bytes(costs_on(MESH, "a1,a0"), "broadcast", (0, 1), PAYLOAD_BYTES)
    assert expected == (PAYLOAD_BYTES, 0)
    assert traffic.bytes_by_node == pytest.approx(expected, rel=TOLERANCE, abs=STRAY_BYTES)


def test_a_ring_of_all_takes_twice_as_long() -> None:
    """It leaves each node twice instead of once, and is priced so; groups of one axis are what they are listed as."""
    laid, listed = costs_on(MESH, "a1,a0"), costs_on(MESH)
    rates = [model.algorithms("all_reduce", (0, 1))[0].ns_per_byte for model in (laid, listed)]
    assert rates[0] == pytest.approx(2 * rates[1])
    assert laid.cost("all_reduce", (0,), PAYLOAD_BYTES) == listed.cost("all_reduce", (1,), PAYLOAD_BYTES)
