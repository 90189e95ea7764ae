"""Solutions between two: some occurrences of the runs as in one, the others as in the other."""

from __future__ import annotations

from tap_planner.search.choices import Choices, Values
from tap_planner.search.costing import CostedModel
from tap_planner.search.pricing import price_choices
from tap_planner.search.weighting import Outcome


def mix(costed: CostedModel, large: Outcome, small: Outcome, limit_bytes: int) -> Outcome | None:
    """The fastest mixture of two solutions that fits, found by bisection; None where none does.

    The outer part is taken from one of the two, and of the occurrences of all runs the first ones from ``small``
    (recomputed ones, mostly), the rest from ``large``.

    Args:
        costed: the model under the configuration.
        large: a fast solution that does not fit.
        small: a slower one that fits.
        limit_bytes: the memory limit.
    """
    assert large.choices is not None and small.choices is not None
    best: Outcome | None = None
    total = sum(len(sequence) for sequence in small.choices.sequences)
    for outer in (large.choices, small.choices):
        low, high = 0, total
        while low <= high:
            middle = (low + high) // 2
            choices = mixed(outer.outer, large.choices, small.choices, middle)
            price = price_choices(costed, choices)
            if price.num_bytes <= limit_bytes:
                high = middle - 1
                if best is None or price.ns < best.ns:
                    best = Outcome(
                        bound=0,
                        choices=choices,
                        ns=price.ns,
                        num_bytes=price.num_bytes,
                        activation_bytes=price.activation_bytes,
                    )
            else:
                low = middle + 1
    return best


def mixed(outer: Values, large: Choices, small: Choices, count: int) -> Choices:
    """Choices with the first ``count`` later occurrences from ``small``, the others from ``large``.

    Args:
        outer: values of the outer part.
        large: choices.
        small: other choices of the same model.
        count: later occurrences of all runs, counted in order.
    """
    links: list[tuple[Values, ...]] = []
    sequences: list[tuple[int, ...]] = []
    for number, sequence in enumerate(small.sequences):
        taken = min(count, len(sequence))
        count -= taken
        shift = len(small.links[number])
        links.append((*small.links[number], *large.links[number]))
        sequences.append((*sequence[:taken], *(shift + link for link in large.sequences[number][taken:])))
    return Choices(small.model, outer, tuple(links), tuple(sequences))
