"""Orders of the user's own, as text."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner.errors import UsageError
from tap_planner.schedule import (
    ChunkOrder,
    Durations,
    PipelineSchedule,
    check,
    makespan,
    parse_order,
    read_order,
    to_text,
)
from tests.schedule.pipelines import random_schedule, schedule_of, schedules

TEXT = """\
# Three microbatches on two ranks.
name: mine

rank 0: F0 F1 B0  F2 B1 B2   # whole
rank 1:F0 I0 F1 I1 W0 F2 I2 W1 W2
"""


def test_reads_what_is_written() -> None:
    """Comments, empty lines and spaces do not matter."""
    expected = schedule_of("F0 F1 B0 F2 B1 B2", "F0 I0 F1 I1 W0 F2 I2 W1 W2", m=3)
    assert parse_order(TEXT, "order.txt") == expected


def test_name_of_the_file() -> None:
    """A text without a name is called as its file."""
    assert parse_order("rank 0: F0 B0", "order.txt").name == "order.txt"


def test_chunks_in_a_vee() -> None:
    """Chunks follow the point and lie as the text says."""
    found = parse_order("chunks: vee\nrank 0: F0.0 F0.1 B0.1 B0.0", "order.txt")
    assert (found.num_chunks, found.chunk_order) == (2, ChunkOrder.VEE)


def test_chunks_on_ranks() -> None:
    """The ranks of all chunks, one after the other; ranks may have more of them or less."""
    found = parse_order("chunks: 0 1 0\nrank 0: F0.0 F0.1 B0.1 B0.0\nrank 1: F0 B0", "order.txt")
    check(found)
    assert (found.places, found.num_chunks, found.num_virtual_stages) == ((0, 1, 0), 2, 3)
    assert [found.chunks_of(rank) for rank in range(2)] == [(0, 2), (1,)]
    assert [found.rank_and_chunk(chunk) for chunk in range(3)] == [(0, 0), (1, 0), (0, 1)]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ("0 1 2", "chunk 2 lies on rank 2, expected 0 to 1"),
        ("0 0", "no chunk lies on rank 1"),
        ("0 1 1", "rank 1: F0.1 is missing"),
        ("1 0", None),
        ("0 1 0", "rank 0: F0.1 is missing"),
    ],
)
def test_chunks_on_wrong_ranks(chunks: str, message: str | None) -> None:
    """A rank that has no order, or no chunk, and orders that leave a chunk out, are named."""
    first, second = ("F0 B0", "F0 B0")
    found = parse_order(f"chunks: {chunks}\nrank 0: {first}\nrank 1: {second}", "order.txt")
    if message is None:
        check(found)
        return
    with pytest.raises(UsageError, match=message):
        check(found)


TWO_WAYS = """
chunks: 0 1 2 0
reads: - 0 0 1,2
rank 0: F0.0 F0.1 B0.1 B0.0
rank 1: F0 B0
rank 2: F0 B0
"""
"""A model that parts in two and comes together again."""


def test_chunks_that_wait_for_several() -> None:
    """Chunks that read nothing of each other run at the same time, and wait for each other nowhere."""
    schedule = parse_order(TWO_WAYS, "order.txt")
    check(schedule)
    units = Durations.uniform(4, forward_ns=10, input_backward_ns=10, weight_backward_ns=10)
    timing = makespan(schedule, units)
    assert timing.start_ns == ((0, 20, 30, 70), (10, 50), (10, 50))
    chain = makespan(parse_order(TWO_WAYS.replace("reads: - 0 0 1,2", ""), "order.txt"), units)
    assert (timing.makespan_ns, chain.makespan_ns) == (90, 120)


@pytest.mark.parametrize(
    ("reads", "message"),
    [
        ("- 0 0", "what 3 chunks read, expected 4"),
        ("- 0 0 2,1", "chunk 3 reads 2,1, expected chunks 0 to 2, each once, ascending"),
        ("- 0 0 1,1", "chunk 3 reads 1,1, expected chunks 0 to 2, each once, ascending"),
        ("- 0 2 1,2", "chunk 2 reads 2, expected chunks 0 to 1"),
        ("0 0 0 1,2", "chunk 0 reads 0, expected nothing"),
    ],
)
def test_chunks_that_read_what_is_not_there(reads: str, message: str) -> None:
    """What a chunk reads is made by earlier ones, and it is said of all."""
    with pytest.raises(UsageError, match=message):
        check(parse_order(TWO_WAYS.replace("- 0 0 1,2", reads), "order.txt"))


@pytest.mark.parametrize("schedule", [*schedules(range(1, 5), range(1, 5)), *map(random_schedule, range(20))])
def test_round_trip(schedule: PipelineSchedule) -> None:
    """Text and back is the same schedule."""
    assert parse_order(to_text(schedule), "order.txt") == schedule


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("", "order.txt: no rank, expected a line for each rank", "rank 0: F0"),
        ("name: x\n\n# no\n", "order.txt: no rank", "rank 0: F0"),
        (
            "F0 B0",
            "order.txt:1: 'F0 B0', expected 'rank NUMBER: SLOTS' or 'name: ...' or 'chunks: ...' or 'reads: ...'",
            "rank 0:",
        ),
        ("\nnmae: x", "order.txt:2: 'nmae: x', expected 'rank NUMBER: SLOTS' or 'name: ...'", "rank 0:"),
        ("chunk: vee", "or 'reads: ...' (did you mean 'chunks'?)", "rank 0:"),
        ("rank 0: F0 B0\nname: x", "order.txt:2: 'name: x', expected 'rank NUMBER: SLOTS'", "rank 0:"),
        ("name: x\nname: y", "order.txt:2: 'name' occurs twice, expected it once", "out"),
        ("name:\nrank 0: F0 B0", "order.txt:1: nothing after 'name', expected a value", "out"),
        ("chunks: V", "order.txt:1: 'V', expected interleaved, vee or the rank of each chunk, as 0 1 1 0", "Correct"),
        ("reads: - 0;1", "order.txt:1: '- 0;1', expected the chunks that each chunk reads, as - 0 0 1,2", "Correct"),
        ("chunks: 0 1 x", "order.txt:1: '0 1 x', expected interleaved, vee or the rank of each chunk", "Correct"),
        ("chunks: 0, 1", "order.txt:1: '0, 1', expected interleaved, vee or the rank of each chunk", "Correct"),
        ("rank 1: F0 B0", "order.txt:1: rank 1, expected rank 0", "in order"),
        ("rank 0: F0 B0\nrank 0: F0 B0", "order.txt:2: rank 0, expected rank 1", "each once"),
        ("rank 0:", "order.txt:1: no slot, expected at least one", "rank 0: F0"),
        ("rank 0: F0 X0", "order.txt:1: 'X0', expected F, B, I or W with a microbatch and maybe a chunk", "rank 0:"),
        ("rank 0: f0.1", "order.txt:1: 'f0.1', expected F, B, I or W", "Write F0.1."),
        ("rank 0: F00", "order.txt:1: 'F00', expected F, B, I or W", "rank 0:"),
        ("rank 0: F0 B0 F0", "order.txt:1: 'F0' occurs twice, expected it once", "out"),
    ],
)
def test_wrong_texts(text: str, message: str, hint: str) -> None:
    """File, line, what was found and what was expected are named."""
    with pytest.raises(UsageError) as caught:
        parse_order(text, "order.txt")
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_reading_checks(tmp_path: Path) -> None:
    """An order that cannot run is refused by the name of its file."""
    path = tmp_path / "order.txt"
    path.write_text("name: mine\nrank 0: B0 F0\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"order\.txt': the ranks wait for each other: rank 0 at B0"):
        read_order(path)
    path.write_text(TEXT, encoding="utf-8")
    assert read_order(path).name == "mine"
    with pytest.raises(UsageError, match="the order of a pipeline cannot be read"):
        read_order(tmp_path / "none.txt")
