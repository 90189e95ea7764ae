"""Operators and values while a graph is being built: interning, inference, constants, parameter reads."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from tap_planner.errors import TapError, UnsupportedGraphError
from tap_planner.graph.constants import ConstantStore, Evaluator, Recipe, work_of
from tap_planner.graph.dtypes import name_of_numpy
from tap_planner.graph.limits import MAX_FETCH, MAX_RANK, MAX_TOTAL
from tap_planner.graph.types import ParameterRead, TensorKind
from tap_planner.graph.values import Form, Value
from tap_planner.operators import AttributeValue, OperatorSignature, TensorType, check_fit, record_of

SMALL_ELEMENTS = 4096
"""Constants up to this size are computed at once."""
Attributes = tuple[tuple[str, AttributeValue], ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Draft:
    """An operator that may still change."""

    type: str
    attributes: Attributes
    inputs: list[Value | None]
    outputs: list[Value]
    name: str

    @property
    def id(self) -> str:
        """Name of the first output."""
        return self.outputs[0].name

    @property
    def signature(self) -> OperatorSignature:
        """The operator without its names."""
        return OperatorSignature(
            type=self.type,
            attributes=self.attributes,
            inputs=tuple(None if value is None else value.type for value in self.inputs),
            outputs=tuple(value.type for value in self.outputs),
        )


class Types:
    """Interned tensor types and memoised inference."""

    def __init__(self) -> None:
        self._types: dict[tuple[str, tuple[int, ...]], TensorType] = {}
        self._inferred: dict[tuple, tuple[TensorType, ...]] = {}

    def get(self, dtype: str, shape: Sequence[int]) -> TensorType:
        """The one object for this dtype and shape."""
        key = (dtype, tuple(shape))
        found = self._types.get(key)
        if found is None:
            if dtype == "undefined":
                raise UnsupportedGraphError("a tensor of an element type that is not known")
            if len(key[1]) > MAX_RANK:
                raise UnsupportedGraphError(f"a tensor of {len(key[1])} dims, expected at most {MAX_RANK}")
            if min(key[1], default=0) < 0:
                raise UnsupportedGraphError(f"a tensor of shape {list(key[1])} has a negative dim")
            found = self._types[key] = TensorType(dtype=dtype, shape=key[1])
        return found

    def infer(
        self, kind: str, attributes: Attributes, inputs: Sequence[TensorType | None], num_outputs: int
    ) -> tuple[TensorType, ...]:
        """Output types of an operator (all inputs interned).

        Raises:
            TapError: the operator's record refuses the operands.
        """
        key = (kind, attributes, num_outputs, *map(id, inputs))
        found = self._inferred.get(key)
        if found is None:
            signature = OperatorSignature(type=kind, attributes=attributes, inputs=tuple(inputs), outputs=())
            try:
                result = record_of(signature).infer(signature, num_outputs)
                types = tuple(self.get(item.dtype, item.shape) for item in result)
                check_fit(replace(signature, outputs=types))
            except (ValueError, IndexError, TypeError, ZeroDivisionError, KeyError) as error:
                raise UnsupportedGraphError(f"operator {kind}: shapes cannot be inferred ({error})") from error
            found = self._inferred[key] = types
        return found


class Constants:
    """Hash-consed constants: equal ones are one value."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._by_key: dict[str, Value] = {}
        self._arrays: dict[str, np.ndarray] = {}
        self._recipes: dict[str, Recipe] = {}
        self._keys: dict[str, str] = {}
        self._spent = 0

    @property
    def store(self) -> ConstantStore:
        """Everything made so far."""
        return ConstantStore(self._arrays, self._recipes, self._keys)

    def fetch(self, name: str) -> np.ndarray:
        """Value of a constant, computed if it must be.

        Raises:
            UnsupportedGraphError: that would take too much time or memory.
        """
        found = self._arrays.get(name)
        if found is not None:
            return found
        if not self.affords([name]):
            raise UnsupportedGraphError(
                f"constant {name!r} decides about the graph, but is too large to be computed while it is read",
                hint="export the model with constants folded",
            )
        self._spent += work_of(name, self._recipes)
        return self.store.restricted([name]).value(name)

    def affords(self, names: Iterable[str]) -> bool:
        """Whether constants can be computed in what is left of the bounded time and memory."""
        work = sum(work_of(name, self._recipes) for name in names)
        return work <= MAX_FETCH and self._spent + work <= MAX_TOTAL

    def array(self, name: str, array: np.ndarray) -> Value:
        """A constant whose value is known."""
        array = np.asarray(array)
        dtype = name_of_numpy(array.dtype)
        data = repr(array.tolist()).encode() if dtype == "string" else array.tobytes()
        content = data.hex() if len(data) <= 64 else hashlib.sha256(data).hexdigest()
        key = f"{dtype}{list(array.shape)}={content}"
        found = self._by_key.get(key)
        if found is None:
            type_ = self._types.get(dtype, array.shape)
            found = Value(name=name, type=type_, kind=TensorKind.CONSTANT, array=array)
            self._by_key[key] = found
            self._arrays[name] = array
            self._keys[name] = key
        return found

    def recipe(
        self,
        names: Sequence[str],
        types: Sequence[TensorType],
        evaluate: Evaluator,
        inputs: Sequence[Value | None],
        identity: str,
        *,
        outside: TensorType | None = None,
        depth: int = 1,
        deferred: bool = False,
    ) -> list[Value]:
        """Constants that are computed later.

        Args:
            names: of the results.
            types: of the results.
            evaluate: from operand arrays to result arrays.
            inputs: constants.
            identity: text that is equal for equal computations (operands aside).
            outside: type of a value that lies outside the model file.
            depth: how many products are added up in each element.
            deferred: whether the value counts for nothing while a model is read (that of a stored table).
        """
        operands = tuple(None if value is None else value.name for value in inputs)
        text = identity + "(" + ",".join("" if name is None else self._keys[name] for name in operands) + ")"
        digest = hashlib.sha256(text.encode()).hexdigest()
        values: list[Value] = []
        work = depth * sum(type_.num_elements for type_ in types)
        deferred = deferred or outside is not None or any(value is not None and value.deferred for value in inputs)
        for output, (name, type_) in enumerate(zip(names, types, strict=True)):
            key = f"{digest}.{output}"
            found = self._by_key.get(key)
            if found is None:
                found = self._by_key[key] = Value(name=name, type=type_, kind=TensorKind.CONSTANT, deferred=deferred)
                self._recipes[name] = Recipe(
                    evaluate=evaluate, inputs=operands, output=output, outside=outside, work=work
                )
                self._keys[name] = key
            values.append(found)
        return values


class Reads:
    """Reads of parameters; the same read is one value."""

    def __init__(self, types: Types) -> None:
        self._types = types
        self._values: dict[tuple[str, tuple[int | None, ...]], Value] = {}
        self.stored: dict[str, TensorType] = {}

    def plain(self, parameter: str, type_: TensorType) -> Value:
        """The parameter as it is stored."""
        self.stored[parameter] = type_
        return self._get(parameter, parameter, tuple(range(len(type_.shape))))

    def _get(self, name: str, parameter: str, dims: tuple[int | None, ...]) -> Value:
        key = (parameter, dims)
        found = self._values.get(key)
        if found is None:
            stored = self.stored[parameter]
            shape = [1 if dim is None else stored.shape[dim] for dim in dims]
            found = self._values[key] = Value(
                name=name,
                type=self._types.get(stored.dtype, shape),
                kind=TensorKind.PARAMETER,
                read=ParameterRead(parameter=parameter, dims=dims),
            )
        return found

    def folded(self, name: str, form: Form) -> Value | None:
        """The read that a Transpose, or a Reshape of dims of size 1, of a parameter amounts to; None for others."""
        value = form.inputs[0]
        if value is None or value.read is None:
            return None
        read = value.read
        if form.type == "Transpose":
            perm = form.attributes["perm"]
            assert isinstance(perm, tuple)
            return self._get(name, read.parameter, tuple(read.dims[int(dim)] for dim in perm))
        if form.type != "Reshape":
            return None
        shape = form.attributes["shape"]
        assert isinstance(shape, tuple)
        if [size for size in shape if size != 1] != [size for size in value.shape if size != 1]:
            return None
        kept = iter(dim for dim, size in zip(read.dims, value.shape, strict=True) if size != 1)
        return self._get(name, read.parameter, tuple(None if size == 1 else next(kept) for size in shape))


def located(error: TapError, where: str) -> UnsupportedGraphError:
    """The error with the node in front."""
    if error.message.startswith("node "):
        return UnsupportedGraphError(error.message, hint=error.hint)
    return UnsupportedGraphError(f"{where}: {error.message}", hint=error.hint)


def result_elements(form: Form) -> int | None:
    """An upper bound on the elements of a small computation's results, None if unknown."""
    shape = form.attributes.get("shape")
    if isinstance(shape, tuple):
        return math.prod(int(size) for size in shape)
    shapes = [value.shape for value in form.inputs if value is not None]
    if form.type in ("Tile", "Pad", "MatMul", "Einsum", "Gemm", "Resize", "OneHot"):
        return None
    if form.type in ("Gather", "Concat"):
        return sum(math.prod(item) for item in shapes) * (max(shapes[0], default=1) if form.type == "Gather" else 1)
    if len(shapes) == 1:
        return math.prod(shapes[0])
    try:
        return math.prod(np.broadcast_shapes(*shapes))
    except (RuntimeError, ValueError):
        return None
