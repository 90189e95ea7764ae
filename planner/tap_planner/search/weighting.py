"""What is minimised, what a minimisation finds, and the cost tables that are weighted for it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
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


@dataclass(frozen=True, slots=True, eq=False)
class _Block:
    """Tables one after the other in flat arrays, so that all of them are weighted at once."""

    scopes: tuple[tuple[int, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    ends: tuple[int, ...]
    """Where each table ends."""
    ns: np.ndarray
    """[entries] SCALE x ns."""
    num_bytes: np.ndarray
    """[entries] SCALE x bytes."""
    activation: np.ndarray
    """[entries] whether the bytes are those of activations."""
    forbidden: np.ndarray
    """Places of what can never be chosen."""

    def weighted(self, weights: Weights) -> list[Factor]:
        """The tables as factors of one weighted cost."""
        cost = self.ns * weights.time
        if weights.memory:
            memory = self.num_bytes * weights.memory
            if weights.divisor != 1:
                np.floor_divide(memory, weights.divisor, out=memory, where=self.activation)
            cost += memory
        cost[self.forbidden] = INFINITE
        return [Factor(scope, table) for scope, table in zip(self.scopes, self.cut(cost), strict=True)]

    def cut(self, flat: np.ndarray) -> list[np.ndarray]:
        """The tables of a flat array."""
        starts = (0, *self.ends[:-1])
        rows = zip(starts, self.ends, self.shapes, strict=True)
        return [flat[start:end].reshape(shape) for start, end, shape in rows]


def _block(
    scopes: Sequence[tuple[int, ...]],
    ns: Sequence[np.ndarray],
    num_bytes: Sequence[np.ndarray],
    activations: Sequence[bool],
) -> _Block:
    """The block of at least one table."""
    sizes = [table.size for table in ns]
    flat_ns = np.concatenate([table.reshape(-1) for table in ns])
    return _Block(
        scopes=tuple(scopes),
        shapes=tuple(table.shape for table in ns),
        ends=tuple(itertools.accumulate(sizes)),
        ns=flat_ns,
        num_bytes=np.concatenate([table.reshape(-1) for table in num_bytes]),
        activation=np.repeat(activations, sizes),
        forbidden=np.flatnonzero(flat_ns >= int(INFINITE) >> 6),
    )


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
    options: list[tuple[tuple[int, ...], np.ndarray, np.ndarray]] = field(default_factory=list)
    """Tables with a leading dim of options, of which the cheapest counts: (scope, SCALE x ns, SCALE x bytes)."""
    domains: dict[int, int] = field(default_factory=dict)
    """Number of values of every variable."""
    keep: tuple[int, ...] = ()
    """Variables that the part has in common with the rest."""
    order: tuple[int, ...] | None = None
    """Elimination order, once it is known."""
    _blocks: list[_Block] = field(default_factory=list)
    """All tables but those added since they were last weighted or copied."""

    def copy(self) -> PartTables:
        """The same tables, to which others can be added."""
        self._close_block()
        return replace(
            self,
            scopes=self.scopes.copy(),
            ns=self.ns.copy(),
            num_bytes=self.num_bytes.copy(),
            activations=self.activations.copy(),
            options=self.options.copy(),
            _blocks=self._blocks.copy(),
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
        self._close_block()
        factors = [factor for block in self._blocks for factor in block.weighted(weights)]
        for scope, ns, num_bytes in self.options:
            table = ns * weights.time + num_bytes * weights.memory
            factors.append(Factor(scope, table.min(axis=0)))
        return factors

    def _close_block(self) -> None:
        """Put the tables that were added into a block, of which they become parts."""
        first = sum(len(block.scopes) for block in self._blocks)
        if first == len(self.scopes):
            return
        added = slice(first, None)
        block = _block(self.scopes[added], self.ns[added], self.num_bytes[added], self.activations[added])
        self._blocks.append(block)
        self.ns[added], self.num_bytes[added] = block.cut(block.ns), block.cut(block.num_bytes)
