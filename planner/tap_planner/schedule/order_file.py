"""An order of the user's own, as a small text.

One line per rank, in order, holds its slots, first to last::

    # Two ranks, three microbatches.
    name: mine
    rank 0: F0 F1 B0 F2 B1 B2
    rank 1: F0 I0 F1 I1 W0 F2 I2 W1 W2

A slot is a letter (F forward, B whole backward, I backward of inputs, W backward of parameters), a microbatch from 0
and, where ranks hold several chunks of the model, a point and the chunk: ``F3.1``. ``chunks: vee`` says that two chunks
go down the ranks and up again, ``chunks: 0 1 1 0`` on which rank each chunk of the model lies, as many as there are
numbers; otherwise they are interleaved. ``reads: - 0 0 1,2`` says of each chunk which earlier ones make what it reads
(``-``: none); otherwise each reads what the one before it makes. ``name:``, ``chunks:`` and ``reads:`` come before the
ranks and may be left out; what follows a ``#`` is a comment. How many microbatches and chunks there are the largest
numbers say.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from tap_planner.errors import UsageError
from tap_planner.files import read_text
from tap_planner.schedule.checking import check
from tap_planner.schedule.pipeline import ChunkOrder, PipelineSchedule, Slot, Work
from tap_planner.yaml_entries import near_miss

_RANK = re.compile(r"rank +(0|[1-9][0-9]{0,5}) *:(.*)")
_ENTRY = re.compile(r"([a-z]+) *:(.*)")
_SLOT = re.compile(r"([FBIW])(0|[1-9][0-9]{0,5})(?:\.(0|[1-9][0-9]{0,2}))?")
_PLACES = re.compile(r"(?:0|[1-9][0-9]{0,5})(?: +(?:0|[1-9][0-9]{0,5}))*")
_READS = re.compile(r"(?:-|[0-9]{1,6}(?:,[0-9]{1,6})*)(?: +(?:-|[0-9]{1,6}(?:,[0-9]{1,6})*))*")
_KEYS = ("name", "chunks", "reads")
_HINT = "Each rank has a line such as 'rank 0: F0 F1 B0 B1'."


def read_order(path: Path | str) -> PipelineSchedule:
    """Read an order from a file and check it.

    Raises:
        UsageError: for a file that cannot be read, a line that cannot be understood, or an order that cannot run.
    """
    schedule = parse_order(read_text(path, "the order of a pipeline", UsageError, _HINT), str(path))
    check(replace(schedule, name=str(path)))
    return schedule


def to_text(schedule: PipelineSchedule) -> str:
    """A schedule in the text form; ``parse_order`` gives it back."""
    lines = [f"name: {schedule.name}"]
    if schedule.places:
        lines.append(f"chunks: {' '.join(map(str, schedule.places))}")
    elif schedule.chunk_order is not ChunkOrder.INTERLEAVED:
        lines.append(f"chunks: {schedule.chunk_order.value}")
    if schedule.reads:
        lines.append(f"reads: {' '.join(','.join(map(str, sources)) or '-' for sources in schedule.reads)}")
    for rank, order in enumerate(schedule.orders):
        lines.append(f"rank {rank}: {' '.join(map(schedule.slot_text, order))}")
    return "\n".join(lines) + "\n"


def parse_order(text: str, file: str) -> PipelineSchedule:
    """Parse the text form; ``check`` says whether the order can run.

    Args:
        text: the file's text.
        file: how errors call it; also the schedule's name where the text gives none.

    Raises:
        UsageError: names file, line, what was found and what was expected.
    """
    entries: dict[str, str] = {}
    orders: list[tuple[Slot, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        line = line.partition("#")[0].strip()
        if not line:
            continue
        place = f"{file}:{number}"
        rank = _RANK.fullmatch(line)
        if rank is None:
            key, value = _entry(line, place, known=() if orders else _KEYS)
            if key in entries:
                _fail(place, f"{key!r} occurs twice", "expected it once", "Take one of the two lines out.")
            entries[key] = value
        elif int(rank[1]) != len(orders):
            _fail(place, f"rank {rank[1]}", f"expected rank {len(orders)}", "Write the ranks in order, each once.")
        else:
            orders.append(_slots(rank[2], place))
    if not orders:
        raise UsageError(f"{file}: no rank, expected a line for each rank", hint=_HINT)
    slots = [slot for order in orders for slot in order]
    chunks = entries.get("chunks", ChunkOrder.INTERLEAVED.value)
    places = tuple(map(int, chunks.split())) if _PLACES.fullmatch(chunks) else ()
    return PipelineSchedule(
        name=entries.get("name", file),
        num_stages=len(orders),
        num_microbatches=1 + max(slot.microbatch for slot in slots),
        num_chunks=max(map(places.count, places)) if places else 1 + max(slot.chunk for slot in slots),
        chunk_order=ChunkOrder.INTERLEAVED if places else ChunkOrder(chunks),
        places=places,
        reads=_sources(entries["reads"]) if "reads" in entries else (),
        orders=tuple(orders),
    )


def _fail(place: str, found: str, expected: str, hint: str) -> NoReturn:
    raise UsageError(f"{place}: {found}, {expected}", hint=hint)


def _entry(line: str, place: str, known: tuple[str, ...]) -> tuple[str, str]:
    """A line that is no rank, as key and value."""
    found = _ENTRY.fullmatch(line)
    key, value = (found[1], found[2].strip()) if found else ("", "")
    if key not in known:
        choices = "'rank NUMBER: SLOTS'" + "".join(f" or '{name}: ...'" for name in known)
        _fail(place, repr(line), f"expected {choices}{near_miss(key, known) if key else ''}", _HINT)
    if not value:
        _fail(place, f"nothing after {key!r}", "expected a value", "Give one, or take the line out.")
    if key == "reads" and not _READS.fullmatch(value):
        _fail(place, repr(value), "expected the chunks that each chunk reads, as - 0 0 1,2", "Correct it.")
    orders = [order.value for order in ChunkOrder]
    if key == "chunks" and value not in orders and not _PLACES.fullmatch(value):
        expected = f"expected {', '.join(orders)} or the rank of each chunk, as 0 1 1 0{near_miss(value, orders)}"
        _fail(place, repr(value), expected, "Correct it.")
    return key, value


def _sources(text: str) -> tuple[tuple[int, ...], ...]:
    """What chunks read."""
    return tuple(() if word == "-" else tuple(map(int, word.split(","))) for word in text.split())


def _slots(text: str, place: str) -> tuple[Slot, ...]:
    """The slots of one rank."""
    slots: dict[Slot, None] = {}
    for word in text.split():
        found = _SLOT.fullmatch(word)
        if found is None:
            _fail(
                place,
                repr(word),
                "expected F, B, I or W with a microbatch and maybe a chunk, such as F3 or F3.1",
                f"Write {word.upper()}." if _SLOT.fullmatch(word.upper()) else _HINT,
            )
        slot = Slot(Work(found[1]), int(found[2]), int(found[3] or 0))
        if slot in slots:
            _fail(place, f"{word!r} occurs twice", "expected it once", "Take one of the two out.")
        slots[slot] = None
    if not slots:
        _fail(place, "no slot", "expected at least one", _HINT)
    return tuple(slots)
