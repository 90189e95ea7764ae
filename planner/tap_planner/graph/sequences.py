"""Sequences and optionals, which exist only while a graph is bound: as the list of their items' names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from onnx import numpy_helper

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.nodes import Node
from tap_planner.graph.unfolding import MAX_NODES, Unfolding, Work, integer_of


def _position(walk: Unfolding, node: Node, index: int, count: int, *, default: int, end: bool = False) -> int:
    """A constant position in a sequence; ``end``: the place behind the last item counts as well."""
    if index >= len(node.inputs) or not node.inputs[index]:
        return default
    found = walk.constant(node.inputs[index])
    if found is None:
        raise UnsupportedGraphError(
            f"{node.where}: position {node.inputs[index]!r} in a sequence depends on the data",
            hint="fix it with --value if it is an input, or export without sequences",
        )
    position = int(found[0])
    limit = count + 1 if end else count
    if not -count <= position < limit:
        raise UnsupportedGraphError(f"{node.where}: position {position} in a sequence of {count} items")
    return position + count if position < 0 else position


def _empty(walk: Unfolding, node: Node) -> list[Work]:
    walk.define(node.outputs[0], ())
    return []


def _construct(walk: Unfolding, node: Node) -> list[Work]:
    walk.define(node.outputs[0], node.inputs)
    return []


def _insert(walk: Unfolding, node: Node) -> list[Work]:
    items = walk.items(node, node.inputs[0])
    at = _position(walk, node, 2, len(items), default=len(items), end=True)
    walk.define(node.outputs[0], (*items[:at], node.inputs[1], *items[at:]))
    return []


def _erase(walk: Unfolding, node: Node) -> list[Work]:
    items = walk.items(node, node.inputs[0])
    at = _position(walk, node, 1, len(items), default=len(items) - 1)
    walk.define(node.outputs[0], (*items[:at], *items[at + 1 :]))
    return []


def _at(walk: Unfolding, node: Node) -> Sequence[Work]:
    items = walk.items(node, node.inputs[0])
    position = _position(walk, node, 1, len(items), default=0)
    return walk.identities(node, [items[position]], node.outputs) if items else []


def _length(walk: Unfolding, node: Node) -> list[Work]:
    count = len(walk.items(node, node.inputs[0]))
    tensor = numpy_helper.from_array(np.array(count, np.int64), node.outputs[0])
    return [walk.node(node, "Constant", [], node.outputs, value=tensor)]


def _joined(walk: Unfolding, node: Node) -> list[Work]:
    items = walk.items(node, node.inputs[0])
    if not items:
        raise UnsupportedGraphError(f"{node.where}: joins a sequence without items")
    axis = integer_of(node, "axis")
    if node.attributes.get("new_axis", 0):
        return list(walk.stacked(node, items, axis, node.outputs[0]))
    return [walk.node(node, "Concat", items, node.outputs, axis=axis)]


def _split(walk: Unfolding, node: Node) -> list[Work]:
    source = walk.values.get(node.inputs[0])
    if source is None:
        raise UnsupportedGraphError(f"{node.where}: reads {node.inputs[0]!r}, which has no value")
    axis = integer_of(node, "axis", 0)
    if not -source.rank <= axis < source.rank:
        raise UnsupportedGraphError(f"{node.where}: dim {axis} is outside a tensor of {source.rank} dims")
    size = source.shape[axis]
    sizes, given = _split_sizes(walk, node, size)
    names = [walk.fresh(f"{node.outputs[0]}__{index}") for index in range(len(sizes))]
    nodes = _splitting(walk, node, axis, sizes, names)
    if not given and node.attributes.get("keepdims", 1) == 0:
        rows = [walk.fresh(f"{name}_squeezed") for name in names]
        for name, row in zip(names, rows, strict=True):
            nodes.extend(walk.axes(node, "Squeeze", name, axis, row))
        names = rows
    walk.define(node.outputs[0], names)
    return list(nodes)


def _split_sizes(walk: Unfolding, node: Node, size: int) -> tuple[tuple[int, ...], bool]:
    """Sizes of the parts, and whether the file states them."""
    if len(node.inputs) < 2 or not node.inputs[1]:
        parts, given = (1,) * _checked_count(node, size), False
    else:
        stated = walk.constant(node.inputs[1])
        if stated is None:
            raise UnsupportedGraphError(
                f"{node.where}: its sizes {node.inputs[1]!r} depend on the data",
                hint="fix them with --value if they are an input, or export with static sizes",
            )
        parts, given = tuple(int(item) for item in stated), True
        if walk.values[node.inputs[1]].rank == 0:
            if parts[0] < 1:
                raise UnsupportedGraphError(f"{node.where}: parts of {parts[0]} elements")
            _checked_count(node, size // parts[0])
            parts = tuple(min(parts[0], size - start) for start in range(0, size, parts[0]))
    _checked_count(node, len(parts))
    return parts, given


def _checked_count(node: Node, count: int) -> int:
    if count > MAX_NODES:
        raise UnsupportedGraphError(f"{node.where}: a sequence of {count} items, too many to unfold")
    return count


def _splitting(walk: Unfolding, node: Node, axis: int, sizes: Sequence[int], names: Sequence[str]) -> list[Node]:
    source = node.inputs[0]
    if len(sizes) == 1:
        return walk.identities(node, [source], names)
    if not sizes:
        return []
    if walk.opset < 13:
        return [walk.node(node, "Split", [source], names, axis=axis, split=list(sizes))]
    constant, name = walk.integers(node, sizes, f"{names[0]}__sizes")
    return [constant, walk.node(node, "Split", [source, name], names, axis=axis)]


def _identity(walk: Unfolding, node: Node) -> list[Work] | None:
    if node.inputs[0] in walk.sequences:
        walk.define(node.outputs[0], walk.sequences[node.inputs[0]])
        return []
    if node.inputs[0] in walk.absent:
        walk.absent.add(node.outputs[0])
        return []
    return None


def _optional(walk: Unfolding, node: Node) -> list[Work]:
    if not node.inputs or not node.inputs[0]:
        walk.absent.add(node.outputs[0])
        return []
    return [walk.node(node, "Identity", node.inputs[:1], node.outputs)]


def _get_element(walk: Unfolding, node: Node) -> list[Work]:
    if node.inputs[0] in walk.absent:
        raise UnsupportedGraphError(f"{node.where}: reads {node.inputs[0]!r}, an optional that holds nothing")
    return [walk.node(node, "Identity", node.inputs[:1], node.outputs)]


def _has_element(walk: Unfolding, node: Node) -> list[Work]:
    given = bool(node.inputs) and bool(node.inputs[0]) and node.inputs[0] not in walk.absent
    tensor = numpy_helper.from_array(np.array(given), node.outputs[0])
    return [walk.node(node, "Constant", [], node.outputs, value=tensor)]


METHODS: dict[str, Callable[[Unfolding, Node], Sequence[Work] | None]] = {
    "ConcatFromSequence": _joined,
    "Identity": _identity,
    "Optional": _optional,
    "OptionalGetElement": _get_element,
    "OptionalHasElement": _has_element,
    "SequenceAt": _at,
    "SequenceConstruct": _construct,
    "SequenceEmpty": _empty,
    "SequenceErase": _erase,
    "SequenceInsert": _insert,
    "SequenceLength": _length,
    "SplitToSequence": _split,
}
"""What takes the place of a node; None where it is no sequence after all."""
