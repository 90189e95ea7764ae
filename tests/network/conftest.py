"""The link and its ranks, started once per module; skipped where there can be no such link."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.network.namespaces import joined_namespaces, unavailable
from tests.network.places import LAID, LINK_BITS_PER_S
from tests.network.ranks import Ranks, ranks_on


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    """Four ranks, two on each of two nodes joined by 100 Mbit/s."""
    yield from _started(None)


@pytest.fixture(scope="module")
def laid_ranks() -> Iterator[Ranks]:
    """The same, with the second axis of a 2x2 mesh outermost."""
    yield from _started(LAID)


def _started(numbers: tuple[int, ...] | None) -> Iterator[Ranks]:
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)
    with joined_namespaces(LINK_BITS_PER_S) as nodes, ranks_on(nodes, 2, numbers) as started:
        yield started
