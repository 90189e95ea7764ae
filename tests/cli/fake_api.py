"""A stand-in for ``tap_planner.api``: it answers with prepared plans and remembers what it was asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from tap_planner.plan import ApplyRequest, Claim, PlanDiff, PlanDocument, PlanRequest, diff_plans
from tap_planner.verification import CertificateReport


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
    verified: list[tuple[PlanDocument, Path, bool]] = field(default_factory=list)
    requests: list[PlanRequest | ApplyRequest] = field(default_factory=list)
    old: list[PlanDocument | None] = field(default_factory=list)
    """The old plans that plans were to stay near to."""

    def _answer(self) -> None:
        if self.error is not None:
            raise self.error

    def make_plan(self, request: PlanRequest, old: PlanDocument | None = None) -> PlanDocument:
        """The prepared plan."""
        self.requests.append(request)
        self.old.append(old)
        self._answer()
        return self.document

    def check_plan(self, old: PlanDocument, model: Path, cluster: str) -> PlanDiff:
        """The difference to the prepared plan."""
        self._answer()
        return diff_plans(old, self.document)

    def verify_certificate(
        self, document: PlanDocument, model: Path, *, replay: bool = False, old: PlanDocument | None = None
    ) -> CertificateReport:
        """What was asked, as findings where it is to fail."""
        self.verified.append((document, model, replay))
        self._answer()
        return CertificateReport(
            findings=() if self.passed else ("objective_ns: 1, the lowered plan costs 2",),
            objective="time",
            claims=(Claim(unit="ns", objective=110, bound=110, lagrangian=100, proof=()),),
            num_leaves=3,
            num_meshes=2,
            replayed=replay,
            seconds=1.0,
        )

    def apply_plan(self, request: ApplyRequest) -> FakeOutcome:
        """An outcome."""
        self.requests.append(request)
        self._answer()
        return FakeOutcome(passed=self.passed)
