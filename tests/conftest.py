"""What all tests share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The folder of small inputs."""
    return Path(__file__).parent / "data"


@pytest.fixture
def without_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Communicators take nothing: limits of tiny models are about what plans decide, not a thousand times as much."""
    from tap_planner.cluster import USUAL_COLLECTIVE_BUFFERS_BYTES

    for library in USUAL_COLLECTIVE_BUFFERS_BYTES:
        monkeypatch.setitem(USUAL_COLLECTIVE_BUFFERS_BYTES, library, 0)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """What commands that run in this process do to logging does not reach the next test."""
    logger = logging.getLogger("tap_planner")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
