"""What is minimised, what a minimisation finds, and the cost tables that are weighted for it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from tap_planner.search.choices import Assignment, Choices
from tap_planner.search.factors import INFINITE, Factor
from tap_planner.search.terms import SCALE


@dataclass(frozen=True, slots=True)
class Weights:
    """What is minimised: ``time`` x ns + ``memory`` x bytes."""

    time: int
    memory: int
    divisor: int = 1
    """Activations count 1/divisor of their bytes: a lower bound for so many times as many microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one minimisation found."""

    bound: int
    """Proven lower bound of SCALE x weighted cost."""
    choices: Choices | None
    """None where the constraints of the exact stage leave nothing."""
    ns: int
    num_bytes: int
    activation_bytes: int = 0
    """The activations' part of ``num_bytes``."""

    @property
    def assignment(self) -> Assignment | None:
        """The choices written out."""
        return None if self.choices is None else self.choices.expand()

    def divided_bytes(self, divisor: int) -> int:
        """Bytes with only 1/divisor of the activations."""
        return self.num_bytes - self.activation_bytes + self.activation_bytes // divisor

    def weighted(self, weights: Weights) -> int:
        """SCALE x weighted cost of the choices."""
        return SCALE * (weights.time * self.ns + weights.memory * self.num_bytes)


@dataclass(slots=True)
class PartTables:
    """Cost tables of a part before weighting."""

    scopes: list[tuple[int, ...]] = field(default_factory=list)
    """Variables of each table, one per dim."""
    ns: list[np.ndarray] = field(default_factory=list)
    """SCALE x ns."""
    num_bytes: list[np.ndarray] = field(default_factory=list)
    """SCALE x bytes."""
    activations: list[bool] = field(default_factory=list)
    """Whether the bytes are those of activations."""
    forbidden: list[np.ndarray | None] = field(default_factory=list)
    """What can never be chosen; None where everything can."""
    options: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tables with a leading dim of options, of which the cheapest counts: (scope, SCALE x ns, SCALE x bytes)."""
    domains: dict[int, int] = field(default_factory=dict)
    """Number of values of every variable."""
    keep: tuple[int, ...] = ()
    """Variables that the part has in common with the rest."""
    order: tuple[int, ...] | None = None
    """Elimination order, once it is known."""

    def copy(self) -> PartTables:
        """The same tables, to which others can be added."""
        return replace(
            self,
            scopes=self.scopes.copy(),
            ns=self.ns.copy(),
            num_bytes=self.num_bytes.copy(),
            activations=self.activations.copy(),
            forbidden=self.forbidden.copy(),
            options=self.options.copy(),
        )

    def add(self, scope: tuple[int, ...], ns: np.ndarray, num_bytes: np.ndarray, *, activation: bool = True) -> None:
        """Add a table. Variables of one value say nothing and are left out.

        Args:
            scope: its variables, one per dim.
            ns: SCALE x ns.
            num_bytes: SCALE x bytes.
            activation: whether the bytes are those of activations.
        """
        if 1 in ns.shape:
            scope = tuple(variable for variable, size in zip(scope, ns.shape, strict=True) if size > 1)
            ns, num_bytes = ns.squeeze(), num_bytes.squeeze()
        self.scopes.append(scope)
        self.ns.append(ns)
        self.num_bytes.append(num_bytes)
        self.activations.append(activation)
        forbidden = ns >= int(INFINITE) >> 6
        self.forbidden.append(forbidden if forbidden.any() else None)

    def add_options(self, scope: tuple[int, ...], ns: np.ndarray, num_bytes: np.ndarray) -> None:
        """Add a table of which the cheapest option counts.

        Args:
            scope: its variables, one per dim after the first.
            ns: SCALE x ns.
            num_bytes: SCALE x bytes, none of them activations'.
        """
        if len(ns) == 1:
            self.add(scope, ns[0], num_bytes[0], activation=False)
        else:
            self.options.append((scope, ns, num_bytes))

    def weighted(self, weights: Weights) -> list[Factor]:
        """The tables as factors of one weighted cost."""
        factors: list[Factor] = []
        for number, scope in enumerate(self.scopes):
            table = self.ns[number] * weights.time
            if weights.memory:
                divisor = weights.divisor if self.activations[number] else 1
                table = table + self.num_bytes[number] * weights.memory // divisor
            forbidden = self.forbidden[number]
            factors.append(Factor(scope, table if forbidden is None else np.where(forbidden, INFINITE, table)))
        for scope, ns, num_bytes in self.options:
            table = ns * weights.time + num_bytes * weights.memory
            factors.append(Factor(scope, table.min(axis=0)))
        return factors
