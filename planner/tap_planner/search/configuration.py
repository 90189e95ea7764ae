"""The settings of a whole plan, and the collectives that follow from them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """The settings that hold for the whole plan."""

    zero: int
    recompute: str
    microbatches: int
    optimizer: str
    precision: str
    training: bool


def reduction_calls(zero: int, microbatches: int) -> tuple[tuple[str, int], ...]:
    """Collectives over a parameter's data axes per step: (kind, count)."""
    return {
        0: (("all_reduce", 1),),
        1: (("reduce_scatter", 1), ("all_gather", 1)),
        2: (("reduce_scatter", microbatches), ("all_gather", 1)),
        3: (("reduce_scatter", microbatches), ("all_gather", 2 * microbatches)),
    }[zero]
