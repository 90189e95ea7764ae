"""The example inputs: bound to ``forward``, named, and with the dims that stay open."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tap_planner.capture.standins import stand_in
from tap_planner.errors import CaptureError

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout)
"""What an argument may hold beside tensors: it becomes part of the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What ``forward`` is traced with."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    names: tuple[str, ...]
    """Of the tensors among them, in the order of the signature."""
    dims: Mapping[str, Mapping[int, str]]
    """For each tensor name its dims that stay open."""
    dynamic_shapes: Any
    """The same, as torch.export wants it; None if no dim stays open."""


def check_module(module: object, *, weights: bool) -> None:
    """Refuse what cannot be exported before anything is traced.

    Raises:
        CaptureError: no module, or values are wanted that do not exist.
    """
    if not isinstance(module, torch.nn.Module):
        raise CaptureError(f"export_graph takes a torch.nn.Module, got {type(module).__name__}")
    stored = (*module.named_parameters(), *module.named_buffers())
    absent = next((name for name, tensor in stored if tensor.is_meta), None)
    if absent is not None and weights:
        raise CaptureError(
            f"{absent!r} is on the meta device and has no values to write",
            hint="export with weights=False, or load the weights first",
        )


def bind_arguments(
    module: torch.nn.Module, example_inputs: object, dynamic_dims: Mapping[str, Mapping[int, str]]
) -> Arguments:
    """Bind example inputs to the signature of ``forward``.

    Raises:
        CaptureError: they do not fit, or ``dynamic_dims`` names what does not exist.
    """
    signature = inspect.signature(module.forward)
    bound = _bound(signature, example_inputs)
    tensors, owners = _named_tensors(signature, bound)
    _check_containers(bound)
    if not tensors:
        raise CaptureError("the example inputs hold no tensor", hint="pass the tensors that forward takes")
    dims = _resolve(dynamic_dims, tensors, owners)
    args, kwargs = _split(signature, bound)
    shapes = torch.export.ShapesCollection()
    for name, labels in dims.items():
        shapes[tensors[name]] = dict.fromkeys(labels, torch.export.Dim.DYNAMIC)
    return Arguments(
        args=args,
        kwargs=kwargs,
        names=tuple(tensors),
        dims=dims,
        dynamic_shapes=shapes.dynamic_shapes(module, args, kwargs) if dims else None,
    )


def _bound(signature: inspect.Signature, example_inputs: object) -> inspect.BoundArguments:
    args: Sequence[object] = ()
    kwargs: Mapping[str, object] = {}
    if isinstance(example_inputs, torch.Tensor):
        args = (example_inputs,)
    elif isinstance(example_inputs, Mapping):
        kwargs = {str(name): value for name, value in example_inputs.items()}
    elif isinstance(example_inputs, (list, tuple)):
        args = tuple(example_inputs)
    else:
        raise CaptureError(
            f"example_inputs is {type(example_inputs).__name__}, expected a tensor, a sequence or a mapping"
        )
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise CaptureError(
            f"the example inputs do not fit forward{signature}: {error}",
            hint="pass a tuple of positional arguments or a mapping of argument names",
        ) from error
    fresh = pytree.tree_map_only(torch.Tensor, _fresh, dict(bound.arguments))
    bound.arguments.update(fresh)
    return bound


def _fresh(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of its own for each place (torch.export takes one that occurs twice for one input), on the CPU."""
    return stand_in(tensor, "an example input") if tensor.is_meta else tensor.detach().cpu()


def _named_tensors(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors by name, and the argument that each belongs to."""
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[str, str] = {}
    for argument, value in bound.arguments.items():
        for path, leaf in leaves(value):
            if not isinstance(leaf, torch.Tensor):
                continue
            variadic = signature.parameters[argument].kind is inspect.Parameter.VAR_KEYWORD
            parts = path if variadic else (argument, *path)
            name = unique("_".join(parts), tensors)
            tensors[name] = leaf
            owners[name] = path[0] if variadic else argument
    return tensors, owners


def _check_containers(bound: inspect.BoundArguments) -> None:
    """Objects that hold tensors where the exporter does not see them are no constants."""
    for argument, value in bound.arguments.items():
        for _, leaf in leaves(value):
            if not isinstance(leaf, (torch.Tensor, *_CONSTANTS)):
                kind = type(leaf).__name__
                raise CaptureError(
                    f"argument {argument!r} holds a {kind}, whose tensors torch's exporter does not see",
                    hint="wrap the module in one that takes tensors, lists and mappings and makes the object itself",
                )


def leaves(value: object) -> list[tuple[tuple[str, ...], object]]:
    """Leaves of a nested value with the keys that lead to each."""
    try:
        found, _ = pytree.tree_flatten_with_path(value)
    except ValueError:  # a container that knows its leaves but not their keys
        return [((str(index),), leaf) for index, leaf in enumerate(pytree.tree_leaves(value))]
    return [(tuple(_key(key) for key in path), leaf) for path, leaf in found]


def _key(key: object) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def unique(name: str, taken: Iterable[str]) -> str:
    """``name``, or ``name_1``, ``name_2``, ... where that is taken."""
    known = taken if isinstance(taken, (dict, set)) else set(taken)
    candidate, count = name, 0
    while candidate in known:
        count += 1
        candidate = f"{name}_{count}"
    return candidate


def _split(signature: inspect.Signature, bound: inspect.BoundArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments for a call: by name wherever the signature allows it, as torch.onnx takes a last mapping for names."""
    kinds = {signature.parameters[name].kind for name in bound.arguments}
    if kinds & {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL}:
        return bound.args, dict(bound.kwargs)
    kwargs: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            kwargs.update(value)
        else:
            kwargs[name] = value
    return (), kwargs


def _resolve(
    dynamic_dims: Mapping[str, Mapping[int, str]], tensors: Mapping[str, torch.Tensor], owners: Mapping[str, str]
) -> dict[str, dict[int, str]]:
    resolved: dict[str, dict[int, str]] = {}
    for key, labels in dynamic_dims.items():
        names = [key] if key in tensors else [name for name, owner in owners.items() if owner == key]
        if not names:
            known = tuple(dict.fromkeys((*tensors, *owners.values())))
            near = difflib.get_close_matches(str(key), known, n=1)
            raise CaptureError(
                f"dynamic_dims names input {key!r}, the inputs are {', '.join(tensors)}",
                hint=f"did you mean {near[0]!r}?"
                if near
                else "name an input, or the argument of forward that holds it",
            )
        if not isinstance(labels, Mapping):
            raise CaptureError(f"dynamic_dims[{key!r}] is {labels!r}, expected a mapping such as {{0: 'batch'}}")
        for name in names:
            for dim, label in labels.items():
                resolved.setdefault(name, {})[_dim(name, tensors[name], dim, label)] = label
    return resolved


def _dim(name: str, tensor: torch.Tensor, dim: object, label: object) -> int:
    rank = tensor.dim()
    if not isinstance(dim, int) or isinstance(dim, bool) or not -rank <= dim < rank:
        raise CaptureError(f"dynamic_dims names dim {dim!r} of {name!r}, which has {rank} dims")
    if not isinstance(label, str) or not label.isidentifier():
        raise CaptureError(
            f"dim {dim} of {name!r} is called {label!r}, expected a plain name", hint="use letters, digits and _"
        )
    return dim % rank
