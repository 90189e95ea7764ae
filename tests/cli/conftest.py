"""Plans as files, and a planner that answers at once."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

import tap_planner
from tap_planner.plan import PlanDocument, write_plan
from tests.cli.fake_api import FakeApi
from tests.plan.plan_builders import make_decisions, make_document, make_stack


@pytest.fixture(scope="session")
def old_document() -> PlanDocument:
    """Twelve layers, tensor parallel."""
    stack = make_stack(12)
    return make_document(make_decisions(stack), stack.reads)


@pytest.fixture(scope="session")
def new_document() -> PlanDocument:
    """The same with nine layers replicated, and 13.4 % slower."""
    stack = make_stack(12, columns=(True, True, *(False,) * 9, True))
    return make_document(make_decisions(stack), stack.reads, step_ns=1_400_000)


@pytest.fixture
def old(tmp_path: Path, old_document: PlanDocument) -> str:
    """Path of the old plan."""
    write_plan(tmp_path / "old.json", old_document)
    return str(tmp_path / "old.json")


@pytest.fixture
def new(tmp_path: Path, new_document: PlanDocument) -> str:
    """Path of the new plan."""
    write_plan(tmp_path / "new.json", new_document)
    return str(tmp_path / "new.json")


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch, old_document: PlanDocument) -> Iterator[FakeApi]:
    """A planner that answers with the old plan."""
    fake = FakeApi(old_document)
    monkeypatch.setattr(tap_planner, "api", fake, raising=False)
    monkeypatch.setenv("COLUMNS", "110")
    yield fake
    logging.getLogger("tap_planner").handlers = []
