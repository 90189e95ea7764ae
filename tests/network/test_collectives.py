"""Bytes that leave a node in each collective, counted on a link: within 2 % of the prediction."""

from __future__ import annotations

import pytest

from tap_planner.cost import leaving_bytes
from tests.network.places import KINDS, PLACES, costs_on
from tests.network.probes import ELEMENT_BYTES, broadcast, exchange_halos, run_collective
from tests.network.ranks import Ranks

PAYLOAD_BYTES = 512 * 1024
TOLERANCE = 0.02
STRAY_BYTES = 1024
"""May pass besides, where nothing else does: address resolution."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_bytes_of_collectives(ranks: Ranks, place: str, kind: str) -> None:
    """Of every collective, in groups inside a node, across and of both, each node sends what is predicted."""
    mesh_shape, axes = PLACES[place]
    ranks.call(run_collective, mesh_shape, kind, axes, PAYLOAD_BYTES)  # connections are made at the first time
    _, traffic = ranks.measured(run_collective, mesh_shape, kind, axes, PAYLOAD_BYTES)
    expected = leaving_bytes(costs_on(mesh_shape), kind, axes, PAYLOAD_BYTES)
    assert traffic.bytes_by_node == pytest.approx(expected, rel=TOLERANCE, abs=STRAY_BYTES)


def test_bytes_of_a_broadcast(ranks: Ranks) -> None:
    """gloo's broadcast is a binomial tree, not a ring: the node of the root sends everything twice, the other none."""
    ranks.call(broadcast, PAYLOAD_BYTES)
    _, traffic = ranks.measured(broadcast, PAYLOAD_BYTES)
    expected = leaving_bytes(costs_on((4,)), "broadcast", (0,), PAYLOAD_BYTES)
    assert traffic.bytes_by_node == pytest.approx(expected, rel=TOLERANCE, abs=STRAY_BYTES)


@pytest.mark.parametrize(("mesh_shape", "groups"), [((4,), 1), ((2, 2), 2)])
def test_halos_of_unlike_sides(ranks: Ranks, mesh_shape: tuple[int, ...], groups: int) -> None:
    """Three times as many rows to the next as to the previous rank: both directions of a longer group are right
    together; of a pair each direction is said to send as much as the larger one."""
    to_previous, to_next = 32 * 1024, 96 * 1024
    payload = ELEMENT_BYTES * (to_previous + to_next if groups == 1 else to_next)
    ranks.call(exchange_halos, mesh_shape, (0,), to_previous, to_next)
    _, traffic = ranks.measured(exchange_halos, mesh_shape, (0,), to_previous, to_next)
    predicted = leaving_bytes(costs_on(mesh_shape), "halo_exchange", (0,), payload)
    sent = (groups * ELEMENT_BYTES * to_next, groups * ELEMENT_BYTES * to_previous)
    assert traffic.bytes_by_node == pytest.approx(sent, rel=TOLERANCE)
    if groups == 1:
        assert sum(predicted) == sum(sent)
    else:
        assert predicted == (max(sent), max(sent))


def test_reduce_scatter_takes_the_rounds_of_one_all_reduce(ranks: Ranks) -> None:
    """Of a payload of one element a rank nearly all that is sent is headers, one per message: no more messages than an
    all_reduce, which is what its latency is priced at (gloo's own would run one all_reduce for each rank)."""
    sent: list[int] = []
    for kind in ("all_reduce", "reduce_scatter"):
        ranks.call(run_collective, (4,), kind, (0,), 4 * ELEMENT_BYTES)
        _, traffic = ranks.measured(run_collective, (4,), kind, (0,), 4 * ELEMENT_BYTES)
        sent.append(traffic.both)
    assert 0 < sent[1] <= 1.2 * sent[0]
