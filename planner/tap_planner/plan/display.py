"""What the parts of a block are called when all its occurrences are shown as one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tap_planner.plan.document import BlockEntry, BlockKey, FoldedDecisions
from tap_planner.plan.names import encode_series, find_pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockDisplay:
    """A variant of a block, over all its occurrences."""

    count: int
    names: Mapping[str, str]
    """For every name of the block a pattern with ``{i}`` (and ``{j}``, ``{k}``); the name itself where the occurrences
    follow no pattern."""
    values: str
    """The values of i, where all operators share them; else empty."""
    recompute: tuple[str, ...]
    """Settings that occur."""


def display_blocks(folded: FoldedDecisions) -> Mapping[BlockKey, BlockDisplay]:
    """How to show each variant of each block, in document order."""
    families: dict[BlockKey, dict[str, list[str]]] = {block.key: {} for block in folded.blocks}
    counts: dict[BlockKey, int] = {block.key: 0 for block in folded.blocks}
    recompute: dict[BlockKey, list[str]] = {block.key: [] for block in folded.blocks}
    for repeat in folded.repeats:
        counts[repeat.key] += repeat.count
        if repeat.recompute not in recompute[repeat.key]:
            recompute[repeat.key].append(repeat.recompute)
        for name, names in repeat.names.items():
            families[repeat.key].setdefault(name, []).extend(names)
    return {
        block.key: _display(block, counts[block.key], families[block.key], tuple(recompute[block.key]))
        for block in folded.blocks
        if counts[block.key]
    }


def _display(
    block: BlockEntry, count: int, family: Mapping[str, list[str]], recompute: tuple[str, ...]
) -> BlockDisplay:
    ids = {operator.id for operator in block.operators}
    names: dict[str, str] = {}
    series: set[str] = set()
    for name, occurrences in family.items():
        found = find_pattern(occurrences) if count > 1 else None
        names[name] = name if found is None else found[0]
        if found is not None and name in ids:
            series.add(encode_series(found[1][0]))
    return BlockDisplay(count=count, names=names, values=series.pop() if len(series) == 1 else "", recompute=recompute)
