"""``bind``: from a model file and options to the immutable graph."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import onnx
from onnx import TensorProto

from tap_planner.errors import ModelError, UnsupportedGraphError, UsageError
from tap_planner.graph.binding import Binder
from tap_planner.graph.branches import BranchTakenError, splice, with_captures
from tap_planner.graph.constants import ConstantStore
from tap_planner.graph.digest import graph_digest
from tap_planner.graph.dims import BoundInputs, bind_inputs
from tap_planner.graph.drafts import Draft
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.nodes import Node, decode_nodes, sort_nodes
from tap_planner.graph.options import BindOptions
from tap_planner.graph.rebatch import prove_rebatched
from tap_planner.graph.roles import Roles, Stored, find_roles
from tap_planner.graph.simplify import drop_dead, hoist_preamble, merge_reshapes, resolve
from tap_planner.graph.training import choose_trainable, gradient_values, make_loss
from tap_planner.graph.types import Graph, Operator, Parameter, Tensor
from tap_planner.graph.unknown import DeclaredTypes
from tap_planner.graph.values import Value
from tap_planner.graph.weights import inlined
from tap_planner.operators import OperatorSignature, TensorType


def bind(model: ModelFile, options: BindOptions) -> Graph:
    """Bind a model: give its dims values and bring it into canonical form.

    Args:
        model: a parsed file.
        options: values of dims, batch, loss and trainable set.

    Raises:
        UnboundDimError: a symbolic dim has no value.
        UsageError: an option does not fit the model.
        UnsupportedGraphError: a node cannot be planned; the message names it.
    """
    try:
        return _bind(model, options)
    except (LookupError, TypeError, AttributeError) as error:
        # Nodes are guarded one by one; what is left are damaged declarations (names that are no text, say).
        message = f"{model.path}: not a valid ONNX graph ({type(error).__name__}: {error})"
        raise ModelError(message, hint="check the file with onnx.checker") from error


def _bind(model: ModelFile, options: BindOptions) -> Graph:
    proto = inlined(model.proto)
    if proto is not model.proto:
        model = replace(model, proto=proto)
    stored_names = {tensor.name for tensor in proto.graph.initializer}
    inputs = [value for value in proto.graph.input if value.name not in stored_names]
    _check_values(options.values, inputs)
    bound = bind_inputs(inputs, options)
    given = [*stored_names, *(value.name for value in inputs)]
    nodes = sort_nodes(with_captures(decode_nodes(proto.graph.node)), given)
    outputs = [value.name for value in proto.graph.output]
    dynamic = [value.name for value in inputs if value.name not in options.values]
    while True:
        roles = _roles(proto, nodes, dynamic, outputs)
        try:
            binder = _run(model, options, bound, nodes, roles, outputs)
        except BranchTakenError as taken:
            nodes = splice(nodes, taken, given)
        else:
            return _Assembly(model, options, bound, roles, binder).graph(outputs)


def _check_values(values: Mapping[str, int], inputs: Sequence[onnx.ValueInfoProto]) -> None:
    known = [value.name for value in inputs]
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
            raise UsageError(f"--value {name}: the model has no such input", hint=f"inputs: {', '.join(near)}")
        tensor = next(value.type.tensor_type for value in inputs if value.name == name)
        dtype = dtype_name(tensor.elem_type)
        if not dtype.startswith(("int", "uint", "bool")):
            raise UsageError(f"--value {name}: the input is {dtype}, expected an integer or boolean one")


def _roles(proto: onnx.ModelProto, nodes: Sequence[Node], dynamic: Sequence[str], outputs: Sequence[str]) -> Roles:
    stored: dict[str, Stored] = {}
    for tensor in proto.graph.initializer:
        external = tensor.data_location == TensorProto.EXTERNAL
        stored[tensor.name] = _stored(tensor, external=external)
    for node in nodes:
        tensor = node.attributes.get("value")
        if node.type == "Constant":
            stored[node.outputs[0]] = (
                _stored(tensor) if isinstance(tensor, TensorProto) else Stored(dtype="int64", size=None, rank=None)
            )
        elif node.type == "ConstantOfShape" and node.inputs and node.inputs[0] in stored:
            dtype = dtype_name(tensor.data_type) if isinstance(tensor, TensorProto) else "float32"
            stored[node.outputs[0]] = Stored(dtype=dtype, size=None, rank=stored[node.inputs[0]].size)
    return find_roles(nodes, dynamic, stored, outputs)


def _stored(tensor: TensorProto, *, external: bool = False) -> Stored:
    return Stored(
        dtype=dtype_name(tensor.data_type), size=math.prod(tensor.dims), rank=len(tensor.dims), external=external
    )


def _run(
    model: ModelFile,
    options: BindOptions,
    bound: BoundInputs,
    nodes: Sequence[Node],
    roles: Roles,
    outputs: Sequence[str],
) -> Binder:
    wanted = {name for node in nodes for name in node.inputs}
    wanted.update(outputs)
    declared = DeclaredTypes(model.proto, bound.dims, bound.types)
    binder = Binder(model, bound, roles, options.values, wanted, declared)
    binder.run(nodes)
    if bound.rebatch:
        plain = _unbatched(bound)
        original = Binder(model, plain, roles, options.values, wanted, DeclaredTypes(model.proto, {}, plain.types))
        original.run(nodes)
        prove_rebatched(binder.operators, original.values, bound.rebatch)
    return binder


def _unbatched(bound: BoundInputs) -> BoundInputs:
    """The inputs as the file has them, with a leading 1."""
    types = {
        name: type_ if bound.batch_dims[name] is None else TensorType(dtype=type_.dtype, shape=(1, *type_.shape[1:]))
        for name, type_ in bound.types.items()
    }
    return replace(bound, types=types, batch=1, rebatch=None)


class _Assembly:
    """Turns the binder's drafts into the graph."""

    def __init__(
        self, model: ModelFile, options: BindOptions, bound: BoundInputs, roles: Roles, binder: Binder
    ) -> None:
        self._model = model
        self._options = options
        self._bound = bound
        self._roles = roles
        self._binder = binder

    def graph(self, output_names: Sequence[str]) -> Graph:
        """The finished graph."""
        binder, options = self._binder, self._options
        for name in output_names:
            if name not in binder.values:
                raise UnsupportedGraphError(f"graph output {name!r} is made by no node, input or initializer")
        results = [binder.values[name] for name in output_names]
        operators, renamed = merge_reshapes(binder.operators, results)
        results = [resolve(value, renamed) for value in results]
        operators = hoist_preamble(drop_dead(operators, results))
        warnings = list(binder.warnings)
        loss: Value | None = None
        labels: Value | None = None
        if options.training:
            made = make_loss(options.loss, results, output_names, set(binder.values), binder.types)
            operators.append(made.operator)
            loss, labels = made.operator.outputs[0], made.labels
            warnings.extend(made.warnings)
        operators = drop_dead(operators, [*results, *([loss] if loss else [])])
        return self._finish(operators, results, output_names, loss, labels, warnings)

    def _finish(
        self,
        drafts: Sequence[Draft],
        results: Sequence[Value],
        output_names: Sequence[str],
        loss: Value | None,
        labels: Value | None,
        warnings: Sequence[str],
    ) -> Graph:
        values = _used_values(drafts, results)
        chosen = self._trainable(values) if loss is not None else set()
        with_gradient = gradient_values(drafts, loss, chosen) if loss is not None else set()
        parameters = self._parameters(values, with_gradient, warnings=loss is not None)
        inputs = [name for name in self._bound.types if name not in self._options.values]
        batch_dims = {name: self._bound.batch_dims.get(name) for name in inputs}
        if labels is not None:
            inputs.append(labels.name)
            batch_dims[labels.name] = self._labels_dim(labels)
        tensors = {value.name: _tensor(value, with_gradient) for value in values}
        for name in inputs:
            if name not in tensors:
                tensors[name] = _tensor(self._binder.values[name], with_gradient)
        constants = self._constants(values)
        operators = tuple(_operator(draft) for draft in drafts)
        outputs = tuple(value.name for value in results)
        return Graph(
            name=self._model.name,
            operators=operators,
            tensors=tensors,
            parameters=parameters,
            inputs=tuple(inputs),
            outputs=outputs,
            output_names=tuple(output_names),
            loss=None if loss is None else loss.name,
            batch=self._bound.batch,
            dims=dict(self._bound.dims),
            batch_dims=batch_dims,
            constants=constants,
            file_sha256=self._model.sha256,
            digest=graph_digest(operators, tensors, parameters, inputs, [*outputs, *output_names], constants),
            warnings=tuple(warnings),
        )

    def _trainable(self, values: Sequence[Value]) -> set[str]:
        stored = {
            value.read.parameter: self._binder.reads.stored[value.read.parameter] for value in values if value.read
        }
        return choose_trainable(stored, self._roles.trainable, self._options.freeze, self._options.train)

    def _parameters(
        self, values: Sequence[Value], with_gradient: Collection[Value], *, warnings: bool
    ) -> tuple[Parameter, ...]:
        reached = {value.read.parameter for value in values if value.read and value in with_gradient}
        names = dict.fromkeys(value.read.parameter for value in values if value.read)
        stored = self._binder.reads.stored
        return tuple(Parameter(name=name, type=stored[name], trainable=name in reached) for name in names)

    def _labels_dim(self, labels: Value) -> int | None:
        batch = self._bound.batch
        return 0 if labels.shape and labels.batched and labels.shape[0] % batch == 0 else None

    def _constants(self, values: Sequence[Value]) -> ConstantStore:
        return self._binder.constants.store.restricted(value.name for value in values if value.is_constant)


def _used_values(drafts: Sequence[Draft], results: Sequence[Value]) -> list[Value]:
    """Values in order of first use."""
    found: dict[Value, None] = {}
    for draft in drafts:
        for value in draft.inputs:
            if value is not None:
                found[value] = None
        for value in draft.outputs:
            found[value] = None
    found.update(dict.fromkeys(results))
    return list(found)


def _tensor(value: Value, with_gradient: Collection[Value]) -> Tensor:
    return Tensor(
        name=value.name,
        type=value.type,
        kind=value.kind,
        requires_gradient=value in with_gradient,
        read=value.read,
    )


def _operator(draft: Draft) -> Operator:
    return Operator(
        id=draft.id,
        name=draft.name,
        signature=OperatorSignature(
            type=draft.type,
            attributes=draft.attributes,
            inputs=tuple(None if value is None else value.type for value in draft.inputs),
            outputs=tuple(value.type for value in draft.outputs),
        ),
        inputs=tuple(None if value is None else value.name for value in draft.inputs),
        outputs=tuple(value.name for value in draft.outputs),
    )


__all__ = ["bind"]
