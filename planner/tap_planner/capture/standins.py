"""Tracing on the CPU whatever device a module lies on, the meta device included.

The exporter names values by counting operators, and traces a few operators differently on other devices: a module
traced on the meta device would give another graph than the same module with weights. So tensors of other devices are
replaced for the time of tracing by ones on the CPU whose memory is asked for but never touched, which costs address
space and no memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch

from tap_planner.errors import CaptureError


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Build modules whose parameters are on the meta device and whose buffers have values.

    Under ``torch.device("meta")`` buffers lose theirs too: positions, masks and rotary tables, which are part of the
    graph that is planned.
    """
    register = torch.nn.Module.register_parameter

    def registered(self: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(self, name, param)
        kept = self._parameters[name]
        if kept is not None and not kept.is_meta:
            self._parameters[name] = torch.nn.Parameter(kept.to("meta"), requires_grad=kept.requires_grad)

    torch.nn.Module.register_parameter = registered
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register


@contextmanager
def on_cpu(module: torch.nn.Module) -> Iterator[Mapping[int, torch.Tensor]]:
    """Replace parameters, buffers and tensor attributes that are not on the CPU; they are put back in the end.

    Yields:
        The replaced tensors by the address of what stands in for them.
    """
    originals: dict[int, torch.Tensor] = {}
    made: dict[int, torch.Tensor] = {}
    undo: list[tuple[MutableMapping[str, Any], str, torch.Tensor]] = []
    try:
        for part in module.modules():
            tables: tuple[Any, ...] = (part._parameters, part._buffers, vars(part))
            for table in tables:
                for name, tensor in tuple(table.items()):
                    if not isinstance(tensor, torch.Tensor) or tensor.device.type == "cpu":
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = stand_in(tensor, name)
                        originals[made[id(tensor)].data_ptr()] = tensor
                    undo.append((table, name, tensor))
                    table[name] = made[id(tensor)]
        yield originals
    finally:
        for table, name, tensor in undo:
            table[name] = tensor


def stand_in(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """A tensor on the CPU of the same shape, strides and dtype, without a value.

    Raises:
        CaptureError: the system does not give that much address space.
    """
    settings: Any = torch.utils.deterministic
    filling = settings.fill_uninitialized_memory
    settings.fill_uninitialized_memory = False
    try:
        empty = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    except (RuntimeError, MemoryError) as error:
        size = tensor.numel() * tensor.element_size()
        raise CaptureError(
            f"no address space for {name!r} of {size} bytes (it would not be filled)",
            hint="raise the limit on virtual memory (ulimit -v, vm.overcommit_memory)",
        ) from error
    finally:
        settings.fill_uninitialized_memory = filling
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(empty, requires_grad=tensor.requires_grad)
    return empty
