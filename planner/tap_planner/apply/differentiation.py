"""Runs one operator and remembers how to differentiate it, with nothing held beside what torch saves for that.

An operand enters torch's graph through a node of its own that holds no tensor, and a record keeps nodes only. So
what backward does not read is freed as soon as the values are forgotten; what is made again until backward is not
saved at all, but looked up then.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

Renewed = Mapping[int, Callable[[], Tensor | None]]
"""Per position of an operand that is made again until backward, how to get at it then; None where it is not there, as
the gradients that are made do not depend on it."""


@dataclass(frozen=True, slots=True)
class OperatorRecord:
    """One rank's forward of an operator, kept for its backward."""

    operands: Mapping[int, tuple[GradientEdge, Tensor]]
    """Per differentiated position where its gradient arrives, and an empty tensor of its type and device, expanded to
    its shape."""
    outputs: tuple[GradientEdge | None, ...]
    """Where gradients of the outputs go in; None for those that do not depend on the operands above."""


def run_recorded(
    run: Callable[[Sequence[Tensor | None]], tuple[Tensor, ...]],
    operands: Sequence[Tensor | None],
    positions: Sequence[int],
    renewed: Renewed,
) -> tuple[tuple[Tensor, ...], OperatorRecord]:
    """Run an operator on one rank.

    Args:
        run: makes the outputs from the operands.
        operands: local parts.
        positions: which of them are differentiated.
        renewed: see ``Renewed``.

    Returns:
        The outputs, detached, and what backward needs.
    """
    entered = list(operands)
    for position in positions:
        value = operands[position]
        assert value is not None
        entered[position] = _Entering.apply(torch.empty(0, requires_grad=True), value.detach())
    with torch.enable_grad(), _looked_up(operands, renewed):
        outputs = run(entered)
    record = OperatorRecord(
        operands={p: (get_gradient_edge(value), _like(value)) for p in positions if (value := entered[p]) is not None},
        outputs=tuple(get_gradient_edge(output) if output.requires_grad else None for output in outputs),
    )
    return tuple(output.detach() for output in outputs), record


def product(
    record: OperatorRecord, positions: Sequence[int], seeds: Sequence[Tensor | None], *, keep: bool = False
) -> list[Tensor]:
    """Vector-Jacobian product of one operator on one rank.

    Args:
        record: of its forward.
        positions: of which operands.
        seeds: gradients of the outputs.
        keep: whether other operands follow, so that what torch has saved must stay.

    Returns:
        Gradients of the operands at ``positions``.
    """
    operands = [record.operands[position] for position in positions]
    pairs = [
        (output, seed)
        for output, seed in zip(record.outputs, seeds, strict=True)
        if seed is not None and output is not None
    ]
    if not pairs:
        return [torch.zeros_like(like, memory_format=torch.contiguous_format) for _, like in operands]
    outputs, weights = zip(*pairs, strict=True)
    edges = [edge for edge, _ in operands]
    gradients = torch.autograd.grad(outputs, edges, weights, retain_graph=keep, allow_unused=True)
    return [
        torch.zeros_like(like, memory_format=torch.contiguous_format) if gradient is None else gradient
        for (_, like), gradient in zip(operands, gradients, strict=True)
    ]


class _Entering(torch.autograd.Function):
    """Where an operand enters the graph of its operator. Its own backward never runs: gradients are caught here."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, value: Tensor) -> Tensor:
        return value.view_as(value)

    @staticmethod
    def backward(ctx: object, *gradients: Tensor) -> tuple[None, None]:
        raise AssertionError("gradients are caught where operands enter")


@dataclass(frozen=True, slots=True)
class _Later:
    """A saved tensor that lies in the memory of an operand which is made again."""

    position: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    like: Tensor
    """An empty one."""


def _looked_up(operands: Sequence[Tensor | None], renewed: Renewed) -> AbstractContextManager[None]:
    """Saves a reference in place of every tensor that lies in the memory of a renewed operand."""
    if not renewed:
        return nullcontext()
    places = {
        _memory(value): position for position in renewed if (value := operands[position]) is not None and value.numel()
    }

    def pack(saved: Tensor) -> Tensor | _Later:
        position = places.get(_memory(saved)) if saved.numel() else None
        if position is None:
            return saved
        return _Later(position, tuple(saved.shape), saved.stride(), int(saved.storage_offset()), saved.new_empty(0))

    def unpack(packed: Tensor | _Later) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        value = renewed[packed.position]()
        if value is None:
            return packed.like.new_zeros(()).expand(packed.size)
        return value.as_strided(packed.size, packed.stride, packed.offset)

    return saved_tensors_hooks(pack, unpack)


def _memory(value: Tensor) -> tuple[int, torch.dtype]:
    return value.untyped_storage().data_ptr(), value.dtype


def _like(value: Tensor) -> Tensor:
    return value.new_empty(1).expand(value.shape) if value.dim() else value.new_empty(())
