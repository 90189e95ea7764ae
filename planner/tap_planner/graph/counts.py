"""Sizes that depend on data (how many elements NonZero finds), traced to the symbolic dims that the file declares.

A file says of a result "k x 4" without saying that k is what NonZero found three nodes before. Binding with one and
with another count shows how each declared dim depends on it; where the user gave the dim, the count follows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol

import onnx

from tap_planner.errors import TapError, UsageError
from tap_planner.graph.dims import BoundInputs
from tap_planner.graph.drafts import Draft
from tap_planner.graph.expressions import evaluate_dim
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.values import CountUnknownError, Value

_COUNTING = frozenset(("Compress", "NonMaxSuppression", "NonZero", "Unique"))
Key = tuple[str, int]
"""Name of a value and one of its dims."""
_PLACEHOLDERS = (7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
"""Counts to bind with while they are not known; as many as there may be."""


class _HasValues(Protocol):
    @property
    def values(self) -> dict[str, Value]: ...


class ProbeResult(Protocol):
    """A pass with other sizes."""

    @property
    def binder(self) -> _HasValues:
        """What it bound."""
        ...

    @property
    def error(self) -> TapError | None:
        """Where it ended early."""
        ...


class Prober(Protocol):
    """Binds a model with other sizes."""

    model: ModelFile
    bound: BoundInputs
    counts: dict[Key, int]

    def probe(self, dims: Mapping[str, int], counts: Mapping[Key, int] | None = None) -> ProbeResult | None:
        """Bind with other sizes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dependence:
    """A declared dim that depends on counts: ``base`` at the placeholders, ``slopes`` more per count."""

    symbol: str
    base: int
    slopes: Mapping[Key, Fraction]


def solve_counts(prober: Prober, error: CountUnknownError) -> dict[Key, int]:
    """Sizes that follow from declared dims whose values were given.

    Args:
        prober: binds the model.
        error: the first size that was not known.

    Raises:
        CountUnknownError: a size follows from nothing; the hint says which options would do.
        UsageError: a given dim contradicts how the model computes it.
    """
    placeholders, base = _placeholders(prober, error)
    dependences = list(_dependences(prober, placeholders, base)) if base is not None else []
    solved: dict[Key, int] = {}
    progress = True
    while progress:
        progress = False
        for item in dependences:
            open_keys = [key for key in item.slopes if key not in solved]
            target = evaluate_dim(item.symbol, prober.bound.symbols)
            if len(open_keys) == 1 and target is not None:
                solved[open_keys[0]] = _solution(item, open_keys[0], solved, placeholders, target)
                progress = True
    if not solved:
        raise _unsolved(error, dependences)
    return solved


def _placeholders(prober: Prober, error: CountUnknownError) -> tuple[dict[Key, int], ProbeResult | None]:
    found: dict[Key, int] = {(error.name, error.dim): _PLACEHOLDERS[0]}
    for prime in _PLACEHOLDERS[1:]:
        result = prober.probe({}, {**prober.counts, **found})
        if result is None or not isinstance(result.error, CountUnknownError):
            return found, result
        found[(result.error.name, result.error.dim)] = prime
    return found, None


def _dependences(prober: Prober, placeholders: Mapping[Key, int], base: ProbeResult) -> Iterator[_Dependence]:
    changed: dict[Key, Mapping[str, Value]] = {}
    for key, count in placeholders.items():
        result = prober.probe({}, {**prober.counts, **placeholders, key: 2 * count})
        if result is not None:
            changed[key] = result.binder.values
    for name, dim, symbol in declared_dims(prober.model.proto.graph):
        size = _size(base.binder.values, name, dim)
        if size is None:
            continue
        slopes: dict[Key, Fraction] = {}
        for key, values in changed.items():
            other = _size(values, name, dim)
            if other is not None and other != size:
                slopes[key] = Fraction(other - size, placeholders[key])
        if slopes:
            yield _Dependence(symbol=symbol, base=size, slopes=slopes)


def declared_dims(graph: onnx.GraphProto) -> Iterator[tuple[str, int, str]]:
    """Values inside the model with symbolic dims: (name, dim, symbol)."""
    for value in (*graph.output, *graph.value_info):
        for dim, declared in enumerate(value.type.tensor_type.shape.dim):
            if declared.dim_param:
                yield value.name, dim, declared.dim_param


def _size(values: Mapping[str, Value], name: str, dim: int) -> int | None:
    value = values.get(name)
    return value.shape[dim] if value is not None and dim < value.rank else None


def _solution(
    item: _Dependence, key: Key, solved: Mapping[Key, int], placeholders: Mapping[Key, int], target: int
) -> int:
    rest = Fraction(target - item.base)
    for other, slope in item.slopes.items():
        if other in solved:
            rest -= slope * (solved[other] - placeholders[other])
    count = placeholders[key] + rest / item.slopes[key]
    if count.denominator != 1 or count < 0:
        raise UsageError(
            f"--dim {item.symbol}={target}: no number of elements of {key[0]!r} makes dim {item.symbol!r} that large",
            hint=f"say how many elements {key[0]!r} shall hold: --dim {key[0]}.{key[1]}=N",
        )
    return int(count)


def _unsolved(error: CountUnknownError, dependences: list[_Dependence]) -> CountUnknownError:
    """The error with the symbols that would decide the size."""
    key = (error.name, error.dim)
    symbols = [item.symbol for item in dependences if set(item.slopes) == {key} and item.symbol.isidentifier()]
    if symbols:
        error.hint = f"say how many it shall be planned for: --dim {symbols[0]}=N, or --dim {key[0]}.{key[1]}=N"
    return error


def assumed_counts(drafts: Sequence[Draft]) -> list[str]:
    """Warnings about operators that are planned for a number of elements that data decides."""
    texts: list[str] = []
    for draft in drafts:
        attributes = dict(draft.attributes)
        if draft.type in _COUNTING and "count" in attributes and "indices" not in attributes:
            label = f"node {draft.name or draft.id!r} ({draft.type})"
            texts.append(
                f"{label} is planned for exactly {attributes['count']} elements; "
                "data for which it selects another number is refused when the plan is applied"
            )
    return texts


def check_derived(graph: onnx.GraphProto, bound: BoundInputs, values: Mapping[str, Value]) -> None:
    """Compare sizes that were given for dims inside the model with what the model makes of its inputs.

    Raises:
        UsageError: they differ.
    """
    own = {dim.dim_param for value in graph.input for dim in value.type.tensor_type.shape.dim}
    given = {name: size for name, size in bound.symbols.items() if name not in own}
    if not given:
        return
    for name, dim, symbol in declared_dims(graph):
        size = _size(values, name, dim)
        if symbol in given and size is not None and size != given[symbol]:
            raise UsageError(
                f"--dim {symbol}={given[symbol]}: with the other dims, {name!r} has size {size} there",
                hint=f"leave --dim {symbol} out, it follows from the inputs",
            )
