"""The use case: trace a module, give everything its PyTorch name, write one file."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import CaptureError

if TYPE_CHECKING:
    import torch

_log = logging.getLogger("tap_planner")

INLINE_LIMIT_BYTES = 1 << 30
"""Weights up to so many bytes lie in the ONNX file itself, larger ones beside it. (Protobuf ends at 2 GiB.)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class CapturedGraph:
    """What was written."""

    path: Path
    """The ONNX file."""
    weights_path: Path | None
    """The file of weights beside it, if there is one."""
    inputs: tuple[str, ...]
    """Names of the graph's inputs, in the order of the module's arguments."""
    outputs: tuple[str, ...]
    """Names of the graph's outputs, in the order in which ``forward`` returns them."""
    parameters: tuple[str, ...]
    """Names as in ``module.named_parameters()``, without those that ``forward`` never reads."""
    num_nodes: int
    num_bytes: int
    """Size of the ONNX file."""


def export_graph(
    module: torch.nn.Module,
    example_inputs: torch.Tensor | Sequence[object] | Mapping[str, object],
    path: str | Path,
    *,
    weights: bool = True,
    dynamic_dims: Mapping[str, Mapping[int, str]] | None = None,
    output_names: Sequence[str] | None = None,
    inline_limit_bytes: int = INLINE_LIMIT_BYTES,
) -> CapturedGraph:
    """Write a module as an ONNX file that is fit for planning and training.

    Parameters keep the names of ``module.named_parameters()``; none is merged with another, folded or transposed; a
    tied one is stored once. The module is exported as it is: call ``module.eval()`` first unless batch statistics and
    dropout are wanted. An existing file is replaced when the new one is complete, not before.

    Args:
        module: real, or on the meta device (then only ``weights=False``).
        example_inputs: the arguments of ``forward``: one tensor, a sequence of positional arguments, or a mapping of
            argument names. Only shapes and dtypes of tensors matter; what is no tensor becomes part of the graph.
        path: the ONNX file to write.
        weights: whether values are written. Without them parameters are declared as lying in a file that does not
            exist; what the graph's structure needs (integer buffers, tables outside the state dict) stays.
        dynamic_dims: for an input (or an argument that holds several) the names of dims whose size stays open, such as
            ``{"input_ids": {0: "batch", 1: "seq"}}``. All others are fixed at the size of the example.
        output_names: names of the outputs; by default those of the returned mapping or ``output``.
        inline_limit_bytes: weights that together are larger lie in ``<path>.data`` instead.

    Raises:
        CaptureError: an argument is wrong, torch is absent, the module cannot be traced, or the file not be written.
    """
    for package in ("torch", "onnxscript"):
        if find_spec(package) is None:
            raise CaptureError(f"exporting a module needs {package}", hint="pip install 'tap-planner[apply]'")
    from tap_planner.capture.arguments import bind_arguments, check_module
    from tap_planner.capture.naming import name_values
    from tap_planner.capture.proto import finished_proto
    from tap_planner.capture.standins import on_cpu
    from tap_planner.capture.tracing import trace
    from tap_planner.capture.writing import check_target, write_model

    target = Path(path)
    check_target(target)
    check_module(module, weights=weights)
    arguments = bind_arguments(module, example_inputs, dynamic_dims or {})
    with on_cpu(module) as originals:
        program = trace(module, arguments)
        names = name_values(program, module, arguments, output_names, originals)
    proto = finished_proto(program, names, arguments)
    for item in names.stored:
        if item.is_index and not item.has_value:
            _log.warning(
                "%r has no value on the meta device: a plan of this file will not fit one that holds it "
                "(build the module under tap_planner.capture.parameters_on_meta)",
                item.name,
            )
    weights_path = write_model(target, proto, names.stored, weights=weights, inline_limit_bytes=inline_limit_bytes)
    return CapturedGraph(
        path=target,
        weights_path=weights_path,
        inputs=names.inputs,
        outputs=names.outputs,
        parameters=tuple(item.name for item in names.stored if item.is_parameter),
        num_nodes=len(proto.graph.node),
        num_bytes=target.stat().st_size,
    )
