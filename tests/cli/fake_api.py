"""A stand-in for ``tap_planner.api``: it answers with prepared plans and remembers what it was asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tap_planner.calibrating import CalibrateRequest, Progress
from tap_planner.cluster import CalibratedDevice, CalibratedLevel, Calibration, FitRow, Pace
from tap_planner.plan import ApplyRequest, Claim, PlanDiff, PlanDocument, PlanRequest, diff_plans
from tap_planner.verification import CertificateReport

CALIBRATION = Calibration(
    device=CalibratedDevice(
        name="cpu-core",
        launch_ns=11_000,
        peak_flops={"float32": 50_000_000_000},
        matrix_efficiency_permille=500,
        memory_bandwidth_bytes_per_s=10_000_000_000,
        memory_efficiency_permille=900,
    ),
    library="gloo",
    levels=(CalibratedLevel(name="node", bandwidth_bytes_per_s=10**9, paces=(("ring", Pace(latency_ns=5)),)),),
    fit=(FitRow(kind="matrix forward", rows=7, median_permille=31, worst_permille=120),),
)


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
    calibration: Calibration | None = CALIBRATION
    requests: list[PlanRequest | ApplyRequest | CalibrateRequest] = field(default_factory=list)
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

    CalibrateRequest = CalibrateRequest

    def calibrate_cluster(
        self, request: CalibrateRequest, on_progress: Callable[[Progress], None]
    ) -> Calibration | None:
        """The prepared figures."""
        self.requests.append(request)
        self._answer()
        on_progress(Progress("device", 1, 2))
        return self.calibration
