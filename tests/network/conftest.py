"""The link and its ranks, started once per module; skipped where there can be no such link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.network.namespaces import joined_namespaces, unavailable
from tests.network.places import LINK_BITS_PER_S
from tests.network.ranks import Ranks, ranks_on


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four ranks, two on each of two nodes joined by 100 Mbit/s."""
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with joined_namespaces(LINK_BITS_PER_S) as nodes, ranks_on(nodes, 2) as started:
        yield started
