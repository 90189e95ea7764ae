"""How good a plan is proven to be, as plans say it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.plan.optimizer_states import StatesChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class Nearness:
    """How little a plan changes of the old one that it was to stay near to; what has no counterpart counts nothing."""

    regret_basis_points: int
    """By how much its objective exceeds that of the best plan, rounded up."""
    microbatches: int
    """1 where their number differs."""
    operators: int
    """Operators whose strategy differs."""
    parameters: int
    """Parameters whose placement, ZeRO level or ZeRO axes differ."""
    regions: int
    """Regions with another recompute setting."""
    compared: int
    """Decisions that the old plan has as well."""
    changes_of_best: int
    """Changes that the best plan would make."""

    @property
    def changes(self) -> int:
        """All changes. None at all is the fewest; more than that are not proven to be needed."""
        return self.microbatches + self.operators + self.parameters + self.regions

    @property
    def shown(self) -> str:
        """One line for people."""
        regret = f"{self.regret_basis_points / 100:.2f} % above the best plan"
        if not self.changes:
            return f"nothing of the old plan changes, {regret} (which changes {self.changes_of_best} decisions)"
        return (
            f"{self.changes} of {self.compared} decisions of the old plan change ({self.operators} operators, "
            f"{self.parameters} parameters, {self.regions} regions), {regret}, which changes {self.changes_of_best}; "
            "fewer are not proven to be impossible"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareEntry:
    """Who bears how much of one redistribution, or of one copy that is kept, of a tensor."""

    tensor: str
    key: tuple[int, ...]
    """Destination and gradient of a redistribution, or the state that is kept: numbers among the tensor's placements
    (-1: there is no gradient)."""
    parts: tuple[int, ...]
    """Of every reader, and of the producer last where a copy is kept, in 1/720,720."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofEntry:
    """How some of the space is bounded: configurations that differ in their microbatch count only."""

    mesh: str
    """Axes, and the devices where the mesh leaves some out: ``dp=4@0-3``."""
    microbatches: tuple[int, ...]
    by: str
    """``split``, ``relaxed``, ``tightened`` or ``infeasible`` (docs/certificate.md)."""
    bound_ns: int = 0
    """Nothing that fits is faster: by elimination, so that it can be computed again. In bytes in the proof of least
    memory, and where sent bytes are the objective."""
    multiplier: tuple[int, int] = (0, 1)
    """Numerator and denominator, in ns (or bytes sent) per byte."""
    graph_of: int | None = None
    """The bound comes from the graph of so many microbatches; None: from that of its own."""
    shares: tuple[ShareEntry, ...] = ()
    """Who bears how much of what readers share in the relaxed model; equal parts of what is not listed."""
    loose: tuple[int, ...] | None = ()
    """Numbers of the producers (-1: inputs of the graph) whose tensors are shared out in exact tables as well; None:
    all of them."""
    solver_ns: int | None = None
    """What the solver has proven, where that is more; else None."""
    part: int = 0
    """Of the space of a target."""
    setting: int = 0
    """Number of what regions may choose from."""
    room: int | None = None
    """Highest ZeRO level for which there is room; None: any, without room."""
    and_more: bool = False
    """Whether larger microbatch counts are covered."""
    and_multiples: bool = False
    """Whether multiples of the microbatch counts are covered."""


PROOF_KINDS = ("split", "relaxed", "tightened", "infeasible")


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """That no plan of the space is better by more than a gap."""

    unit: str
    """``ns`` of a step, or ``bytes`` that a device sends or needs."""
    objective: int
    """Of the plan."""
    bound: int
    """No plan is below."""
    lagrangian: int | None
    """What elimination alone proves; None in plans without a proof, and of least memory, which has no other."""
    proof: tuple[ProofEntry, ...]

    @property
    def gap_basis_points(self) -> int:
        """The objective above the bound, rounded up."""
        return gap_basis_points(self.objective, self.bound)

    @property
    def lagrangian_gap_basis_points(self) -> int | None:
        """The objective above what elimination proves, rounded up; None where that is not known."""
        return None if self.lagrangian is None else gap_basis_points(self.objective, self.lagrangian)


def gap_basis_points(objective: int, bound: int) -> int:
    """By how much an objective lies above a bound, in hundredths of a percent of the bound, rounded up."""
    return -(-(objective - bound) * 10_000 // max(bound, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """How good the plan is proven to be."""

    objective_ns: int
    """Objective A of the plan, whatever its objective is."""
    bound_ns: int = 0
    """Nothing that fits (under objective ``memory``: in the least memory) is faster; 0 under ``communication``, where
    nothing is proven of times."""
    gap_basis_points: int
    """Of what the objective names, rounded up."""
    status: str
    """``optimal`` or ``feasible``: ``optimal`` if there is no gap at all."""
    objective_bytes: int | None = None
    """What a device sends in a step, or its memory, where that is the objective."""
    bound_bytes: int | None = None
    """No plan that fits sends (needs) less."""
    lagrangian_bound_bytes: int | None = None
    """Under ``communication``, as ``lagrangian_bound_ns`` for times."""
    time_gap_basis_points: int | None = None
    """Under ``memory``, of the time among the plans that need no more."""
    memory_proof: tuple[ProofEntry, ...] = ()
    """Under ``memory``, how much memory every part of the space needs."""
    space: Mapping[str, int]
    """Sizes of what was enumerated (``meshes``, ``strategies``, ...)."""
    not_in_objective: tuple[str, ...]
    near: Nearness | None = None
    """Of a plan that was to stay near to an old one."""
    states: StatesChoice | None = None
    """What ``--optimizer-states auto`` has compared."""
    lagrangian_bound_ns: int | None = None
    """The bound that elimination gives from the stored multipliers; None in plans without ``proof``."""
    proof: tuple[ProofEntry, ...] = ()
    """How every part of the space is bounded."""
    simple_bound_ns: int | None = None
    """Of a device placement: what is known without a solver, by the longest way through the operators and by their work
    shared out; None elsewhere."""

    def claims(self, objective: str) -> tuple[Claim, ...]:
        """What is proven of a plan with an objective, what that names first."""
        time = Claim(
            unit="ns",
            objective=self.objective_ns,
            bound=self.bound_ns,
            lagrangian=self.lagrangian_bound_ns,
            proof=self.proof,
        )
        if objective == "time":
            return (time,)
        memory = objective == "memory"
        size = Claim(
            unit="bytes",
            objective=self.objective_bytes or 0,
            bound=self.bound_bytes or 0,
            lagrangian=None if memory else self.lagrangian_bound_bytes,
            proof=self.memory_proof if memory else self.proof,
        )
        return (size, time) if memory else (size,)
