"""What lanes tell each other while they search, and the search when they have ended."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from tap_planner.search.choices import ChosenValues
from tap_planner.search.configuration import Configuration
from tap_planner.search.proof import Leaf


@dataclass(frozen=True, slots=True)
class Known:
    """What lanes tell each other."""

    best_ns: int | None = None
    """Of the fastest plan; None: none is known."""
    multiplier: Fraction = Fraction(0)
    """One that served a configuration; 0: none has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a lane is about to do."""

    cost: int
    """Roughly."""
    bound_ns: int | None
    """Of the configuration that it is about; None: no plan comes of it."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """Names the best plan of a configuration."""

    mesh: int
    setting: int
    microbatches: int
    room: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundPlan:
    """The best plan of a configuration that a lane has met."""

    key: PlanKey
    ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenPlan:
    """A plan that a lane has met: what a model of its mesh and microbatch count needs to write it out."""

    objective_ns: int
    memory_bytes: int
    multiplier: Fraction
    strategies: int
    """Strategies of all operators on its mesh."""
    configuration: Configuration
    values: ChosenValues


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a lane has to say in the end."""

    leaves: tuple[Leaf, ...]
    ended_ns: int | None
    """No plan in what it left alone, or searched to the end, is faster; None: nothing fits in all of it."""
    found: tuple[FoundPlan, ...]
    """In the order of their configurations' first plans."""
    configurations: int
    solved: int
