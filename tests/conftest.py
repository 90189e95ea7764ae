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


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:  # pyright: ignore[reportUnusedFunction]
    """What commands that run in this process do to logging does not reach the next test."""
    logger = logging.getLogger("tap_planner")
    handlers, propagate, level = logger.handlers, logger.propagate, logger.level
    yield
    logger.handlers, logger.propagate = handlers, propagate
    logger.setLevel(level)
