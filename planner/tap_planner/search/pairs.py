"""Terms of one reader: their exact tables, of which most settings of the regions have some in common."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np

from tap_planner.search.configuration import Recompute
from tap_planner.search.terms import SCALE, RegionPolicy, Term

Case = tuple[bool, bool, bool]
"""Whether forward's redistribution runs twice, whether the producer's copy is kept, and whether the reader's is."""


def is_pair(term: Term) -> bool:
    """Whether a term couples at most its producer with one other variable, by one operand."""
    return len(term.slots) == 1 and term.producer != term.slots[0].variable


class PairTables:
    """Tables of a term of one operand; what ``Term.dense`` gives.

    Args:
        term: see ``is_pair``.
        alive: the possible strategies of the producer, where there is one, and of the reader.
    """

    def __init__(self, term: Term, alive: Sequence[np.ndarray]) -> None:
        self._term = term
        self._slot = term.slots[0]
        values = alive[-1]
        self._destination, self._gradient = self._slot.destination[values], self._slot.gradient[values]
        if term.producer is None:
            self._source = self._wanted = np.zeros((), dtype=np.int64)
        else:
            self._source, self._wanted = term.source[alive[0]][:, None], term.wanted[alive[0]][:, None]
        self._shape = tuple(len(values) for values in alive)

    def case(self, policy: RegionPolicy) -> Case:
        """All that the tables depend on of the treatment of regions."""
        term, slot = self._term, self._slot
        mode, remade = policy.mode(slot.region), term.is_remade(policy)
        full = mode is Recompute.FULL
        apart = full and slot.region != term.producer_region
        again = (slot.kept or slot.rerun) if remade else full
        source = term.producer_keeps and policy.counts(term.producer_region, remade=remade)
        reader = slot.kept and policy.counts(slot.region, remade=remade)
        rerun = mode is Recompute.SELECTIVE and slot.rerun and not remade
        if term.producer is None:
            return again, source, reader or rerun or apart
        return again, source or apart, reader or rerun

    def of(self, case: Case) -> tuple[np.ndarray, np.ndarray]:
        """[*variables] SCALE x ns, and SCALE x bytes."""
        again, source, reader = case
        ns = self._backward if self._term.producer is None else self._both_ways[1 if again else 0]
        if not self._term.is_activation or not (source or reader):
            return ns, np.zeros(self._shape, dtype=np.int64)
        if source and reader:
            return ns, self._two_copies
        return ns, np.broadcast_to(self._bytes[self._source if source else self._destination], self._shape)

    @cached_property
    def _bytes(self) -> np.ndarray:
        """[num_states] SCALE x bytes."""
        return self._term.state_bytes * SCALE

    @cached_property
    def _backward(self) -> np.ndarray:
        """[*variables] SCALE x ns of the gradient."""
        return np.broadcast_to(self._term.gradient_ns(self._gradient, self._wanted) * SCALE, self._shape)

    @cached_property
    def _both_ways(self) -> tuple[np.ndarray, np.ndarray]:
        """[*variables] SCALE x ns with forward's redistribution once, and twice."""
        forward = self._term.between(self._source, self._destination) * SCALE
        once = forward + self._backward
        return once, once + forward

    @cached_property
    def _two_copies(self) -> np.ndarray:
        """[*variables] SCALE x bytes of the producer's and the reader's copy, which may be one."""
        apart = np.where(self._destination == self._source, 0, self._bytes[self._destination])
        return self._bytes[self._source] + apart


__all__ = ["PairTables", "is_pair"]
