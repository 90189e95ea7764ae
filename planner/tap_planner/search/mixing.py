"""Solutions between two: some occurrences of the runs as in one, the others as in the other."""

from __future__ import annotations

from tap_planner.search.choices import Choices, Values
from tap_planner.search.costing import CostedModel
from tap_planner.search.pricing import price_choices
from tap_planner.search.weighting import Outcome

MAX_CROSSINGS = 6
"""Numbers that are tried because a line keeps the limit there; where memory is linear three do."""


def mix(costed: CostedModel, large: Outcome, small: Outcome, limit_bytes: int) -> Outcome | None:
    """The fastest mixture of two solutions that fits; None where none does.

    The outer part is taken from one of the two, and of the occurrences of all runs the first ones from ``small``
    (recomputed ones, mostly), the rest from ``large``. Their memory is nearly linear in how many come from ``small``:
    the least number that fits is looked for where a line has it, and should that not do by bisection.

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
        above, below = (-1, large.num_bytes), (total + 1, small.num_bytes)
        tried = 0
        while below[0] - above[0] > 1:
            middle = (above[0] + below[0]) // 2
            count = middle if tried >= MAX_CROSSINGS else _crossing(above, below, limit_bytes)
            tried += 1
            found = _priced(costed, mixed(outer.outer, large.choices, small.choices, count))
            if found.num_bytes > limit_bytes:
                above = (count, found.num_bytes)
                continue
            below = (count, found.num_bytes)
            if best is None or found.ns < best.ns:
                best = found
    return best


def _crossing(above: tuple[int, int], below: tuple[int, int], limit_bytes: int) -> int:
    """The least number strictly between two at which the line through both keeps the limit.

    Args:
        above: (number, bytes) above the limit.
        below: (number, bytes) of a larger number, within the limit.
        limit_bytes: the memory limit.
    """
    steps = -(-(above[1] - limit_bytes) * (below[0] - above[0]) // (above[1] - below[1]))
    return min(max(above[0] + steps, above[0] + 1), below[0] - 1)


def _priced(costed: CostedModel, choices: Choices) -> Outcome:
    price = price_choices(costed, choices)
    return Outcome(
        bound=0, choices=choices, ns=price.ns, num_bytes=price.num_bytes, activation_bytes=price.activation_bytes
    )


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
