"""Terms of many consumers in the exact stage: a set variable between the producer and every consumer.

The value of the set variable is the set of all demands (destination, gradient, and what the consumer does with it) that
consumers make of the tensor. What the term costs depends on its producer and that set only, so a clique over all
consumers becomes a star.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tap_planner.search.factors import INFINITE, WidthError
from tap_planner.search.terms import SCALE, RegionPolicy, Slot, Term

MAX_DEMANDS = 7
"""Different demands up to which all their sets are enumerated."""

_Demand = tuple[int, int, int, bool, bool]
"""Destination, gradient, region of the consumer, whether its backward reads the operand, whether it runs again."""


@dataclass(frozen=True, slots=True, eq=False)
class WideTerm:
    """A term with the demands that its consumers can make.

    Args:
        term: the tensor.
        demands: all different ones; set number v holds those whose bits are set in v + 1.
        consumers: per consumer ([sets, values] whether the set holds what it demands).
    """

    term: Term
    demands: tuple[_Demand, ...]
    consumers: tuple[tuple[int, np.ndarray], ...]

    @property
    def num_sets(self) -> int:
        """Number of sets but the empty one."""
        return (1 << len(self.demands)) - 1

    def costs(self, values: np.ndarray, policy: RegionPolicy) -> tuple[np.ndarray, np.ndarray]:
        """([producer's values, sets] SCALE x ns, the same in bytes) of every set.

        Args:
            values: alive strategies of the producer.
            policy: treatment of regions.
        """
        term = self.term
        pairs, inverse = np.unique(np.stack([term.source[values], term.wanted[values]]), axis=1, return_inverse=True)
        made = replace(term, source=pairs[0], wanted=pairs[1])
        found = np.zeros((2, pairs.shape[1], self.num_sets), dtype=np.int64)
        for number in range(self.num_sets):
            chosen = [demand for bit, demand in enumerate(self.demands) if (number + 1) >> bit & 1]
            slots = tuple(
                Slot(
                    variable=-1,
                    destination=np.array([destination]),
                    gradient=np.array([gradient]),
                    kept=kept,
                    region=region,
                    rerun=rerun,
                )
                for destination, gradient, region, kept, rerun in chosen
            )
            one = replace(made, slots=slots)
            strategies = [(0, slot.region) for slot in slots]
            for source in range(pairs.shape[1]):
                found[:, source, number] = one.point(strategies, source, policy)
        ns, num_bytes = found[:, inverse.reshape(-1), :] * SCALE
        return ns, num_bytes


def widen(term: Term, consumers: Sequence[tuple[int, np.ndarray]], most: int = MAX_DEMANDS) -> WideTerm:
    """The demands of a term's consumers.

    Args:
        term: the tensor.
        consumers: every consumer with its alive values.
        most: demands that are still enumerated.

    Raises:
        WidthError: there are too many.
    """
    demands = sorted(
        {
            demand
            for slot in term.slots
            for demand in _demands(slot, next(values for variable, values in consumers if variable == slot.variable))
        }
    )
    if len(demands) > most:
        raise WidthError(f"{len(demands)} demands of one tensor")
    bit_of = {demand: bit for bit, demand in enumerate(demands)}
    bits = np.arange(1, 1 << len(demands))
    held: list[tuple[int, np.ndarray]] = []
    for variable, values in consumers:
        allowed = np.ones((len(bits), len(values)), dtype=bool)
        for slot in term.slots:
            if slot.variable == variable:
                wanted = np.array([bit_of[demand] for demand in _demands(slot, values)])
                allowed &= (bits[:, None] >> wanted[None, :] & 1).astype(bool)
        held.append((variable, np.where(allowed, 0, int(INFINITE))))
    return WideTerm(term, tuple(demands), tuple(held))


def _demands(slot: Slot, values: np.ndarray) -> list[_Demand]:
    """What a consumer demands at each of its values."""
    return [
        (destination, gradient, slot.region, slot.kept, slot.rerun)
        for destination, gradient in zip(slot.destination[values].tolist(), slot.gradient[values].tolist(), strict=True)
    ]
