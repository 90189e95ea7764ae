"""Values for symbolic dims: from the command line, with near misses named."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx

from tap_planner.errors import UnboundDimError, UnsupportedGraphError, UsageError
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.options import BindOptions
from tap_planner.operators import TensorType

_SUM = re.compile(r"^[\w.\- ]+(\+[\w.\- ]+)+$")
_Dim = int | str


@dataclass(frozen=True, slots=True, kw_only=True)
class BoundInputs:
    """Static types of the graph inputs."""

    types: Mapping[str, TensorType]
    batch: int
    batch_dims: Mapping[str, int | None]
    dims: Mapping[str, int]
    """Symbolic dims with their values."""
    rebatch: int | None
    """The batch that replaces a fixed leading 1, else None."""


def bind_inputs(inputs: Sequence[onnx.ValueInfoProto], options: BindOptions) -> BoundInputs:
    """Give every dim of every graph input a size.

    Args:
        inputs: the graph inputs without initializers.
        options: the user's values.

    Raises:
        UnboundDimError: some dims have no value.
        UsageError: a name that the model does not have, or a value that does not fit.
    """
    declared = {value.name: _declared(value, options) for value in inputs}
    batch_name = _batch_name(declared, options)
    given = dict(options.dims)
    fixed = None
    if options.batch is not None:
        _at_least(1, "--batch", options.batch)
        if batch_name is None:
            fixed = _fixed_batch(declared)
        elif given.get(batch_name, options.batch) != options.batch:
            raise UsageError(f"--batch {options.batch} and --dim {batch_name}={given[batch_name]} differ")
        else:
            given[batch_name] = options.batch
    _check_names(declared, given)
    shapes = _sizes(declared, given)
    rebatch = _rebatch(options, fixed, shapes)
    batch_dims = _batch_dims(declared, shapes, batch_name, fixed)
    if rebatch:
        for name, dim in batch_dims.items():
            if dim is not None:
                shapes[name] = (rebatch, *shapes[name][1:])
    return BoundInputs(
        types={
            value.name: TensorType(dtype=dtype_name(value.type.tensor_type.elem_type), shape=shapes[value.name])
            for value in inputs
        },
        batch=_batch_size(shapes, batch_dims),
        batch_dims=batch_dims,
        dims={name: given[name] for name in sorted(_symbols(declared)) if name in given},
        rebatch=rebatch,
    )


def _at_least(least: int, what: str, size: int) -> None:
    if size < least:
        raise UsageError(f"{what}: got {size}, expected a whole number of at least {least}")


def _declared(value: onnx.ValueInfoProto, options: BindOptions) -> tuple[_Dim, ...]:
    """Dims of an input: a size, a symbol, or ``name.index`` where it has no name."""
    if not value.type.HasField("tensor_type"):
        kind = value.type.WhichOneof("value") or "untyped"
        raise UnsupportedGraphError(f"graph input {value.name!r} is a {kind.removesuffix('_type')}, expected a tensor")
    if value.name in options.shapes:
        return tuple(options.shapes[value.name])
    tensor = value.type.tensor_type
    if not tensor.HasField("shape"):
        raise UnboundDimError(
            f"graph input {value.name!r} has no rank", hint=f"give its shape: --shape {value.name}=4,8"
        )
    dims: list[_Dim] = []
    for index, dim in enumerate(tensor.shape.dim):
        key = f"{value.name}.{index}"
        if dim.HasField("dim_value") and dim.dim_value > 0:
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param if dim.dim_param and dim.dim_param != "?" and key not in options.dims else key)
    return tuple(dims)


def _symbols(declared: Mapping[str, Sequence[_Dim]]) -> set[str]:
    return {dim for dims in declared.values() for dim in dims if isinstance(dim, str)}


def _batch_name(declared: Mapping[str, Sequence[_Dim]], options: BindOptions) -> str | None:
    symbols = _symbols(declared)
    if options.batch_dim is not None:
        if options.batch_dim not in symbols:
            raise UsageError(
                f"--batch-dim {options.batch_dim}: the model has no such symbolic dim",
                hint=_suggest(options.batch_dim, symbols),
            )
        return options.batch_dim
    if "batch" in symbols:
        return "batch"
    for dims in declared.values():
        if dims and isinstance(dims[0], str):
            return dims[0]
        if dims:
            return None
    return None


def _fixed_batch(declared: Mapping[str, Sequence[_Dim]]) -> int | None:
    for dims in declared.values():
        if dims and isinstance(dims[0], int):
            return dims[0]
    return None


def _rebatch(options: BindOptions, fixed: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    if options.batch is None or options.batch == fixed:
        return None
    if fixed == 1:
        return options.batch
    if fixed is None and any(shapes.values()):
        return None
    raise UsageError(
        f"--batch {options.batch}: the model has a fixed batch of {fixed if fixed is not None else 'none'}",
        hint="export it with a dynamic batch: torch.onnx.export(..., dynamic_shapes={'input': {0: 'batch'}})",
    )


def _batch_dims(
    declared: Mapping[str, Sequence[_Dim]],
    shapes: Mapping[str, tuple[int, ...]],
    batch_name: str | None,
    fixed: int | None,
) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    lead = fixed
    for name, dims in declared.items():
        if batch_name is not None:
            found[name] = dims.index(batch_name) if batch_name in dims else None
            continue
        if lead is None and shapes[name]:
            lead = shapes[name][0]
        found[name] = 0 if shapes[name] and shapes[name][0] == lead else None
    return found


def _batch_size(shapes: Mapping[str, tuple[int, ...]], batch_dims: Mapping[str, int | None]) -> int:
    for name, dim in batch_dims.items():
        if dim is not None:
            return shapes[name][dim]
    return 1


def _suggest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, sorted(known), n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    listed = ", ".join(sorted(known))
    return f"the model's symbolic dims are: {listed}" if listed else "the model has no symbolic dims"


def _check_names(declared: Mapping[str, Sequence[_Dim]], given: Mapping[str, int]) -> None:
    known = _symbols(declared)
    parts = {part.strip() for name in known if _SUM.match(name) for part in name.split("+")}
    for name, size in given.items():
        _at_least(0, f"--dim {name}", size)
        if name not in known and name not in parts:
            raise UsageError(f"--dim {name}={size}: the model has no dim {name!r}", hint=_suggest(name, known))


def _sizes(declared: Mapping[str, Sequence[_Dim]], given: dict[str, int]) -> dict[str, tuple[int, ...]]:
    missing: list[str] = []
    shapes: dict[str, tuple[int, ...]] = {}
    for name, dims in declared.items():
        sizes: list[int] = []
        for dim in dims:
            size = dim if isinstance(dim, int) else _value(dim, given)
            if size is None:
                missing.append(str(dim))
            sizes.append(size or 0)
        shapes[name] = tuple(sizes)
    if missing:
        listed = list(dict.fromkeys(missing))
        raise UnboundDimError(
            f"symbolic dims without a value: {', '.join(listed)}",
            hint="bind them: " + " ".join(f"--dim {name}=N" for name in listed),
        )
    return shapes


def _value(symbol: str, given: dict[str, int]) -> int | None:
    """A symbol's size; a sum of symbols and numbers is computed."""
    if symbol in given or not _SUM.match(symbol):
        return given.get(symbol)
    total = 0
    for part in symbol.split("+"):
        text = part.strip()
        size = int(text) if text.isdigit() else given.get(text)
        if size is None:
            return None
        total += size
    return total
