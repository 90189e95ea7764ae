"""How every part of the space is bounded: what a certificate is made of."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from fractions import Fraction

from tap_planner.cluster import Mesh
from tap_planner.search.shares import NO_SHARES, Shares


class ProofKind(enum.Enum):
    """By what a part of the space is bounded."""

    SPLIT = "split"
    """Every operator split perfectly over the devices, nothing sent (``capacity.least_ns``)."""
    RELAXED = "relaxed"
    """Elimination of the relaxed model under a multiplier (0: without the limit)."""
    TIGHTENED = "tightened"
    """The optimum under a multiplier: shares moved on, and windows searched exactly."""
    INFEASIBLE = "infeasible"
    """Even the least memory is above the limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A bound that elimination gives, and all that is needed to take it again."""

    kind: ProofKind
    bound_ns: int
    """Nothing that fits is faster."""
    multiplier: Fraction = Fraction(0)
    """In ns per byte."""
    graph_of: int | None = None
    """With the graph of so many microbatches, of which multiples are never faster; None: with the graph of its own."""
    shares: Shares = NO_SHARES
    """Who bears how much of what readers share."""
    loose: frozenset[int] | None = frozenset()
    """Classes of producers whose tensors stay shared out where windows are searched exactly; None: all of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A part of the space with its bounds: one mesh, one microbatch count (or all further ones), some settings."""

    mesh: str
    """``mesh_label``."""
    setting: int
    """What regions may choose from: its number among those of the mesh."""
    room: int | None
    """Highest ZeRO level in runs; None: any, without room for whole copies."""
    microbatches: int
    and_more: bool
    """Whether all larger microbatch counts are covered as well."""
    and_multiples: bool
    """Whether the multiples of the microbatch count are covered as well."""
    proof: Proof
    solver_ns: int
    """What the solver proved, where that is more than elimination gives; else as ``proof.bound_ns``."""
    part: int = 0
    """Number of the part of the space: targets have several, in which the same mesh may be used in unlike ways, and
    pipelines one for each schedule and microbatch count."""

    @property
    def is_open(self) -> bool:
        """Whether it is not proven that nothing of it fits."""
        return self.proof.kind is not ProofKind.INFEASIBLE


UNPROVEN = Proof(kind=ProofKind.SPLIT, bound_ns=0)
"""What is known before anything is."""


def mesh_label(mesh: Mesh) -> str:
    """A mesh, with its devices where it leaves some out: ``dp=4@0-3``."""
    if not mesh.devices:
        return str(mesh)
    spans: list[list[int]] = []
    for device in mesh.devices:
        if spans and device == spans[-1][1] + 1:
            spans[-1][1] = device
        else:
            spans.append([device, device])
    return f"{mesh}@" + ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
