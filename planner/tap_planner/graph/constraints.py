"""What does not fit, in words of the symbolic dims: "needs batch*heads to be divisible by 4"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.binding import Binder
from tap_planner.graph.dims import BoundInputs
from tap_planner.graph.nodes import Node
from tap_planner.graph.polynomials import Polynomial, fitted, product, without_common
from tap_planner.graph.values import Value
from tap_planner.graph.whole import WHOLE

_MAX_SYMBOLS = 6
"""Models with more symbolic dims are not probed."""
_BROADCASTING = frozenset(
    (
        *("Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater"),
        *("GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu", "Pow", "Sub"),
        *("Sum", "Where", "Xor"),
    )
)


class ProbeResult(Protocol):
    """A pass with other sizes."""

    @property
    def binder(self) -> Binder:
        """What it bound."""
        ...


class Prober(Protocol):
    """Binds a model with other sizes."""

    bound: BoundInputs

    def probe(self, dims: Mapping[str, int], *, stop: str = "") -> ProbeResult | None:
        """Bind up to a node with other sizes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Operand:
    """An operand in symbols."""

    dims: tuple[Polynomial, ...]
    data: tuple[Polynomial, ...] | None
    """Elements of a small integer constant (the target of a Reshape)."""

    def __str__(self) -> str:
        return f"[{', '.join(map(str, self.dims))}]"

    @property
    def symbols(self) -> set[str]:
        return {name for size in (*self.dims, *(self.data or ())) for name in size.symbols}


def explained(prober: Prober, error: UnsupportedGraphError, binder: Binder) -> UnsupportedGraphError:
    """The error with the symbolic dims that do not fit together, where it can be found out.

    Args:
        prober: binds the model with other sizes.
        error: why a node was refused.
        binder: what was bound before it.
    """
    node = binder.reached
    dims = {name: size for name, size in prober.bound.symbols.items() if size > 0}
    about_rules = "--custom-rule" in error.hint or "custom rule" in error.message
    settled = node is None or node.type in WHOLE or "--value" in error.hint or about_rules
    if node is None or settled or not dims or len(dims) > _MAX_SYMBOLS:
        return error
    changed = {name: [_operands(prober, node, {name: size * k}) for k in (2, 3)] for name, size in dims.items()}
    operands = [_fit(binder.values.get(name), index, dims, changed) for index, name in enumerate(node.inputs)]
    symbols = sorted({name for operand in operands if operand is not None for name in operand.symbols})
    if not symbols:
        return error
    words = _words(node, operands, dims)
    if words is None:
        where = ", ".join(f"{name}={dims[name]}" for name in symbols)
        listed = " and ".join(str(operand) for operand in operands if operand is not None and operand.dims)
        text = f"{error.message}; operands are {listed} for {where}"
    else:
        text = f"{node.where}: {words}"
        symbols = [name for name in symbols if f"{name}={dims[name]}" in words]
    options = " ".join(f"--dim {name}=N" for name in symbols)
    return UnsupportedGraphError(text, hint=f"choose other sizes: {options}")


def _operands(prober: Prober, node: Node, dims: Mapping[str, int]) -> list[Value | None]:
    result = prober.probe(dims, stop=node.origin)
    if result is None:
        return [None] * len(node.inputs)
    return [result.binder.values.get(name) for name in node.inputs]


def _fit(
    value: Value | None, index: int, dims: Mapping[str, int], changed: Mapping[str, list[list[Value | None]]]
) -> _Operand | None:
    if value is None:
        return None
    others = {name: [row[index] for row in rows] for name, rows in changed.items()}
    if any(other is None or other.rank != value.rank for rows in others.values() for other in rows):
        return None
    shapes = {name: [other.shape for other in rows if other is not None] for name, rows in others.items()}
    sizes = [
        fitted(size, dims, {name: (rows[0][dim], rows[1][dim]) for name, rows in shapes.items()})
        for dim, size in enumerate(value.shape)
    ]
    if None in sizes:
        return None
    return _Operand(dims=tuple(size for size in sizes if size is not None), data=_data(value, dims, others))


def _data(
    value: Value, dims: Mapping[str, int], others: Mapping[str, list[Value | None]]
) -> tuple[Polynomial, ...] | None:
    arrays = {name: [other.array for other in rows if other is not None] for name, rows in others.items()}
    if value.array is None or value.array.dtype.kind not in "iu" or value.array.size > 16:
        return None
    rows: dict[str, list[list[int]]] = {}
    for name, found in arrays.items():
        if any(array is None or array.size != value.array.size for array in found) or len(found) != 2:
            return None
        rows[name] = [array.reshape(-1).tolist() for array in found if array is not None]
    sizes = [
        fitted(int(size), dims, {name: (row[0][index], row[1][index]) for name, row in rows.items()})
        for index, size in enumerate(value.array.reshape(-1).tolist())
    ]
    return None if None in sizes else tuple(size for size in sizes if size is not None)


def _words(node: Node, operands: Sequence[_Operand | None], dims: Mapping[str, int]) -> str | None:
    given = [operand for operand in operands if operand is not None]
    if not given or len(given) < sum(1 for name in node.inputs if name):
        return None
    if node.type == "Reshape":
        return _reshape_words(node, given, dims)
    if node.type == "Concat":
        axis = node.attributes.get("axis", 1)
        at = axis % max(len(given[0].dims), 1) if isinstance(axis, int) else 0
        for operand in given[1:]:
            for dim, (left, right) in enumerate(zip(given[0].dims, operand.dims, strict=False)):
                if dim != at and left.value(dims) != right.value(dims):
                    return f"joins along dim {at}, and needs dim {dim} to agree: {_against(left, right, dims)}"
    if node.type in _BROADCASTING:
        return _broadcast_words(given, dims)
    if node.type == "MatMul" and len(given) == 2 and all(operand.dims for operand in given):
        inner = given[1].dims[max(len(given[1].dims) - 2, 0)]
        if given[0].dims[-1].value(dims) != inner.value(dims):
            return f"sums over {_against(given[0].dims[-1], inner, dims)}, which must agree"
        return _broadcast_words([_Operand(dims=item.dims[:-2], data=None) for item in given], dims)
    if node.type == "Split":
        return _split_words(node, given, dims)
    return None


def _against(left: Polynomial, right: Polynomial, dims: Mapping[str, int]) -> str:
    return f"{_valued(left, dims)} against {_valued(right, dims)}"


def _valued(size: Polynomial, dims: Mapping[str, int]) -> str:
    """``past + seq = 8 (past=5, seq=3)``."""
    if not size.symbols:
        return str(size)
    where = ", ".join(f"{name}={dims[name]}" for name in size.symbols)
    text = str(size)
    return where if text == size.symbols[0] else f"{text} = {size.value(dims)} ({where})"


def _needs(left: Polynomial, right: Polynomial, dims: Mapping[str, int], *, divisible: bool) -> str:
    left, right = without_common(left, right)
    if not left.symbols and right.symbols and not divisible:
        left, right = right, left
    where = ", ".join(f"{name}={dims[name]}" for name in sorted({*left.symbols, *right.symbols}))
    text = f"needs {left} to be {'divisible by ' if divisible else ''}{right}: {where}"
    if right.symbols:
        return f"{text} gives {left.value(dims)} and {right.value(dims)}"
    return text if str(left) in left.symbols else f"{text} gives {left.value(dims)}"


def _reshape_words(node: Node, given: Sequence[_Operand], dims: Mapping[str, int]) -> str | None:
    target = given[1].data if len(given) > 1 else None
    stated = node.attributes.get("shape")
    if len(given) == 1 and isinstance(stated, tuple):
        target = tuple(Polynomial.constant(int(size)) for size in stated)
    if target is None:
        return None
    zero, infer = Polynomial.constant(0), Polynomial.constant(-1)
    copied = node.attributes.get("allowzero", 0) != 1
    source = given[0].dims
    sizes: list[Polynomial] = []
    for dim, size in enumerate(target):
        if size.terms == infer.terms:
            continue
        if size.terms == zero.terms and copied and dim < len(source):
            size = source[dim]
        sizes.append(size)
    count, rest = product(source), product(sizes)
    divisible = len(sizes) < len(target)
    if not rest.terms or (divisible and count.value(dims) % rest.value(dims) == 0):
        return None
    return _needs(count, rest, dims, divisible=divisible)


def _broadcast_words(given: Sequence[_Operand], dims: Mapping[str, int]) -> str | None:
    rank = max(len(operand.dims) for operand in given)
    for offset in range(1, rank + 1):
        sizes = [operand.dims[-offset] for operand in given if offset <= len(operand.dims)]
        wide = [size for size in sizes if size.value(dims) != 1]
        for other in wide[1:]:
            if other.value(dims) != wide[0].value(dims):
                return f"needs dim {rank - offset} to agree: {_against(wide[0], other, dims)}"
    return None


def _split_words(node: Node, given: Sequence[_Operand], dims: Mapping[str, int]) -> str | None:
    axis, stated = node.attributes.get("axis", 0), node.attributes.get("split")
    data = given[1].data if len(given) > 1 else None
    if isinstance(stated, tuple):
        data = tuple(Polynomial.constant(int(size)) for size in stated)
    if not isinstance(axis, int) or not given[0].dims:
        return None
    size = given[0].dims[axis % len(given[0].dims)]
    if data is None:
        return None
    total = Polynomial.constant(0)
    for part in data:
        total = total + part
    if total.value(dims) == size.value(dims):
        return None
    return f"splits dim {axis % len(given[0].dims)} into parts, and {_needs(size, total, dims, divisible=False)}"
