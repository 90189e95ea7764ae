"""How many decisions of one plan are not those of another."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.cluster import Mesh
from tap_planner.plan import Decisions
from tap_planner.sharding import Placements

Stored = tuple[Placements, int, tuple[int, ...]]
"""Placement of a parameter, its ZeRO level, and the axes that ZeRO shards it over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Changes:
    """Decisions of the new plan that differ from their counterparts in the old one; what has none counts nothing."""

    microbatches: int
    """1 where their number differs."""
    operators: int
    """Operators whose strategy differs."""
    parameters: int
    """Parameters whose placement, ZeRO level or ZeRO axes differ."""
    regions: int
    """Regions with another recompute setting."""

    @property
    def total(self) -> int:
        """All of them."""
        return self.microbatches + self.operators + self.parameters + self.regions


class OldPlan:
    """The decisions of an old plan by name.

    Args:
        decisions: all of them.
    """

    def __init__(self, decisions: Decisions) -> None:
        self.decisions = decisions
        self.strategies: Mapping[str, tuple[str, ...]] = {o.id: o.strategy for o in decisions.operators}
        self.parameters: Mapping[str, Stored] = {
            p.name: (p.placement, p.zero_level, p.zero_axes) for p in decisions.parameters
        }
        self.recompute: Mapping[str, str] = {
            name: region.recompute for region in decisions.regions for name in region.operators
        }

    def has_mesh(self, mesh: Mesh | Decisions) -> bool:
        """Whether a mesh is the old one: axes of equal names and sizes, which lie alike."""
        old = self.decisions
        same = [(axis.name, axis.size) for axis in mesh.axes] == [(axis.name, axis.size) for axis in old.axes]
        return same and mesh.order == old.order

    def counterparts(self, new: Decisions) -> int:
        """Decisions of a new plan that the old one has as well."""
        operators = sum(operator.id in self.strategies for operator in new.operators)
        parameters = sum(parameter.name in self.parameters for parameter in new.parameters)
        regions = sum(any(name in self.recompute for name in region.operators) for region in new.regions)
        return 1 + operators + parameters + regions

    def changes(self, new: Decisions) -> Changes:
        """What differs in a new plan; on another mesh everything does."""
        other = not self.has_mesh(new)
        return Changes(
            microbatches=int(new.microbatches != self.decisions.microbatches),
            operators=sum(
                operator.id in self.strategies and (other or operator.strategy != self.strategies[operator.id])
                for operator in new.operators
            ),
            parameters=sum(
                p.name in self.parameters
                and (other or (p.placement, p.zero_level, p.zero_axes) != self.parameters[p.name])
                for p in new.parameters
            ),
            regions=sum(
                bool(known) and (other or known != {region.recompute})
                for region in new.regions
                for known in [{self.recompute[name] for name in region.operators if name in self.recompute}]
            ),
        )
