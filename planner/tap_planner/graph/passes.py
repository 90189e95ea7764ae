"""The passes over a model's nodes that end in values and operators of static shape.

Most models take one. Unfolded control flow takes a second one, because which stored tensors are parameters is decided
on plain nodes; sizes that depend on data take probes, and so does the search for words when something does not fit.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
from onnx import TensorProto

from tap_planner.errors import TapError, UnsupportedGraphError, UsageError
from tap_planner.graph.binding import Binder
from tap_planner.graph.constraints import explained
from tap_planner.graph.control import KeptWholeError
from tap_planner.graph.counts import check_derived, solve_counts
from tap_planner.graph.custom import CustomRules
from tap_planner.graph.dims import BoundInputs, bind_inputs
from tap_planner.graph.dtypes import dtype_name
from tap_planner.graph.loading import ModelFile
from tap_planner.graph.nodes import Node, decode_nodes, sort_nodes
from tap_planner.graph.options import BindOptions
from tap_planner.graph.rebatch import prove_rebatched
from tap_planner.graph.roles import Roles, Stored, find_roles
from tap_planner.graph.sparse import StoredTensor, constant_tensor, stored_tensors
from tap_planner.graph.unfolding import Kept, with_captures
from tap_planner.graph.unknown import DeclaredTypes, Inference
from tap_planner.graph.values import CountUnknownError
from tap_planner.operators import TensorType


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """What the last pass gave."""

    inputs: BoundInputs
    roles: Roles
    binder: Binder
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """A pass with other sizes; ``binder`` holds what was bound before ``error``, if there was one."""

    binder: Binder
    error: TapError | None


@dataclass(slots=True, kw_only=True, eq=False)
class _Passes:
    model: ModelFile
    options: BindOptions
    inputs: list[onnx.ValueInfoProto]
    bound: BoundInputs
    nodes: list[Node]
    kept: Kept = field(default_factory=Kept)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)
    inference: Inference = field(default_factory=Inference)

    @property
    def outputs(self) -> list[str]:
        return [value.name for value in self.model.proto.graph.output]

    def run(self) -> tuple[Roles, Binder]:
        """Pass until nothing is left to unfold and to find out."""
        nodes = self.nodes
        roles = self._roles(nodes)
        before: Binder | None = None
        while True:
            binder = self._binder(self.bound, roles, nodes)
            if before is not None:
                binder.unfolding.inherit(before.unfolding)
            try:
                binder.run(nodes)
            except KeptWholeError as error:
                self.kept.origins.add(error.origin)
                continue
            except CountUnknownError as error:
                found = solve_counts(self, error)
                self.counts.update(found)
                continue
            except UnsupportedGraphError as error:
                rest = binder.unfolding.rest()
                if binder.unfolding.changed and rest is not None:
                    # Roles that are decided on unfolded nodes may be others.
                    plain = [*binder.unfolding.visited, *rest]
                    roles_again = self._roles(plain)
                    if roles_again != roles:
                        nodes, roles, before = plain, roles_again, binder
                        continue
                raise explained(self, error, binder) from error
            if binder.unfolding.changed:
                nodes = binder.unfolding.visited
                roles_again = self._roles(nodes)
                if roles_again != roles:
                    roles, before = roles_again, binder
                    continue
            binder.warnings.extend(binder.custom.unused({node.type for node in nodes}))
            if self.bound.rebatch:
                self._prove(binder, roles, nodes)
            return roles, binder

    def probe(
        self, dims: Mapping[str, int], counts: Mapping[tuple[str, int], int] | None = None, *, stop: str = ""
    ) -> Probe | None:
        """Bind with other sizes.

        Args:
            dims: symbolic dims that get another size.
            counts: sizes that depend on data.
            stop: origin of the node before which it ends; empty: at the end.

        Returns:
            None where these sizes do not fit the inputs.
        """
        options = replace(self.options, batch=None, dims={**self.bound.symbols, **dims}, shapes=self._rankless())
        try:
            bound = bind_inputs(self.inputs, options, self.model.proto.graph)
            binder = self._binder(bound, self._roles(self.nodes), self.nodes, counts)
        except TapError:
            return None
        try:
            binder.run(self.nodes, stop=stop)
        except TapError as error:
            return Probe(binder=binder, error=error)
        except KeptWholeError:
            return None
        return Probe(binder=binder, error=None)

    def _rankless(self) -> dict[str, tuple[int, ...]]:
        """Shapes of inputs that have no rank in the file; those of the others are their dims."""
        ranked = {value.name for value in self.inputs if value.type.tensor_type.HasField("shape")}
        return {name: shape for name, shape in self.options.shapes.items() if name not in ranked}

    def _binder(
        self,
        bound: BoundInputs,
        roles: Roles,
        nodes: Sequence[Node],
        counts: Mapping[tuple[str, int], int] | None = None,
    ) -> Binder:
        wanted = {name for node in nodes for name in node.inputs}
        wanted.update(self.outputs)
        return Binder(
            self.model,
            bound,
            roles,
            self.options.values,
            wanted,
            DeclaredTypes(self.model.proto, bound.symbols, bound.types, self.inference),
            CustomRules(self.options.custom_rules),
            self.kept,
            self.counts if counts is None else counts,
        )

    def _prove(self, binder: Binder, roles: Roles, nodes: Sequence[Node]) -> None:
        """Bind the model as it is written and compare."""
        assert self.bound.rebatch is not None
        original = self._binder(_unbatched(self.bound), roles, nodes)
        original.run(nodes)
        prove_rebatched(binder.operators, original.values, self.bound.rebatch)

    def _roles(self, nodes: Sequence[Node]) -> Roles:
        stored: dict[str, Stored] = {}
        for tensor in stored_tensors(self.model.proto.graph):
            stored[tensor.name] = _stored(tensor, external=bool(tensor.outside))
        for node in nodes:
            if node.type == "Constant" and node.outputs:
                held = constant_tensor(node)
                stored[node.outputs[0]] = Stored(dtype="int64", size=None, rank=None) if held is None else _stored(held)
            elif node.type == "ConstantOfShape" and node.outputs and node.inputs and node.inputs[0] in stored:
                tensor = node.attributes.get("value")
                dtype = dtype_name(tensor.data_type) if isinstance(tensor, TensorProto) else "float32"
                stored[node.outputs[0]] = Stored(dtype=dtype, size=None, rank=stored[node.inputs[0]].size)
        trainable = {rule.type: rule.trainable for rule in self.options.custom_rules}
        dynamic = [value.name for value in self.inputs if value.name not in self.options.values]
        return find_roles(nodes, dynamic, stored, self.outputs, trainable)


def bind_nodes(model: ModelFile, options: BindOptions) -> Bound:
    """Bind all nodes of a model.

    Raises:
        TapError: an option does not fit, or a node cannot be planned.
    """
    graph = model.proto.graph
    stored_names = {tensor.name for tensor in stored_tensors(graph)}
    inputs = [value for value in graph.input if value.name not in stored_names]
    _check_values(options.values, inputs)
    bound = bind_inputs(inputs, options, graph)
    decoded = with_captures(decode_nodes(graph.node))
    nodes = sort_nodes(decoded, [*stored_names, *(value.name for value in inputs)])
    passes = _Passes(model=model, options=options, inputs=inputs, bound=bound, nodes=nodes)
    roles, binder = passes.run()
    check_derived(graph, bound, binder.values)
    notes = (*model.notes, *bound.notes, *_sorting_note(decoded, nodes))
    return Bound(inputs=bound, roles=roles, binder=binder, notes=notes)


def _sorting_note(decoded: Sequence[Node], nodes: Sequence[Node]) -> tuple[str, ...]:
    moved = next((old for old, new in zip(decoded, nodes, strict=True) if old is not new), None)
    if moved is None:
        return ()
    return (f"the nodes are not in topological order in the file (first at {moved.where}): they were sorted",)


def _check_values(values: Mapping[str, int | tuple[int, ...]], inputs: Sequence[onnx.ValueInfoProto]) -> None:
    known = {value.name: value for value in inputs}
    for name in values:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
            raise UsageError(f"--value {name}: the model has no such input", hint=f"inputs: {', '.join(near)}")
        dtype = dtype_name(known[name].type.tensor_type.elem_type)
        if not dtype.startswith(("int", "uint", "bool")):
            raise UsageError(f"--value {name}: the input is {dtype}, expected an integer or boolean one")


def _stored(tensor: StoredTensor, *, external: bool = False) -> Stored:
    return Stored(dtype=tensor.dtype, size=math.prod(tensor.dims), rank=len(tensor.dims), external=external)


def _unbatched(bound: BoundInputs) -> BoundInputs:
    """The inputs as the file has them, with a leading 1."""
    types = {
        name: type_ if bound.batch_dims[name] is None else TensorType(dtype=type_.dtype, shape=(1, *type_.shape[1:]))
        for name, type_ in bound.types.items()
    }
    return replace(bound, types=types, batch=1, rebatch=None)
