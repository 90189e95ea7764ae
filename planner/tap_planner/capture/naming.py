"""Names: parameters as PyTorch calls them, inputs by argument, outputs by key, everything else out of their way."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from tap_planner.capture.arguments import Arguments, leaves, unique
from tap_planner.errors import CaptureError

_KEPT_BYTES = 1 << 20
"""Tensors that the structure needs stay in a file without weights up to this size."""


class StoredValue(Protocol):
    """A tensor as the exporter holds it: element type as ONNX numbers it, static shape, bytes when asked."""

    @property
    def dtype(self) -> Any:
        """ONNX element type."""
        ...

    @property
    def shape(self) -> Any:
        """Static sizes."""
        ...

    @property
    def nbytes(self) -> int:
        """Size of the data."""
        ...

    def tobytes(self) -> bytes:
        """The data, little-endian and contiguous."""
        ...

    def tofile(self, file: Any) -> None:
        """Write the data without holding a copy of it."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredTensor:
    """A parameter, a buffer, or a tensor made in ``forward`` from Python numbers."""

    name: str
    value: StoredValue
    is_parameter: bool
    is_trainable: bool
    """A parameter that requires a gradient."""
    has_value: bool
    """False on the meta device."""
    is_index: bool
    """Integer or boolean: positions, masks."""
    is_structure: bool
    """Stays in a file without weights: an integer tensor (positions, masks), or a table that no state dict holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedGraph:
    """The names that the file will hold; the traced graph has been renamed to them."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    copies: tuple[tuple[str, str], ...]
    """(value, output) where an output is an input, a stored tensor or another output, which needs a copy of it."""
    stored: tuple[StoredTensor, ...]
    batch_statistics: frozenset[str]
    """Outputs of batch-norm nodes that normalise by the batch (modules in training mode)."""


def name_values(
    program: torch.onnx.ONNXProgram,
    module: torch.nn.Module,
    arguments: Arguments,
    output_names: Sequence[str] | None,
    originals: Mapping[int, torch.Tensor],
) -> NamedGraph:
    """Rename the traced graph in place.

    Args:
        program: the traced graph.
        module: what was traced, as it was traced (with its stand-ins).
        arguments: the names of the inputs, and dims.
        output_names: names of the outputs, if they are given.
        originals: tensors by the address of their stand-ins.

    Raises:
        CaptureError: ``output_names`` does not fit.
    """
    graph = program.model.graph
    values = _take_stored(program, module)
    stored = [name for name, _ in values]
    inputs = []
    for value, name in zip(graph.inputs, arguments.names, strict=True):
        value.name = unique(name, {*stored, *inputs})
        inputs.append(value.name)
    outputs = _output_names(program, output_names, {*stored, *inputs})
    kept = {*(id(value) for _, value in values), *(id(value) for value in graph.inputs)}
    copies: list[int] = []
    for index, value in enumerate(graph.outputs):
        if id(value) in kept:
            copies.append(index)
        else:
            value.name = outputs[index]
            kept.add(id(value))
    taken = {*stored, *inputs, *outputs}
    for node in graph.all_nodes():
        for value in node.outputs:
            if id(value) not in kept and value.name is not None:
                value.name = unique(value.name, taken)
                taken.add(value.name)
    trainable = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    return NamedGraph(
        inputs=tuple(inputs),
        outputs=tuple(outputs),
        copies=tuple((str(graph.outputs[index].name), outputs[index]) for index in copies),
        stored=tuple(_stored_tensor(program, name, value.const_value, originals, trainable) for name, value in values),
        batch_statistics=frozenset(_batch_statistics(graph)),
    )


def _take_stored(program: torch.onnx.ONNXProgram, module: torch.nn.Module) -> list[tuple[str, Any]]:
    """Take the initializers out of the graph, which then serialises without weights, and rename the tied ones.

    The exporter calls a tied parameter by its last name; ``named_parameters`` gives it its first.
    """
    initializers = program.model.graph.initializers
    values = list(initializers.items())
    first: dict[int, str] = {}
    canonical: dict[str, str] = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            canonical[name] = first.setdefault(id(tensor), name)
    initializers.clear()
    present = {name for name, _ in values}
    renamed: list[tuple[str, Any]] = []
    for name, value in values:
        if value.const_value is None:
            raise CaptureError(f"{name!r} of the module is no plain tensor and cannot be stored")
        value.name = name if canonical.get(name) in present else canonical.get(name, name)
        renamed.append((value.name, value))
    return renamed


def _stored_tensor(
    program: torch.onnx.ONNXProgram,
    name: str,
    value: Any,
    originals: Mapping[int, torch.Tensor],
    trainable: Collection[str],
) -> StoredTensor:
    exported = program.exported_program
    assert exported is not None
    spec = next((spec for spec in exported.graph_signature.input_specs if spec.target == value.name), None)
    original = originals.get(value.raw.data_ptr()) if value.raw.numel() else None
    has_value = original is None or not original.is_meta
    in_state = spec is not None and spec.kind is InputKind.BUFFER and spec.persistent is not False
    is_parameter = spec is not None and spec.kind is InputKind.PARAMETER
    is_index = not (is_parameter or value.raw.is_floating_point() or value.raw.is_complex())
    supplied = is_parameter or (in_state and not is_index)
    return StoredTensor(
        name=name,
        value=type(value)(original, name) if original is not None and has_value else value,
        is_parameter=is_parameter,
        is_trainable=name in trainable,
        has_value=has_value,
        is_index=is_index,
        is_structure=has_value and not supplied and value.nbytes <= _KEPT_BYTES,
    )


def _output_names(program: torch.onnx.ONNXProgram, given: Sequence[str] | None, taken: set[str]) -> list[str]:
    exported = program.exported_program
    assert exported is not None
    specs = [spec for spec in exported.graph_signature.output_specs if spec.kind is OutputKind.USER_OUTPUT]
    tensors = [index for index, spec in enumerate(specs) if hasattr(spec.arg, "name") and spec.arg.name]
    assert len(tensors) == len(program.model.graph.outputs)
    if given is not None:
        if len(given) != len(tensors) or len(set(given)) != len(given):
            raise CaptureError(
                f"output_names holds {len(given)} names ({', '.join(given)}), forward returns {len(tensors)} tensors",
                hint="give each tensor one name of its own",
            )
        clash = next((name for name in given if name in taken), None)
        if clash is not None:
            raise CaptureError(f"output_names calls an output {clash!r}, as an input or parameter is called")
        return list(given)
    names: list[str] = []
    paths = _output_paths(exported, len(specs))
    for index in tensors:
        name = "_".join(paths[index])
        if not name or name[0].isdigit():
            name = f"output_{name}" if name else "output"
        names.append(unique(f"{name}_out" if name in taken else name, {*taken, *names}))
    return names


def _output_paths(exported: torch.export.ExportedProgram, count: int) -> list[tuple[str, ...]]:
    """The keys that lead to each tensor in what ``forward`` returns."""
    spec = exported.call_spec.out_spec
    if spec is None or spec.num_leaves != count:
        return [(str(index),) for index in range(count)]
    return [path for path, _ in leaves(pytree.tree_unflatten(list(range(count)), spec))]


_TRAINED_AT = {"_native_batch_norm_legit_functional": 5, "_native_batch_norm_legit": 5, "native_batch_norm": 5}
"""Position of the argument ``training`` of the operators that batch normalisation becomes."""


def _batch_statistics(graph: Any) -> Iterator[str]:
    """Batch-norm nodes of modules in training mode.

    The exporter writes them all as if the module were in evaluation mode.
    """
    for node in graph.all_nodes():
        origin = node.meta.get("node")
        if node.op_type != "BatchNormalization" or origin is None:
            continue
        position = _TRAINED_AT.get(getattr(origin.target, "_opname", ""))
        if position is None or len(origin.args) <= position:
            continue
        stored_mean = origin.args[3] is not None  # else the exporter computes the statistics itself
        if stored_mean and origin.args[position] is True:
            yield str(node.outputs[0].name)
