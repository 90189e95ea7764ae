"""Bytes that a rank sends in a collective: the closed forms, and algorithms that send no more."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import load_cluster, parse_mesh
from tap_planner.cost import COLLECTIVE_KINDS, PriceList, VolumeModel, prices_of
from tap_planner.operators import ComputeKind
from tap_planner.sharding import SENDING_KINDS, sent_bytes


@pytest.mark.parametrize(
    ("kind", "ranks", "payload", "sent"),
    [
        ("all_reduce", 2, 8, 8),
        ("all_reduce", 4, 8, 12),
        ("all_reduce", 3, 8, 11),  # 32/3
        ("all_gather", 4, 8, 6),
        ("reduce_scatter", 4, 8, 6),
        ("all_to_all", 8, 8, 7),
        ("all_to_all", 3, 1, 1),
        ("halo_exchange", 4, 8, 8),
        ("ring_exchange", 4, 8, 8),
        ("send_recv", 2, 8, 8),
        ("broadcast", 2, 8, 8),
        ("all_reduce", 1, 8, 0),
        ("ring_exchange", 1, 8, 0),
        ("all_gather", 8, 0, 0),
    ],
)
def test_closed_forms(kind: str, ranks: int, payload: int, sent: int) -> None:
    """2 N (g - 1) / g for all_reduce, half of it for its parts and all_to_all, the payload between two; rounded up."""
    assert sent_bytes(kind, ranks, payload) == sent


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_a_ring_sends_as_much(ranks: int) -> None:
    """A ring reduce-scatter followed by a ring all-gather, step by step: each rank sends what is said of all_reduce."""
    chunk = 5
    values = [np.arange(ranks * chunk) * (rank + 1) for rank in range(ranks)]
    sent = [0] * ranks
    for gathering in (False, True):
        for step in range(ranks - 1):
            offset = ranks + 1 if gathering else ranks
            parts = {}
            for rank in range(ranks):
                piece = (rank - step + offset) % ranks
                parts[rank] = (piece, values[rank][piece * chunk : (piece + 1) * chunk].copy())
                sent[rank] += chunk
            for rank, (piece, part) in parts.items():
                there = values[(rank + 1) % ranks][piece * chunk : (piece + 1) * chunk]
                there[:] = part if gathering else there + part
    assert all((found == sum(range(1, ranks + 1)) * np.arange(ranks * chunk)).all() for found in values)
    assert set(sent) == {sent_bytes("all_reduce", ranks, ranks * chunk)}


@given(st.sampled_from(SENDING_KINDS), st.integers(1, 64), st.integers(0, 1 << 40), st.integers(1, 16))
def test_larger_payloads_and_more_calls_never_send_less(kind: str, ranks: int, payload: int, calls: int) -> None:
    """More bytes send no less, and what is cut into several calls no less than in one: microbatches are monotone."""
    whole = sent_bytes(kind, ranks, payload)
    assert sent_bytes(kind, ranks, payload + 1) >= whole
    assert calls * sent_bytes(kind, ranks, -(-payload // calls)) >= whole
    assert whole - Fraction(2 * payload) < 1


def test_the_price_list() -> None:
    """Groups over several axes are as large as their product; operators and the optimizer are free, sizes as ever."""
    cluster = load_cluster("2x8:a100-sxm4-80gb")
    mesh = parse_mesh("dp=2,tp=8", cluster)
    prices = prices_of(PriceList.VOLUME, cluster, mesh, "bf16")
    assert prices.collectives.cost("all_gather", (0, 1), 160).ns == 150
    assert prices.collectives.rate_ns("all_reduce", (1,), 80) == 140
    assert prices.compute.time_ns(10**9, 10**9, ComputeKind.CONTRACTION) == 0
    assert not prices.compute.times_ns(np.ones(3), np.ones((2, 3)), ComputeKind.CONTRACTION).any()
    assert prices.compute.tensor_bytes("float32", 10) == 20
    assert prices.optimizer_ns(100, shards=2, zero_level=1, precision="bf16", optimizer="adamw", device=None) == 0
    assert set(SENDING_KINDS) == set(COLLECTIVE_KINDS)


def test_unknown_collectives() -> None:
    """A name that is none is refused, as by the time of a collective."""
    with pytest.raises(ValueError, match="expected one of all_reduce, all_gather"):
        VolumeModel((2, 2)).cost("gather_all", (0,), 1)
