"""``bind``: from a model file and options to the immutable graph."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from tap_planner.collector import collector_paused
from tap_planner.errors import ModelError, UnsupportedGraphError
from tap_planner.graph.constants import ConstantStore
from tap_planner.graph.counts import assumed_counts
from tap_planner.graph.digest import graph_digest
from tap_planner.graph.drafts import Draft
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.options import BindOptions
from tap_planner.graph.outputs import append_outputs
from tap_planner.graph.passes import Bound, bind_nodes
from tap_planner.graph.simplify import drop_dead, hoist_preamble, merge_reshapes, resolve
from tap_planner.graph.training import choose_trainable, declared_untrained, gradient_values, make_loss
from tap_planner.graph.types import Graph, Operator, Parameter, Tensor
from tap_planner.graph.values import Value
from tap_planner.operators import OperatorSignature


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
        with collector_paused():
            return _bind(model, options)
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        # Nodes are guarded one by one; what is left are damaged declarations (names that are no text, say).
        message = f"{model.path}: not a valid ONNX graph ({type(error).__name__}: {error})"
        raise ModelError(message, hint="check the file with onnx.checker") from error


def _bind(model: ModelFile, options: BindOptions) -> Graph:
    bound = bind_nodes(model, options)
    return _Assembly(model, options, bound).graph([value.name for value in model.proto.graph.output])


class _Assembly:
    """Turns the binder's drafts into the graph."""

    def __init__(self, model: ModelFile, options: BindOptions, bound: Bound) -> None:
        self._model = model
        self._options = options
        self._bound = bound.inputs
        self._roles = bound.roles
        self._binder = bound.binder
        self._notes = bound.notes
        self._new_positions: int | None = None

    def graph(self, output_names: Sequence[str]) -> Graph:
        """The finished graph."""
        binder, options = self._binder, self._options
        results = [self._result(name) for name in output_names]
        operators, renamed = merge_reshapes(binder.operators, results)
        results = [resolve(value, renamed) for value in results]
        operators = hoist_preamble(drop_dead(operators, results))
        warnings = [*self._notes, *binder.warnings]
        loss: Value | None = None
        labels: Value | None = None
        if options.training:
            made = make_loss(options.loss, results, output_names, set(binder.values), binder.types)
            operators.append(made.operator)
            loss, labels = made.operator.outputs[0], made.labels
            warnings.extend(made.warnings)
        elif options.ends:
            ends = append_outputs(operators, results, output_names, set(binder.values))
            operators, results, self._new_positions = ends.operators, ends.results, ends.new_positions
        operators = drop_dead(operators, [*results, *([loss] if loss else [])])
        warnings.extend(assumed_counts(operators))
        warnings.extend(binder.whole.warnings(operators, training=options.training))
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
        self._binder.whole.check_gradients(drafts, with_gradient)
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
        signatures: dict[OperatorSignature, OperatorSignature] = {}
        operators = tuple(_operator(draft, signatures) for draft in drafts)
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
            ruled=self._binder.custom.used,
            bodies=self._binder.whole.carried(drafts),
            is_batch_fixed=self._bound.is_batch_fixed,
            new_positions=self._new_positions,
        )

    def _result(self, name: str) -> Value:
        if name in self._binder.values or name in self._binder.unfolding.sequences:
            return self._binder.operand(name, "the graph's outputs")
        raise UnsupportedGraphError(f"graph output {name!r} is made by no node, input or initializer")

    def _trainable(self, values: Sequence[Value]) -> set[str]:
        stored = {
            value.read.parameter: self._binder.reads.stored[value.read.parameter] for value in values if value.read
        }
        meant = self._roles.trainable - declared_untrained(self._model.proto)
        return choose_trainable(stored, meant, self._options.freeze, self._options.train)

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


def _operator(draft: Draft, signatures: dict[OperatorSignature, OperatorSignature]) -> Operator:
    """The finished operator; equal signatures are one object."""
    signature = draft.signature
    return Operator(
        id=draft.id,
        name=draft.name,
        signature=signatures.setdefault(signature, signature),
        inputs=tuple(None if value is None else value.name for value in draft.inputs),
        outputs=tuple(value.name for value in draft.outputs),
    )


__all__ = ["bind"]
