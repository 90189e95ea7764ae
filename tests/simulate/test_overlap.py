"""The background stream against a simulation nanosecond by nanosecond, and closed forms of uniform layers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.simulate import Background, Busy, hidden_ns

NODE, NETWORK = frozenset({"node"}), frozenset({"network"})
BOTH = NODE | NETWORK


def step_ns(main: Sequence[Sequence[Busy]], jobs: Sequence[Background]) -> int:
    """How long a pass takes, one nanosecond after the other."""
    order = sorted(jobs, key=lambda job: (job.start, len(main) if job.needed is None else job.needed))
    left = [job.ns for job in order]
    clock = 0

    def head(position: int) -> int | None:
        """The first that is not done, if it may run."""
        undone = [number for number, rest in enumerate(left) if rest]
        return undone[0] if undone and order[undone[0]].start <= position else None

    for position, pieces in enumerate(main):
        while any(job.needed == position and sum(left[: number + 1]) for number, job in enumerate(order)):
            running = head(position)
            assert running is not None
            left[running] -= 1
            clock += 1
        for piece in pieces:
            for _ in range(piece.ns):
                running = head(position)
                if running is not None and not piece.levels & order[running].levels:
                    left[running] -= 1
                clock += 1
    return clock + sum(left)


@st.composite
def passes(draw: st.DrawFn) -> tuple[list[list[Busy]], list[Background]]:
    """A few operators and collectives, and some reductions and gathers behind them."""
    levels = st.sampled_from([frozenset[str](), NODE, NETWORK, BOTH])
    busy = st.builds(Busy, st.integers(0, 6), levels)
    main = draw(st.lists(st.lists(busy, max_size=2), min_size=1, max_size=8))
    jobs: list[Background] = []
    for _ in range(draw(st.integers(0, 6))):
        start = draw(st.integers(0, len(main)))
        needed = draw(st.none() | st.integers(start, len(main) - 1)) if start < len(main) else None
        kind = "gradient" if needed is None else "gather"
        used = draw(st.sampled_from([NODE, NETWORK, BOTH]))
        jobs.append(Background(kind=kind, ns=draw(st.integers(0, 9)), levels=used, start=start, needed=needed))
    return main, jobs


@given(passes())
def test_hidden_is_what_the_pass_gains(drawn: tuple[list[list[Busy]], list[Background]]) -> None:
    """One stream after the other, less what is hidden, is as long as the pass of both; and nothing is used twice."""
    main, jobs = drawn
    hidden = hidden_ns(main, jobs)
    pieces = [piece for entry in main for piece in entry]
    alone = sum(piece.ns for piece in pieces)
    background = sum(job.ns for job in jobs)
    taken = alone + background - sum(hidden.values())
    assert taken == step_ns(main, jobs)
    for kind, ns in hidden.items():
        assert 0 <= ns <= sum(job.ns for job in jobs if job.kind == kind)
    assert taken >= max(alone, background)
    for level in ("node", "network"):
        assert taken >= sum(piece.ns for piece in (*pieces, *jobs) if level in piece.levels)


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 50))
def test_reductions_of_uniform_layers(layers: int, compute: int, reduction: int) -> None:
    """Every layer's reduction but the last runs behind the next layer: (L - 1) min(compute, reduction) is hidden."""
    main = [[Busy(compute)] for _ in range(layers)]
    jobs = [Background(kind="gradient", ns=reduction, levels=NETWORK, start=i + 1) for i in range(layers)]
    assert hidden_ns(main, jobs) == {"gradient": (layers - 1) * min(compute, reduction)}


@given(st.integers(1, 12), st.integers(0, 50), st.integers(0, 50))
def test_gathers_of_uniform_layers(layers: int, compute: int, gather: int) -> None:
    """Every layer's gather but the first runs behind the layer before."""
    main = [[Busy(compute)] for _ in range(layers)]
    jobs = [Background(kind="gather", ns=gather, levels=NETWORK, start=max(0, i - 1), needed=i) for i in range(layers)]
    assert hidden_ns(main, jobs) == {"gather": (layers - 1) * min(compute, gather)}


@pytest.mark.parametrize(("levels", "hidden"), [(NODE, 10), (NETWORK, 4)])
def test_collectives_of_the_main_stream_keep_their_links(levels: frozenset[str], hidden: int) -> None:
    """A reduction over the network runs behind a collective in the node, and waits for one over the network."""
    main = [[Busy(3)], [Busy(6, levels)], [Busy(4)]]
    assert hidden_ns(main, [Background(kind="gradient", ns=99, levels=NETWORK, start=1)]) == {"gradient": hidden}


def test_needed_before_it_may_start() -> None:
    """A gather that is needed before it may start is our own mistake."""
    with pytest.raises(ValueError, match="needed at 0"):
        hidden_ns([[Busy(1)], []], [Background(kind="gather", ns=1, levels=NODE, start=1, needed=0)])
