"""A stand-in for ``tap_planner.api``: it answers with prepared plans and remembers what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tap_planner.plan import ApplyRequest, PlanDiff, PlanDocument, PlanRequest, diff_plans


@dataclass
class FakeOutcome:
    """Result of applying."""

    passed: bool = True

    def lines(self) -> tuple[str, ...]:
        """One line."""
        return ("output: 1 of 1 equal",)


@dataclass
class FakeApi:
    """Answers with ``document``, or raises ``error``."""

    document: PlanDocument
    error: BaseException | None = None
    passed: bool = True
    requests: list[PlanRequest | ApplyRequest] = field(default_factory=list)

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    def make_plan(self, request: PlanRequest) -> PlanDocument:
        """The prepared plan."""
        self.requests.append(request)
        self._answer()
        return self.document

    def check_plan(self, old: PlanDocument, model: Path, cluster: str) -> PlanDiff:
        """The difference to the prepared plan."""
        self._answer()
        return diff_plans(old, self.document)

    def apply_plan(self, request: ApplyRequest) -> FakeOutcome:
        """An outcome."""
        self.requests.append(request)
        self._answer()
        return FakeOutcome(passed=self.passed)
