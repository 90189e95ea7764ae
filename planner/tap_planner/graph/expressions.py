"""Sizes written as sums and products of symbolic dims, as exporters name derived dims: ``past + seq``, ``s0//2``."""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping

_NAME = re.compile(r"[A-Za-z_][\w.]*")
_FUNCTIONS: dict[str, Callable[..., int]] = {"Max": max, "Min": min, "max": max, "min": min}
_OPERATORS: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.floordiv,
    ast.Mod: operator.mod,
}
_MAX_LENGTH = 200
_MAX_SIZE = 1 << 62


def dim_names(text: str) -> tuple[str, ...]:
    """Symbols that a derived dim is made of; nothing for a plain symbol (``batch-size`` is one)."""
    if not re.search(r"[+*/(]", text) or _parse(text) is None:
        return ()
    return tuple(dict.fromkeys(name for name in _NAME.findall(text) if name not in _FUNCTIONS))


def evaluate_dim(text: str, given: Mapping[str, int]) -> int | None:
    """The size of a dim, None if it is not known.

    Args:
        text: a symbol, or an expression of symbols and numbers.
        given: sizes of symbols.
    """
    if text in given or not re.search(r"[-+*/(]", text):
        return given.get(text)
    tree = _parse(text)
    try:
        size = None if tree is None else _evaluate(tree, given)
    except (ArithmeticError, LookupError, TypeError, ValueError):
        return None
    return size if size is not None and 0 <= size <= _MAX_SIZE else None


def _parse(text: str) -> ast.expr | None:
    if len(text) > _MAX_LENGTH:
        return None
    try:
        return ast.parse(_NAME.sub(lambda match: match[0].replace(".", "__dot__"), text.strip()), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _evaluate(tree: ast.expr, given: Mapping[str, int]) -> int:
    """Depth is bounded by the length of the text."""
    match tree:
        case ast.Constant(value=int() as number):
            return number
        case ast.Name(id=name):
            return given[name.replace("__dot__", ".")]
        case ast.BinOp(left=left, op=kind, right=right) if type(kind) in _OPERATORS:
            return _OPERATORS[type(kind)](_evaluate(left, given), _evaluate(right, given))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            return _FUNCTIONS[name](*(_evaluate(item, given) for item in arguments))
        case _:
            raise ValueError(ast.dump(tree))
