"""Values for symbolic dims: from the command line, with near misses named."""

from __future__ import annotations

import difflib
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import onnx

from tap_planner.errors import UnboundDimError, UnsupportedGraphError, UsageError
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.expressions import dim_names, evaluate_dim
from tap_planner.graph.options import BindOptions
from tap_planner.operators import TensorType

_Dim = int | str
_Declared = Mapping[str, Sequence[_Dim] | None]
"""Dims of each input, None without rank."""


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
    is_batch_fixed: bool
    """Whether the model has no other batch than this one."""
    symbols: Mapping[str, int]
    """All sizes that were given, those of derived dims and of values inside the model too."""
    notes: tuple[str, ...] = ()
    """What the user should know of the inputs."""


def bind_inputs(
    inputs: Sequence[onnx.ValueInfoProto], options: BindOptions, graph: onnx.GraphProto | None = None
) -> BoundInputs:
    """Give every dim of every graph input a size.

    Args:
        inputs: the graph inputs without initializers.
        options: the user's values.
        graph: whose other values may have dims of their own.

    Raises:
        UnboundDimError: some dims have no value.
        UsageError: a name that the model does not have, or a value that does not fit.
    """
    _check_shapes(options.shapes, inputs)
    notes: list[str] = []
    first = inputs[0].name if inputs and options.batch is not None else ""
    declared = {value.name: _declared(value, options, notes, leads=value.name == first) for value in inputs}
    batch_name = _batch_name(declared, options)
    given = {**_sizes_of_shapes(inputs, options), **options.dims}
    fixed = None
    if options.batch is not None:
        _at_least(1, "--batch", options.batch)
        if batch_name is None:
            fixed = _fixed_batch(declared)
        elif given.get(batch_name, options.batch) != options.batch:
            raise UsageError(f"--batch {options.batch} and --dim {batch_name}={given[batch_name]} differ")
        else:
            given[batch_name] = options.batch
    _check_names(declared, given, _Inner(graph))
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
        dims={name: given[name] for name in sorted(given)},
        rebatch=rebatch,
        is_batch_fixed=batch_name is None and _is_fixed(_fixed_batch(declared), shapes),
        symbols=given,
        notes=tuple(notes),
    )


def _at_least(least: int, what: str, size: int) -> None:
    if size < least:
        raise UsageError(f"{what}: got {size}, expected a whole number of at least {least}")


def _declared(
    value: onnx.ValueInfoProto, options: BindOptions, notes: list[str], *, leads: bool
) -> tuple[_Dim, ...] | None:
    """Dims of an input: a size, a symbol, or ``name.index`` where it has no name; None without rank.

    Args:
        value: the input.
        options: the user's values.
        notes: where remarks are added.
        leads: whether its first dim takes the batch that the user gave.
    """
    if not value.type.HasField("tensor_type"):
        raise UnsupportedGraphError(
            f"graph input {value.name!r} is {_kind(value.type)}, expected a tensor",
            hint="export the model with one input per tensor",
        )
    tensor = value.type.tensor_type
    shape = options.shapes.get(value.name)
    if not tensor.HasField("shape"):
        return None if shape is None else tuple(shape)
    dims: list[_Dim] = []
    for index, dim in enumerate(tensor.shape.dim):
        key = f"{value.name}.{index}"
        known = dim.HasField("dim_value") and dim.dim_value >= 0
        if known and dim.dim_value == 0 and (key in options.dims or (leads and index == 0)):
            known = False
        if known:
            if dim.dim_value == 0:
                notes.append(
                    f"input {value.name!r} has size 0 along dim {index}; if the file means that the size is not known, "
                    f"bind it: --dim {key}=N"
                )
            dims.append(dim.dim_value)
        else:
            dims.append(dim.dim_param if dim.dim_param and dim.dim_param != "?" and key not in options.dims else key)
    return tuple(dims)


def _kind(type_: onnx.TypeProto) -> str:
    """A type in words: ``an optional sequence of float32 tensors``."""
    outer: list[str] = []
    while (kind := type_.WhichOneof("value")) in ("sequence_type", "optional_type"):
        outer.append("sequence of" if kind == "sequence_type" else "optional")
        type_ = type_.sequence_type.elem_type if kind == "sequence_type" else type_.optional_type.elem_type
    if kind in ("tensor_type", "sparse_tensor_type"):
        sparse = "sparse " if kind == "sparse_tensor_type" else ""
        dtype = dtype_name(type_.sparse_tensor_type.elem_type if sparse else type_.tensor_type.elem_type)
        inner = f"{sparse}{dtype} tensor"
    else:
        inner = "map" if kind == "map_type" else "value without a type"
    words = " ".join([*outer, inner + ("s" if outer[-1:] == ["sequence of"] else "")])
    return f"an {words}" if words.startswith("optional") else f"a {words}"


def _check_shapes(shapes: Mapping[str, Sequence[int]], inputs: Sequence[onnx.ValueInfoProto]) -> None:
    """Every ``--shape`` must belong to an input and agree with what the file says of it."""
    known = {value.name: value.type.tensor_type for value in inputs}
    for name, shape in shapes.items():
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise UsageError(f"--shape {name}: the model has no such input", hint=f"inputs: {', '.join(near)}")
        if not known[name].HasField("shape"):
            continue
        dims = known[name].shape.dim
        if len(dims) != len(shape):
            raise UsageError(
                f"--shape {name}={','.join(map(str, shape))}: {len(shape)} sizes, the input has {len(dims)} dims"
            )
        for index, (size, dim) in enumerate(zip(shape, dims, strict=True)):
            if dim.dim_value > 0 and dim.dim_value != size:
                raise UsageError(f"--shape {name}: size {size} for dim {index}, which is {dim.dim_value} in the file")


def _sizes_of_shapes(inputs: Sequence[onnx.ValueInfoProto], options: BindOptions) -> dict[str, int]:
    """Values that ``--shape`` gives to the symbolic dims of inputs that have a rank.

    Raises:
        UsageError: one symbol would have two values.
    """
    given: dict[str, int] = {}
    for value in inputs:
        if value.name not in options.shapes or not value.type.tensor_type.HasField("shape"):
            continue
        dims = _declared(value, options, [], leads=False) or ()
        for size, dim in zip(options.shapes[value.name], dims, strict=True):
            if not isinstance(dim, str):
                continue
            known = options.dims.get(dim, given.get(dim, size))
            if known != size:
                raise UsageError(f"--shape {value.name} gives {dim!r} the size {size}, but it is {known} elsewhere")
            given[dim] = size
    return given


def _symbols(declared: _Declared) -> set[str]:
    return {dim for dims in declared.values() for dim in dims or () if isinstance(dim, str)}


def _batch_name(declared: _Declared, options: BindOptions) -> str | None:
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


def _fixed_batch(declared: _Declared) -> int | None:
    for dims in declared.values():
        if dims and isinstance(dims[0], int):
            return dims[0]
    return None


def _rebatch(options: BindOptions, fixed: int | None, shapes: Mapping[str, tuple[int, ...]]) -> int | None:
    if options.batch is None or options.batch == fixed:
        return None
    if _is_fixed(fixed, shapes):
        raise UsageError(
            f"--batch {options.batch}: the model has a fixed batch of {fixed if fixed is not None else 'none'}",
            hint="export it with a dynamic batch: torch.onnx.export(..., dynamic_shapes={'input': {0: 'batch'}})",
        )
    return options.batch if fixed == 1 else None


def _is_fixed(fixed: int | None, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    """Whether there is no other batch than that of the file; a leading 1 may stand for any (``rebatch``)."""
    return not any(shapes.values()) if fixed is None else fixed != 1


def _batch_dims(
    declared: _Declared,
    shapes: Mapping[str, tuple[int, ...]],
    batch_name: str | None,
    fixed: int | None,
) -> dict[str, int | None]:
    found: dict[str, int | None] = {}
    lead = fixed
    for name, dims in declared.items():
        if batch_name is not None:
            found[name] = list(dims or ()).index(batch_name) if batch_name in (dims or ()) else None
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


class _Inner:
    """Dims of values inside the model, looked at only where a name is none of the inputs'.

    Args:
        graph: None where there is nothing but inputs.
    """

    def __init__(self, graph: onnx.GraphProto | None) -> None:
        self._graph = graph

    @cached_property
    def symbols(self) -> set[str]:
        """Symbols of results and declared values."""
        values = () if self._graph is None else (*self._graph.output, *self._graph.value_info)
        return {dim.dim_param for value in values for dim in value.type.tensor_type.shape.dim if dim.dim_param}

    @cached_property
    def values(self) -> set[str]:
        """Names that nodes make."""
        return set() if self._graph is None else {name for node in self._graph.node for name in node.output}

    def has(self, name: str) -> bool:
        """Whether ``name`` is a symbol, or ``value.dim`` of a value inside the model."""
        value, _, dim = name.rpartition(".")
        return name in self.symbols or (dim.isdigit() and value in self.values)


def _check_names(declared: _Declared, given: Mapping[str, int], inner: _Inner) -> None:
    symbols = _symbols(declared)
    known = symbols | {part for name in symbols for part in dim_names(name)}
    for name, size in given.items():
        _at_least(0, f"--dim {name}", size)
        if name in known or inner.has(name):
            continue
        value, _, dim = name.rpartition(".")
        dims = declared.get(value) or ()
        if dim.isdigit() and int(dim) < len(dims):
            raise UsageError(f"--dim {name}={size}: dim {dim} of input {value!r} is {dims[int(dim)]} in the file")
        if value in declared and declared[value] is None and dim.isdigit():
            raise UsageError(f"--dim {name}: input {value!r} has no rank", hint=f"give its shape: --shape {value}=4,8")
        hint = _suggest(name, known | inner.symbols)
        missing = _missing(declared, given)
        if missing:
            hint += f" (still without a value: {', '.join(missing)})"
        raise UsageError(f"--dim {name}={size}: the model has no dim {name!r}", hint=hint)


def _missing(declared: _Declared, given: Mapping[str, int]) -> list[str]:
    """Symbols that must be given, each once."""
    found: dict[str, None] = {}
    for dims in declared.values():
        for dim in dims or ():
            if isinstance(dim, str) and evaluate_dim(dim, given) is None:
                found.update((part, None) for part in dim_names(dim) or (dim,) if part not in given)
    return list(found)


def _sizes(declared: _Declared, given: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    missing = _missing(declared, given)
    rankless = [name for name, dims in declared.items() if dims is None]
    if missing or rankless:
        what = [f"symbolic dims without a value: {', '.join(missing)}"] if missing else []
        if rankless:
            listed = ", ".join(map(repr, rankless))
            what.append(f"graph input{'s' if len(rankless) > 1 else ''} {listed} of no rank")
        options = [f"--dim {_quoted(name)}=N" for name in missing]
        options.extend(f"--shape {_quoted(name)}=4,8" for name in rankless)
        raise UnboundDimError("; ".join(what), hint="bind them: " + " ".join(options))
    shapes: dict[str, tuple[int, ...]] = {}
    for name, dims in declared.items():
        sizes = [dim if isinstance(dim, int) else evaluate_dim(dim, given) for dim in dims or ()]
        if None in sizes:
            text = next(str(dim) for dim, size in zip(dims or (), sizes, strict=True) if size is None)
            raise UnboundDimError(f"dim {text!r} of input {name!r} has no size", hint=f"give it: --dim '{text}'=N")
        shapes[name] = tuple(size for size in sizes if size is not None)
    return shapes


def _quoted(name: str) -> str:
    """A name as a shell wants it."""
    return shlex.quote(name)
