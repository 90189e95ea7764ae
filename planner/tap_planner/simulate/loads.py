"""What passes through the links of a stage, by level of the topology, if all of them are always busy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tap_planner.simulate.overlap import Background, Busy
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.sending import StageOrder, is_waited_for

_Link = tuple[int, bool, bool]
"""Of a stage: which, out or in, to the next stages or to those before."""


def level_loads(passes: Sequence[Pass], orders: Sequence[StageOrder]) -> tuple[Mapping[str, int], ...]:
    """Per stage the time that levels need over which it has collectives: one at a time, and then no transfer.

    Transfers out of a stage and into it go at the same time, and those in both directions along the pipeline: of these
    links only the busiest counts. What a slot does before it has received everything keeps no transfer, and does not
    count together with them.

    Args:
        passes: what slots do.
        orders: per stage.
    """
    counts = [Counter(order.passes) for order in orders]
    sent = _sent(passes, counts)
    return tuple(_of_stage(stage, passes, order, counts[stage], sent) for stage, order in enumerate(orders))


def _sent(passes: Sequence[Pass], counts: Sequence[Counter[int]]) -> Mapping[_Link, Counter[str]]:
    """Time of transfers by link and level."""
    found: dict[_Link, Counter[str]] = {}
    for of_stage in counts:
        for index, count in of_stage.items():
            for position, route in passes[index].sends:
                if route.is_local or is_waited_for(passes[index], position):
                    continue
                used = dict.fromkeys(route.levels, count * route.ns)
                is_next = route.is_next(len(counts))
                for is_in, stage in enumerate(route.stages):
                    found.setdefault((stage, bool(is_in), is_next), Counter()).update(used)
    return found


def _of_stage(
    stage: int,
    passes: Sequence[Pass],
    order: StageOrder,
    counts: Counter[int],
    sent: Mapping[_Link, Counter[str]],
) -> Mapping[str, int]:
    alone, shared = Counter[str](), Counter[str]()
    for index, count in counts.items():
        first = max((position for position, _ in passes[index].receives), default=0)
        for position, piece in _collectives(passes[index]):
            used = dict.fromkeys(piece.levels, count * piece.ns)
            alone.update(used)
            if position >= first:
                shared.update(used)
    for job in (job for jobs in order.loose.values() for job in jobs):
        alone.update(dict.fromkeys(job.levels, job.ns))
        shared.update(dict.fromkeys(job.levels, job.ns))
    links = [used for (of_stage, *_), used in sent.items() if of_stage == stage]
    return {
        level: max(ns, shared[level] + max((used[level] for used in links), default=0)) for level, ns in alone.items()
    }


def _collectives(given: Pass) -> Iterator[tuple[int, Busy | Background]]:
    """Those of a pass, each with its position, or that from which on it may start."""
    for position, pieces in enumerate(given.main):
        yield from ((position, piece) for piece in pieces if piece.levels)
    yield from ((job.start, job) for job in given.background)
