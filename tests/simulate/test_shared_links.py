"""Links that transfers share with collectives of their stages: closed forms by hand, and steps of random plans whose
stages all lie in one node."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tap_planner.cluster import Cluster, Mesh, MeshAxis, load_cluster, parse_cluster
from tap_planner.cost.groups import stage_shapes
from tap_planner.plan import Overlap
from tap_planner.program import Program
from tap_planner.schedule import Work, make_schedule
from tap_planner.simulate import Timeline, lower_bounds, predict, simulate, to_trace
from tap_planner.simulate.intervals import joined
from tap_planner.simulate.overlap import Background, Busy, Levels
from tap_planner.simulate.passes import Pass
from tap_planner.simulate.playback import Played
from tap_planner.simulate.playing import play
from tap_planner.simulate.routes import Route, Routes
from tap_planner.simulate.sending import StageOrder
from tests.apply.random_plans import RandomPlan
from tests.simulate.pipelines import cut, evenly, layer_starts, mlp, on_levels, replicated
from tests.simulate.test_bounds import SETTINGS, drawn, graph_of, schedule_of
from tests.simulate.test_placed_devices import RACKS

NODE, NETWORK = frozenset({"node"}), frozenset({"network"})
NOTHING: Levels = frozenset()
SENT_NS = 6


# -- by hand -----------------------------------------------------------------------------------------------------------


def two_stages(
    first: Sequence[Busy],
    second: Sequence[Busy],
    *,
    background: Sequence[Background] = (),
    loose: Sequence[Background] = (),
    microbatches: int = 2,
) -> tuple[Played, ...]:
    """Forwards of two stages; the first sends to the second, over the links of the node.

    Args:
        first: what the first stage does in a slot.
        second: the same.
        background: what runs behind the slots of the first.
        loose: what runs behind its last slot.
        microbatches: how many.
    """
    route = Route(
        operator=0, tensor="t", forward=True, chunks=(0, 1), stages=(0, 1), num_bytes=1, ns=SENT_NS, levels=NODE
    )
    passes = tuple(
        Pass(
            chunk=chunk,
            works=((Work.FORWARD, 2),),
            main=(tuple(pieces), ()),
            background=tuple(background) if chunk == 0 else (),
            compute_ns=sum(piece.ns for piece in pieces if not piece.levels),
            waited_ns={"blocking": sum(piece.ns for piece in pieces if piece.levels)},
            behind_ns=0,
            sends=((1, route),) if chunk == 0 else (),
            receives=((0, route),) if chunk == 1 else (),
            gradients={},
            reads={},
            changes=(),
        )
        for chunk, pieces in enumerate((first, second))
    )
    numbers = tuple(range(microbatches))
    orders = [
        StageOrder(
            passes=(stage,) * microbatches,
            microbatches=numbers,
            loose={microbatches - 1: tuple(loose)} if stage == 0 and loose else {},
        )
        for stage in range(2)
    ]
    return play(passes, orders)


def sent(played: Sequence[Played]) -> list[tuple[int, int]]:
    """From when to when transfers were on their way."""
    return [(start, end) for *_, start, end in played[0].transfers]


def test_a_transfer_stands_still_while_its_target_uses_its_links() -> None:
    """Sent at 28, it moves for 2, stands still while the other stage's collective runs from 30 to 38, and comes at 42:
    4 of that time the stage waits for it, but for the 2 that it works itself."""
    played = two_stages([Busy(14)], [Busy(10), Busy(8, NODE), Busy(2)])
    assert sent(played) == [(14, 20), (28, 42)]
    assert [list(each.starts_ns) for each in played] == [[0, 14], [20, 42]]
    assert [each.waited_ns for each in played] == [0, SENT_NS + 2]


def test_a_transfer_stands_still_while_its_source_uses_its_links() -> None:
    """The next slot of the stage that sends begins with a collective."""
    played = two_stages([Busy(5, NODE), Busy(5)], [Busy(1)])
    assert sent(played) == [(10, 21), (21, 27)]
    assert list(played[1].starts_ns) == [21, 27]


@pytest.mark.parametrize("levels", [NOTHING, NETWORK])
def test_other_links_are_apart(levels: Levels) -> None:
    """Neither compute nor collectives over other levels hold up a transfer."""
    played = two_stages([Busy(5, levels), Busy(5)], [Busy(10), Busy(8, levels), Busy(2)])
    assert sent(played) == [(10, 16), (20, 26)]


def test_what_a_slot_must_finish_goes_after_transfers() -> None:
    """A reduction of 9 in a slot of 12 is hidden in the first one. In the second, from 12 on, it waits for the transfer
    that is sent then, until 18, and for the next one from 24 to 30; so the slot ends at 33, and waits for 3 of it."""
    job = Background(kind="gradient", ns=9, levels=NODE, start=0)
    first, _ = played = two_stages([Busy(12)], [Busy(1)], background=[job])
    assert sent(played) == [(12, 18), (24, 30)]
    assert (first.free_ns, first.exposed_ns["gradient"]) == (33, 3)


@pytest.mark.parametrize(("levels", "end"), [(NODE, 43), (NETWORK, 37)])
def test_reductions_of_the_end_of_the_step_go_after_transfers(levels: Levels, end: int) -> None:
    """Both begin when the last slot ends, at 30; over the same links the reduction, of 7, waits for the transfer, of 6,
    and what the stage waits for the transfer is none of the reduction's time."""
    job = Background(kind="gradient", ns=7, levels=levels, start=2)
    first, _ = played = two_stages([Busy(15)], [Busy(1)], loose=[job])
    assert sent(played) == [(15, 21), (30, 36)]
    assert (first.free_ns, first.exposed_ns["gradient"]) == (end, 7)
    assert [(span.start_ns + 15, span.end_ns + 15) for span in first.runs[-1].spans] == [(end - 7, end)]


def test_a_transfer_that_stands_still_keeps_its_links() -> None:
    """What is sent later over the same links starts when it has come, first issued first served."""
    played = two_stages([Busy(2)], [Busy(1), Busy(40, NODE)], microbatches=4)
    assert sent(played) == [(2, 8), (8, 54), (54, 100), (100, 146)]


# -- routes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        *itertools.product(("1x12:l4", "2x6:l4", "6x2:l4", "3x4:l4", "12x1:l4"), (1, 2, 3, 4)),
        *((RACKS, ranks) for ranks in (1, 2, 4)),
    ],
)
def test_levels_of_transfers_are_those_of_their_price(text: str, ranks: int) -> None:
    """Between any two stages, as the links of the cost model are found."""
    cluster = parse_cluster(text, file="racks") if "\n" in text else load_cluster(text)
    stages = cluster.num_devices // ranks
    program = replicated(mlp(stages), layer_starts(stages, stages), make_schedule("1f1b", stages, 2), ranks=ranks)
    routes = Routes(program, None, None, cluster)  # type: ignore[arg-type]
    mesh = Mesh(axes=(MeshAxis(name="a", size=ranks),), num_stages=stages)
    for first, second in itertools.combinations(range(stages), 2):
        shapes = stage_shapes(cluster, mesh, (first, second))
        used = {cluster.levels[shares[0].level].name for shape in shapes for shares in shape.by_level}
        assert routes.levels_between(first, second) == routes.levels_between(second, first) == used


# -- random plans in one node ------------------------------------------------------------------------------------------

everywhere = pytest.mark.parametrize(
    ("name", "seed"), list(itertools.product(("gpt2_tiny", "gshard_moe_tiny", "t5_tiny"), range(8)))
)


def in_one_node(name: str, seed: int) -> tuple[Program, Cluster]:
    """As ``drawn``, on links that are slow, and the same for everything."""
    zero, recompute = random.Random(seed).choice(SETTINGS)
    graph, schedule = graph_of(name), schedule_of(seed)
    plan = replace(RandomPlan(graph, (2, 2), seed, zero=zero, recompute=recompute).build(), precision="bf16")
    starts = evenly(graph, schedule.num_virtual_stages)
    program = cut(graph, on_levels(plan, (("node",), ("node",))), starts, schedule, ((), (1,), (0, 1))[seed % 3])
    cluster = load_cluster(f"1x{4 * schedule.num_stages}:a100-sxm4-80gb")
    levels = tuple(replace(level, latency_ns=20_000, bandwidth_bytes_per_s=10**9) for level in cluster.levels)
    return program, replace(cluster, levels=levels)


def came_ns(timeline: Timeline) -> dict[tuple[int, int], int]:
    """When the last has come of what slots receive, by chunk and microbatch, forward and back alike."""
    found: dict[tuple[int, int], int] = {}
    for out, microbatch, _, end in timeline.stages[0].record.played.transfers:
        key = (out.target, out.slots[microbatch])
        found[key] = max(end, found.get(key, 0))
    return found


def uses(timeline: Timeline, levels: Levels) -> list[list[tuple[int, int]]]:
    """Per stage when its main stream uses links in slots, from when all that they receive has come."""
    came, base = came_ns(timeline), 0
    found: list[list[tuple[int, int]]] = []
    for stage in timeline.stages:
        played, order = stage.record.played, stage.record.order
        own: list[tuple[int, int]] = []
        for position, (index, start, run) in enumerate(zip(order.passes, played.starts_ns, played.runs, strict=True)):
            begins = came.get((stage.stage, base + position), 0)
            for offset, pieces in zip(run.offsets_ns, stage.record.passes[index].main, strict=False):
                clock = start + offset
                for piece in pieces:
                    if piece.levels & levels and clock + piece.ns > begins:
                        own.append((max(clock, begins), clock + piece.ns))
                    clock += piece.ns
        found.append(own)
        base += len(order.passes)
    return found


def gaps(start: int, end: int, kept: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """A time without others."""
    found = joined(kept)
    inner = [(a, b) for a, b in zip(found.starts, found.ends, strict=True) if b > start and a < end]
    times = [start, *(time for pair in inner for time in pair), end]
    return [(a, b) for a, b in zip(times[::2], times[1::2], strict=True) if b > a]


@everywhere
def test_transfers_move_while_no_main_stream_needs_their_links(name: str, seed: int) -> None:
    """Of the time from its start to its end, a transfer has its links to itself for as long as it takes."""
    timeline = simulate(*in_one_node(name, seed))
    used = uses(timeline, NODE)
    stretched = 0
    for out, _, start, end in timeline.stages[0].record.played.transfers:
        kept = [*used[out.route.stages[0]], *used[out.route.stages[1]]]
        assert sum(b - a for a, b in gaps(start, end, kept)) == out.ns
        stretched += end - start > out.ns
    assert stretched or name != "gpt2_tiny"


@everywhere
def test_the_background_moves_while_no_transfer_of_its_stage_does(name: str, seed: int) -> None:
    """What slots have to finish, and what is done when they end, has its links to itself while it moves."""
    timeline = simulate(*in_one_node(name, seed))
    used = uses(timeline, NODE)
    moving: list[list[tuple[int, int]]] = [[] for _ in timeline.stages]
    for out, _, start, end in timeline.stages[0].record.played.transfers:
        kept = [*used[out.route.stages[0]], *used[out.route.stages[1]]]
        for stage in out.route.stages:
            moving[stage].extend(gaps(start, end, kept))
    for stage in timeline.stages:
        taken = joined(moving[stage.stage])
        for start, run in zip(stage.record.played.starts_ns, stage.record.played.runs, strict=True):
            for a, b, _ in run.moves:
                assert sum(d - c for c, d in gaps(start + a, start + b, [*zip(*taken, strict=True)])) == b - a


@everywhere
def test_steps_are_accounted_for_and_bounded(name: str, seed: int) -> None:
    """Where all share the links of one node, too: every nanosecond is something, no bound is above the step, streams do
    one thing at a time, and nothing is faster than on links of their own."""
    program, cluster = in_one_node(name, seed)
    timeline, bounds = simulate(program, cluster), lower_bounds(program, cluster)
    assert predict(program, cluster).step_ns == timeline.step_ns
    assert 0 < bounds.step_ns <= timeline.step_ns
    for stage in timeline.stages:
        assert stage.compute_ns + sum(stage.exposed_ns.values()) + stage.bubble_ns == timeline.step_ns
        assert stage.bubble_ns >= 0
        assert all(0 <= ns <= stage.communication_ns[kind] for kind, ns in stage.hidden_ns.items())
        for stream, events in itertools.groupby(stage.events, key=lambda event: event.stream):
            if stream != "background":
                assert all(a.end_ns <= b.start_ns for a, b in itertools.pairwise(events))
    assert simulate(program, cluster) == timeline


def test_where_a_stage_waits_for_what_it_sends_nothing_is_shared() -> None:
    """With ``Overlap.NONE`` transfers take what they take by themselves."""
    for seed in range(4):
        program, cluster = in_one_node("gpt2_tiny", seed)
        played = simulate(program, cluster, overlap=Overlap.NONE).stages[0].record.played
        assert all(end - start == out.ns for out, _, start, end in played.transfers)


def test_transfers_between_nodes_leave_the_links_inside_alone() -> None:
    """Stages in nodes of their own: collectives inside them keep no transfer."""
    program, cluster = drawn("gpt2_tiny", 1, "nccl")
    outs = [out for out, *_ in simulate(program, cluster).stages[0].record.played.transfers]
    assert {out.levels for out in outs} == {NETWORK}


def test_a_trace_shows_a_transfer_in_one_piece() -> None:
    """From its start to its end, however long it stands still."""
    timeline = simulate(*in_one_node("gpt2_tiny", 1))
    transfers = timeline.stages[0].record.played.transfers
    assert any(end - start > out.ns for out, _, start, end in transfers)
    events = to_trace(timeline)["traceEvents"]
    assert isinstance(events, list)
    shown = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e.get("cat") == "send")
    expected = sorted((start / 1000, end / 1000) for *_, start, end in transfers)
    assert [pytest.approx(each) for each in expected] == shown
