"""The binder: one pass over the sorted nodes that turns each into a constant, a parameter read or an operator."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from onnx import TensorProto, numpy_helper

from tap_planner.errors import ModelError, UnsupportedGraphError
from tap_planner.graph import compute, contrib, detection, layout, quantised, recurrent, sampling
from tap_planner.graph.branches import BranchTakenError
from tap_planner.graph.dims import BoundInputs
from tap_planner.graph.drafts import SMALL_ELEMENTS, Constants, Draft, Reads, Types, located, result_elements
from tap_planner.graph.dtypes import dtype_name, numpy_dtype
from tap_planner.graph.evaluate import EVALUATORS, MAX_ELEMENTS, evaluate, evaluate_node
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.nodes import Node
from tap_planner.graph.roles import Roles
from tap_planner.graph.types import TensorKind
from tap_planner.graph.unknown import DeclaredTypes
from tap_planner.graph.values import Call, Form, Value
from tap_planner.graph.weights import constant_value, read_external
from tap_planner.operators import TensorType, lookup

_CANONICAL: dict[str, Callable[[Call], Form]] = {
    **layout.CANONICAL,
    **compute.CANONICAL,
    **contrib.CANONICAL,
    **quantised.CANONICAL,
    **recurrent.CANONICAL,
    **detection.CANONICAL,
    **sampling.CANONICAL,
}
_RANDOM = frozenset(
    ("Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike")
)
_SOURCES = frozenset(("Constant", "ConstantOfShape", "Range", "Shape", "Size"))
_CONTROL = frozenset(("If", "Loop", "Scan", "SequenceMap"))


class Binder:
    """Holds the values made so far.

    Args:
        model: the file.
        bound: static types of the inputs.
        roles: which stored tensors are parameters.
        values: integer inputs that are constants.
        wanted: names that some node or the graph's outputs read.
        declared: types that the file itself declares, for operators without a record.
    """

    def __init__(
        self,
        model: ModelFile,
        bound: BoundInputs,
        roles: Roles,
        values: Mapping[str, int],
        wanted: set[str],
        declared: DeclaredTypes,
    ) -> None:
        self.types = Types()
        self.constants = Constants(self.types)
        self.reads = Reads(self.types)
        self.values: dict[str, Value] = {}
        self.operators: list[Draft] = []
        self.warnings: list[str] = []
        self._sequences: dict[str, list[Value]] = {}
        self._model = model
        self._roles = roles
        self._wanted = wanted
        self._declared = declared
        self._rebatch = bound.rebatch
        for name, type_ in bound.types.items():
            self._add_input(name, type_, values, bound.batch_dims.get(name) is not None)
        for tensor in model.proto.graph.initializer:
            if tensor.name in wanted:
                self.values[tensor.name] = self._stored(tensor)

    def _add_input(self, name: str, type_: TensorType, values: Mapping[str, int], batched: bool) -> None:
        interned = self.types.get(type_.dtype, type_.shape)
        if name in values:
            array = np.full(type_.shape, values[name], numpy_dtype(type_.dtype))
            self.values[name] = self.constants.array(name, array)
        else:
            self.values[name] = Value(name=name, type=interned, kind=TensorKind.INPUT, batched=batched)

    def _stored(self, tensor: TensorProto) -> Value:
        type_ = self.types.get(dtype_name(tensor.data_type), tuple(tensor.dims))
        if is_parameter(tensor.name, type_, self._roles, external=tensor.data_location == TensorProto.EXTERNAL):
            return self.reads.plain(tensor.name, type_)
        if tensor.data_location != TensorProto.EXTERNAL:
            return self.constants.array(tensor.name, numpy_helper.to_array(tensor))
        folder, identity = self._model.path.parent, f"external {tensor.name}"
        found = self.constants.recipe(
            [tensor.name], [type_], lambda _: [read_external(folder, tensor)], [], identity, outside=type_
        )
        return found[0]

    def run(self, nodes: Sequence[Node]) -> None:
        """Bind all nodes.

        Raises:
            UnsupportedGraphError: a node that cannot be planned; the message names it.
        """
        for node in nodes:
            if any(output in self._wanted for output in node.outputs):
                try:
                    self._visit(node)
                except ModelError as error:
                    raise located(error, node.where) from error
                except (ArithmeticError, LookupError, TypeError, ValueError, MemoryError) as error:
                    text = f"{node.where}: not a valid node ({error})"
                    raise UnsupportedGraphError(text, hint="check the file with onnx.checker") from error

    def _visit(self, node: Node) -> None:
        if node.type in _SOURCES and self._source(node):
            return
        if node.type in _CONTROL:
            raise self._control(node)
        if node.type in ("SplitToSequence", "SequenceAt"):
            self._sequence(node)
            return
        call = self._call(node)
        form = _CANONICAL.get(node.type, compute.default_form)(call)
        first = form.inputs[0] if form.inputs else None
        if form.type == "Identity" and first is not None:
            self.values[node.outputs[0]] = first
            return
        if form.inputs and node.type not in _RANDOM and all(v is None or v.is_constant for v in form.inputs):
            self._constant(call, form)
            return
        read = self.reads.folded(node.outputs[0], form)
        if read is not None:
            self.values[node.outputs[0]] = read
            return
        if self._rebatch and form.type == "Concat":
            self._widen(form)
        self._operator(node, form)

    def _control(self, node: Node) -> Exception:
        """The error of a node with subgraphs: an If whose condition is known is no error to the caller."""
        condition = self.values.get(node.inputs[0])
        if node.type == "If" and condition is not None and condition.is_constant:
            return BranchTakenError(node, bool(self.constants.fetch(condition.name).reshape(-1)[0]))
        fixable = (
            name for name, item in self.values.items() if item.kind is TensorKind.INPUT and not item.type.is_float
        )
        name = next(fixable, "NAME")
        return UnsupportedGraphError(
            f"{node.where}: control flow whose condition is not a constant cannot be planned",
            hint=f"fix what it depends on: --value {name}=N, or export without control flow",
        )

    def _sequence(self, node: Node) -> None:
        """A sequence exists only between the split that makes it and the reads of its items."""
        if node.type == "SequenceAt":
            items = self._sequences.get(node.inputs[0])
            position = self._operand(node, node.inputs[1])
            if items is None or position is None or not position.is_constant:
                raise UnsupportedGraphError(f"{node.where}: a sequence that is not split from a tensor here")
            self.values[node.outputs[0]] = items[int(self.constants.fetch(position.name).reshape(-1)[0])]
            return
        call = self._call(node)
        value = call.operand(0)
        axis = call.axis(call.integer("axis", 0), value.rank)
        size = value.shape[axis]
        sizes = call.ints(1) if call.has(1) else (1,) * size
        if call.has(1) and call.operand(1).rank == 0:
            sizes = tuple(min(sizes[0], size - start) for start in range(0, size, sizes[0]))
        names = [f"{node.outputs[0]}__{index}" for index in range(len(sizes))]
        split = Form(type="Split", attributes={"axis": axis, "split": sizes}, inputs=[value])
        items = self._emit(split, names, node.name) if len(sizes) > 1 else [value]
        if not call.has(1) and call.integer("keepdims", 1) == 0:
            shape = value.shape[:axis] + value.shape[axis + 1 :]
            forms = [layout.reshaped(item, shape) for item in items]
            items = [
                self._emit(form, [f"{name}_squeezed"], node.name)[0] for form, name in zip(forms, names, strict=True)
            ]
        self._sequences[node.outputs[0]] = items

    def _call(self, node: Node) -> Call:
        return Call(
            node=node,
            inputs=[self._operand(node, name) for name in node.inputs],
            opset=self._model.opset,
            fetch=self.constants.fetch,
            rebatch=self._rebatch,
        )

    def _operand(self, node: Node, name: str) -> Value | None:
        if not name:
            return None
        found = self.values.get(name)
        if found is None:
            raise UnsupportedGraphError(f"{node.where}: reads {name!r}, which has no value")
        return found

    def _source(self, node: Node) -> bool:
        """Nodes that make constants or parameters from nothing but shapes; False if it is none of them after all."""
        name = node.outputs[0]
        if node.type == "Constant":
            self.values[name] = self._constant_node(node, name)
            return True
        operands = [self._operand(node, item) for item in node.inputs]
        if node.type in ("Shape", "Size"):
            assert operands[0] is not None
            self.values[name] = self.constants.array(name, _shape(node, operands[0].shape))
            return True
        if not all(value is not None and value.is_constant for value in operands):
            return False
        arrays = [self.constants.fetch(value.name) for value in operands if value is not None]
        if node.type == "ConstantOfShape":
            self.values[name] = self._filled(node, name, tuple(int(size) for size in arrays[0].reshape(-1)))
        else:
            self.values[name] = self._range(name, arrays)
        return True

    def _constant_node(self, node: Node, name: str) -> Value:
        tensor = node.attributes.get("value")
        if isinstance(tensor, TensorProto):
            type_ = self.types.get(dtype_name(tensor.data_type), tuple(tensor.dims))
            if is_parameter(name, type_, self._roles):
                return self.reads.plain(name, type_)
        try:
            return self.constants.array(name, constant_value(node))
        except ModelError as error:
            raise UnsupportedGraphError(error.message) from error

    def _filled(self, node: Node, name: str, shape: tuple[int, ...]) -> Value:
        tensor = node.attributes.get("value")
        fill = numpy_helper.to_array(tensor).reshape(()) if isinstance(tensor, TensorProto) else np.float32(0)
        dtype = dtype_name(tensor.data_type) if isinstance(tensor, TensorProto) else "float32"
        type_ = self.types.get(dtype, shape)
        if is_parameter(name, type_, self._roles):
            return self.reads.plain(name, type_)
        if type_.num_elements <= SMALL_ELEMENTS:
            return self.constants.array(name, np.full(shape, fill))
        identity = f"ConstantOfShape {dtype} {shape} {fill!r}"
        return self.constants.recipe([name], [type_], lambda _: [np.full(shape, fill)], [], identity)[0]

    def _range(self, name: str, arrays: list[np.ndarray]) -> Value:
        start, limit, delta = (array.reshape(-1)[0] for array in arrays)
        dtype = arrays[0].dtype
        count = max(0, math.ceil((float(limit) - float(start)) / float(delta)))
        type_ = self.types.get(
            {np.dtype(np.int32): "int32", np.dtype(np.int64): "int64"}.get(dtype, str(dtype)), [count]
        )

        def values() -> np.ndarray:
            return (start + np.arange(count).astype(dtype) * delta).astype(dtype)

        if count <= SMALL_ELEMENTS:
            return self.constants.array(name, values())
        identity = f"Range {start!r} {limit!r} {delta!r}"
        return self.constants.recipe([name], [type_], lambda _: [values()], [], identity)[0]

    def _constant(self, call: Call, form: Form) -> None:
        """Evaluate what depends on constants alone, now if it is small, else when asked."""
        node = call.node
        bound = result_elements(form)
        ready = all(value is None or value.array is not None for value in form.inputs)
        if ready and bound is not None and bound <= 4 * SMALL_ELEMENTS and form.type in EVALUATORS:
            self._bind_arrays(node, self._evaluate(node, form, [None if v is None else v.array for v in form.inputs]))
            return
        attributes = tuple(sorted(form.attributes.items()))
        if form.type in EVALUATORS and lookup(form.type).known:
            inputs = [None if value is None else value.type for value in form.inputs]
            types = self.types.infer(form.type, attributes, inputs, len(node.outputs))
            deferred = any(value is not None and value.deferred for value in form.inputs)
            if not deferred and all(item.num_elements <= SMALL_ELEMENTS for item in types):
                arrays = [None if v is None else self.constants.fetch(v.name) for v in form.inputs]
                self._bind_arrays(node, self._evaluate(node, form, arrays))
                return
            made = self.constants.recipe(
                node.outputs,
                types,
                lambda arrays: evaluate(form.type, form.attributes, arrays),
                form.inputs,
                f"{form.type}{attributes}",
            )
            self.values.update(zip(node.outputs, made, strict=True))
            return
        if bound is not None and bound > MAX_ELEMENTS:
            raise call.error(f"makes a constant of {bound} elements, too many")
        operands = [None if value is None else self.constants.fetch(value.name) for value in call.inputs]
        self._bind_arrays(node, evaluate_node(node.proto, call.opset, operands))

    def _evaluate(self, node: Node, form: Form, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        try:
            return evaluate(form.type, form.attributes, arrays)
        except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            raise UnsupportedGraphError(f"{node.where}: its constant value cannot be computed ({error})") from error

    def _bind_arrays(self, node: Node, arrays: Sequence[np.ndarray]) -> None:
        names = [name for name in node.outputs if name]
        for name, array in zip(names, arrays, strict=False):
            self.values[name] = self.constants.array(name, array)

    def _widen(self, form: Form) -> None:
        """Give operands of a Concat that do not carry the batch as many rows as the others, where it is re-batched."""
        axis = form.attributes["axis"]
        values = [value for value in form.inputs if value is not None]
        rows = max(value.shape[0] for value in values)
        if axis == 0 or not any(value.batched for value in values):
            return
        for index, value in enumerate(values):
            if value.batched or value.shape[0] == rows or value.shape[0] != 1:
                continue
            shape = (rows, *value.shape[1:])
            name = f"{value.name}__batch"
            expanded = Form(type="Expand", attributes={"shape": shape}, inputs=[value])
            known = self.values.get(name)
            form.inputs[index] = known if known is not None else self._emit(expanded, [name], name)[0]

    def _operator(self, node: Node, form: Form) -> None:
        names = list(node.outputs)
        if form.type != "Split":
            while len(names) > 1 and names[-1] not in self._wanted:
                names.pop()
        made = [name or f"{names[0]}__unused_{index}" for index, name in enumerate(names)]
        self._emit(form, made, node.name)

    def _emit(self, form: Form, names: Sequence[str], label: str) -> list[Value]:
        attributes = tuple(sorted(form.attributes.items()))
        types = self._output_types(form, attributes, names)
        batched = any(value is not None and value.batched for value in form.inputs)
        outputs = [
            Value(name=name, type=type_, kind=TensorKind.ACTIVATION, batched=batched)
            for name, type_ in zip(names, types, strict=True)
        ]
        self.values.update(zip(names, outputs, strict=True))
        self.operators.append(
            Draft(type=form.type, attributes=attributes, inputs=form.inputs, outputs=outputs, name=label)
        )
        return outputs

    def _output_types(self, form: Form, attributes: tuple, names: Sequence[str]) -> Sequence[TensorType]:
        if lookup(form.type).known:
            inputs = [None if value is None else value.type for value in form.inputs]
            return self.types.infer(form.type, attributes, inputs, len(names))
        types = self._declared.types(names)
        if types is None:
            raise UnsupportedGraphError(
                f"operator {form.type} is not known and the file declares no static shape for {', '.join(names)}",
                hint="add its output shapes to the file's value_info, or export without it",
            )
        warning = f"operator {form.type} is not known: it is replicated on every device"
        if warning not in self.warnings:
            self.warnings.append(warning)
        return [self.types.get(item.dtype, item.shape) for item in types]


def is_parameter(name: str, type_: TensorType, roles: Roles, *, external: bool = False) -> bool:
    """Whether a stored tensor is a parameter rather than a constant."""
    if name in roles.trainable or name in roles.statistics:
        return True
    if name not in roles.used:
        return False
    plain = type_.is_float or type_.dtype in ("int64", "int32", "bool")
    return external or not plain or type_.num_elements > SMALL_ELEMENTS


def _shape(node: Node, shape: tuple[int, ...]) -> np.ndarray:
    if node.type == "Size":
        return np.array(math.prod(shape), np.int64)
    start, end = node.attributes.get("start", 0), node.attributes.get("end")
    assert isinstance(start, int)
    assert end is None or isinstance(end, int)
    return np.array(shape[start:end], np.int64)
