"""The binder: one pass over the sorted nodes that turns each into a constant, a parameter read or an operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import onnx

from tap_planner.errors import ModelError, UnsupportedGraphError
from tap_planner.graph import (
    compute,
    contrib,
    control,
    detection,
    layout,
    quantised,
    recurrent,
    sampling,
    selection,
    sequences,
    signals,
    spatial,
)
from tap_planner.graph.arity import check_arity
from tap_planner.graph.custom import CustomRules
from tap_planner.graph.dims import BoundInputs
from tap_planner.graph.drafts import SMALL_ELEMENTS, Constants, Draft, Reads, Types, located, result_elements
from tap_planner.graph.evaluate import EVALUATORS, evaluate, evaluate_node
from tap_planner.graph.limits import MAX_FETCH, is_cheap
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.nodes import Node, decode_nodes, sort_nodes
from tap_planner.graph.origins import origin
from tap_planner.graph.roles import Roles
from tap_planner.graph.sources import SOURCES, Sources, input_value
from tap_planner.graph.sparse import stored_tensors
from tap_planner.graph.types import TensorKind
from tap_planner.graph.unfolding import DAMAGE, Kept, Unfolding, with_captures
from tap_planner.graph.unknown import DeclaredTypes, value_info
from tap_planner.graph.values import Call, CountUnknownError, Form, Value
from tap_planner.graph.whole import WHOLE, WholeFlow
from tap_planner.operators import TensorType, lookup

_CANONICAL: dict[str, Callable[[Call], Form]] = {
    **layout.CANONICAL,
    **compute.CANONICAL,
    **contrib.CANONICAL,
    **quantised.CANONICAL,
    **recurrent.CANONICAL,
    **detection.CANONICAL,
    **sampling.CANONICAL,
    **spatial.CANONICAL,
    **signals.CANONICAL,
    **selection.CANONICAL,
}
_UNFOLDING = {**control.METHODS, **sequences.METHODS}


class Binder:
    """Holds the values made so far.

    Args:
        model: the file.
        bound: static types of the inputs.
        roles: which stored tensors are parameters.
        values: integer inputs that are constants.
        wanted: names that some node or the graph's outputs read.
        declared: types that the file itself declares, for operators without a record.
        custom: rules of operators without a record.
        kept: what earlier passes learnt of loops.
        counts: sizes that depend on the data, by value and dim.
    """

    def __init__(
        self,
        model: ModelFile,
        bound: BoundInputs,
        roles: Roles,
        values: Mapping[str, int | tuple[int, ...]],
        wanted: set[str],
        declared: DeclaredTypes,
        custom: CustomRules,
        kept: Kept | None = None,
        counts: Mapping[tuple[str, int], int] | None = None,
    ) -> None:
        self.types = Types()
        self.constants = Constants(self.types)
        self.reads = Reads(self.types)
        self._sources = Sources(self.types, self.constants, self.reads, roles, model.path.parent)
        self.values: dict[str, Value] = {}
        self.operators: list[Draft] = []
        self.warnings: list[str] = []
        self.whole = WholeFlow(self, list(model.proto.opset_import))
        self.reached: Node | None = None
        """The node that is being bound, or was last."""
        self._model = model
        self._wanted = wanted
        self._declared = declared
        self.custom = custom
        self._rebatch = bound.rebatch
        self._bound = bound
        self._kept = kept or Kept()
        self._counts = counts or {}
        self.unfolding = Unfolding(
            opset=model.opset, values=self.values, fetch=self.constants.fetch, wanted=wanted, kept=self._kept
        )
        for name, type_ in bound.types.items():
            self._add_input(name, type_, values, bound.batch_dims.get(name) is not None)
        for tensor in stored_tensors(model.proto.graph):
            if tensor.name in wanted:
                self.values[tensor.name] = self._sources.stored(tensor)

    def _add_input(
        self, name: str, type_: TensorType, values: Mapping[str, int | tuple[int, ...]], batched: bool
    ) -> None:
        interned = self.types.get(type_.dtype, type_.shape)
        if name in values:
            self.values[name] = self.constants.array(name, input_value(name, type_, values[name]))
        else:
            self.values[name] = Value(name=name, type=interned, kind=TensorKind.INPUT, batched=batched)

    def run(self, nodes: Sequence[Node], *, stop: str = "") -> None:
        """Bind all nodes.

        Args:
            nodes: in topological order.
            stop: origin of a node; what comes from it on is left out.

        Raises:
            UnsupportedGraphError: a node that cannot be planned; the message names it.
        """
        for node in self.unfolding.walk(nodes):
            self.reached = node
            if stop and node.origin == stop:
                return
            if any(output and output in self._wanted for output in node.outputs):
                try:
                    self._visit(node)
                except CountUnknownError:
                    raise
                except ModelError as error:
                    raise located(error, node.where) from error
                except DAMAGE as error:
                    text = f"{node.where}: not a valid node ({type(error).__name__}: {error})"
                    raise UnsupportedGraphError(text, hint="check the file with onnx.checker") from error
        drawn = [draft.id for draft in self.operators if lookup(draft.type).random]
        if drawn:
            names = ", ".join(drawn[:3]) + (f" and {len(drawn) - 3} more" if len(drawn) > 3 else "")
            self.warnings.append(
                f"random numbers in {names}: each is drawn by seed and global position, the same however it is split"
            )

    def _visit(self, node: Node) -> None:
        check_arity(node, self._model.opset)
        if node.type in _UNFOLDING:
            instead = _UNFOLDING[node.type](self.unfolding, node)
            if instead is not None:
                self.unfolding.replace(instead)
                return
        if node.type in SOURCES:
            made = self._sources.make(node, [self._operand(node, name) for name in node.inputs])
            if made is not None:
                self.values[node.outputs[0]] = made
                return
        if node.type in WHOLE:
            self.whole.bind(node)
            return
        call = self._call(node)
        form = _CANONICAL.get(node.type, compute.default_form)(call)
        first = form.inputs[0] if form.inputs else None
        if form.type == "Identity" and first is not None:
            self.values[node.outputs[0]] = first
            return
        fixed = lookup(node.type).random or form.type in self.custom
        if form.inputs and not fixed and all(v is None or v.is_constant for v in form.inputs):
            self._constant(call, form)
            return
        read = self.reads.folded(node.outputs[0], form)
        if read is not None:
            self.values[node.outputs[0]] = read
            return
        if self._rebatch and form.type == "Concat":
            self._widen(form)
        self._operator(node, form)

    def bind_body(self, graph: onnx.GraphProto, given: Mapping[str, Value]) -> list[Value]:
        """Values of a subgraph's results, given what it reads."""
        nodes = with_captures(decode_nodes(graph.node))
        made = {name for node in nodes for name in node.outputs}
        outer = {name for node in nodes for name in node.inputs} - made
        nodes = sort_nodes(nodes, outer)
        outputs = [value.name for value in graph.output]
        proto = onnx.ModelProto(opset_import=self._model.proto.opset_import)
        proto.graph.CopyFrom(onnx.GraphProto(node=graph.node, output=graph.output, value_info=graph.value_info))
        proto.graph.initializer.extend(graph.initializer)
        types = {name: value.type for name, value in given.items() if name not in made}
        for name, type_ in types.items():
            proto.graph.input.append(value_info(name, type_))
        bound = replace(
            self._bound,
            types=types,
            batch_dims={name: 0 if given[name].batched else None for name in types},
            rebatch=None,
        )
        kept = Kept(made=self._kept.made)
        while True:
            wanted = {name for node in nodes for name in node.inputs}
            wanted.update(outputs)
            inner = Binder(
                replace(self._model, proto=proto),
                bound,
                Roles(),
                {},
                wanted,
                DeclaredTypes(proto, self._bound.symbols, types, self._declared.inference),
                CustomRules(()),
                kept,
                self._counts,
            )
            for name, value in given.items():
                if value.array is not None:
                    inner.values[name] = inner.constants.array(name, value.array)
            try:
                inner.run(nodes)
            except control.KeptWholeError as error:
                kept.origins.add(error.origin)
            else:
                self._kept.made = kept.made
                return [inner.operand(name, "its body") for name in outputs]

    def _call(self, node: Node) -> Call:
        return Call(
            node=node,
            inputs=[self._operand(node, name) for name in node.inputs],
            opset=self._model.opset,
            fetch=self.constants.fetch,
            rebatch=self._rebatch,
            wanted=self._wanted,
            declared=self.declared_type,
            count=self._count,
            origin=lambda value: origin(self.operators, value, self.constants.fetch),
        )

    def _count(self, name: str, dim: int) -> int | None:
        """A size that the user gave, by the name of the value or by a symbol that was traced to it."""
        given = self._bound.symbols.get(f"{name}.{dim}")
        return self._counts.get((name, dim)) if given is None else given

    def declared_type(self, name: str) -> TensorType | None:
        """What the file declares of a value, with the symbolic dims bound."""
        found = self._declared.types([name])
        return None if found is None else found[0]

    def _operand(self, node: Node, name: str) -> Value | None:
        return self.operand(name, node.where) if name else None

    def operand(self, name: str, where: str) -> Value:
        """The value called ``name``.

        Args:
            name: of a value.
            where: words for who reads it.

        Raises:
            UnsupportedGraphError: nothing has made it.
        """
        found = self.values.get(name)
        if found is not None:
            return found
        items = self.unfolding.sequences.get(name)
        if items is not None:
            raise UnsupportedGraphError(
                f"{where}: reads {name!r}, a sequence of {len(items)} tensors, expected a tensor",
                hint="sequences are planned only between operators that make and read them inside the model",
            )
        if name in self.unfolding.absent:
            raise UnsupportedGraphError(f"{where}: reads {name!r}, an optional that holds nothing")
        raise UnsupportedGraphError(f"{where}: reads {name!r}, which has no value")

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
            depth = form.inputs[0].shape[-1] if form.type == "MatMul" and form.inputs[0] is not None else 1
            most = max(item.num_elements for item in types)
            small = most <= SMALL_ELEMENTS and most * depth <= MAX_FETCH
            if small and not deferred and self.constants.affords(v.name for v in form.inputs if v is not None):
                arrays = [None if v is None else self.constants.fetch(v.name) for v in form.inputs]
                self._bind_arrays(node, self._evaluate(node, form, arrays))
                return
            made = self.constants.recipe(
                node.outputs,
                types,
                lambda arrays: evaluate(form.type, form.attributes, arrays),
                form.inputs,
                f"{form.type}{attributes}",
                depth=depth,
            )
            self.values.update(zip(node.outputs, made, strict=True))
            return
        types = self._known_types(form, attributes, len(node.outputs))
        if types and types[0].is_float and any(value is not None and value.deferred for value in form.inputs):
            self._operator(node, form)
            return
        operands = [None if value is None else self.constants.fetch(value.name) for value in call.inputs]
        if is_cheap(node, call.opset, operands, types):
            self._bind_arrays(node, evaluate_node(node.proto, call.opset, operands))
        elif types is None:
            raise call.error("makes a constant that is too large to be computed while the model is read")
        else:
            self._operator(node, form)

    def _known_types(self, form: Form, attributes: tuple, num_outputs: int) -> Sequence[TensorType] | None:
        """Types of a computation's results by its record, None where that does not say (it depends on values)."""
        if not lookup(form.type).known:
            return None
        try:
            inputs = [None if value is None else value.type for value in form.inputs]
            return self.types.infer(form.type, attributes, inputs, num_outputs)
        except ModelError:
            return None

    def _evaluate(self, node: Node, form: Form, arrays: list[np.ndarray | None]) -> list[np.ndarray]:
        try:
            return evaluate(form.type, form.attributes, arrays)
        except (ValueError, IndexError, TypeError, ZeroDivisionError) as error:
            raise UnsupportedGraphError(f"{node.where}: its constant value cannot be computed ({error})") from error

    def _bind_arrays(self, node: Node, arrays: Sequence[np.ndarray]) -> None:
        names = node.outputs if len(arrays) == len(node.outputs) else [name for name in node.outputs if name]
        for name, array in zip(names, arrays, strict=False):
            if name:
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
        first = next(name for name in node.outputs if name)
        made = [name or f"{first}__unused_{index}" for index, name in enumerate(names)]
        self._emit(form, made, node.name)

    def _emit(self, form: Form, names: Sequence[str], label: str) -> list[Value]:
        self.custom.attach(form)
        attributes = tuple(sorted(form.attributes.items()))
        return self.add(form, names, label, self._output_types(form, attributes, names))

    def is_wanted(self, name: str) -> bool:
        """Whether some node or the graph's outputs read a value."""
        return name in self._wanted

    def fetch(self, name: str) -> np.ndarray:
        """Value of a constant by name."""
        return self.constants.fetch(name)

    def add(self, form: Form, names: Sequence[str], label: str, types: Sequence[TensorType]) -> list[Value]:
        """Append an operator whose result types are known."""
        types = [self.types.get(item.dtype, item.shape) for item in types]
        attributes = tuple(sorted(form.attributes.items()))
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
        inputs = [None if value is None else value.type for value in form.inputs]
        if form.type in self.custom:
            found = self.custom.infer(form.type, lambda: self.types.infer(form.type, attributes, inputs, len(names)))
            if not self._rebatch:  # else the file's shapes are those of a batch of one, and that run is checked
                self.custom.check_declared(form.type, names, found, self.declared_type)
            return found
        if lookup(form.type).known:
            return self.types.infer(form.type, attributes, inputs, len(names))
        types = self._declared.types(names)
        if types is None:
            raise UnsupportedGraphError(
                f"operator {form.type} is not known and the file declares no static shape for {', '.join(names)}",
                hint="describe it with --custom-rule FILE, add its output shapes to the file's value_info, "
                "or export without it",
            )
        return [self.types.get(item.dtype, item.shape) for item in types]
