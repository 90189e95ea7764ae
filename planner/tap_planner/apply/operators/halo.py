"""Rows that neighbours exchange where the space of a windowed operator is split over an axis, and their gradients.

Forward, every rank sends the rows at both ends of its part of operand 0 and puts those that it receives around its own;
at the ends of the whole dim there is padding instead. Backward is the adjoint: the gradients of the received rows go
back and are added. Several dims come one after another, each exchange on what the one before has made wider, so that
corners need no messages of their own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tap_planner.apply.communicator import Axes, Communicator, Parts
from tap_planner.apply.operators.context import OperatorContext
from tap_planner.operators import rule_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """One dim of operand 0 whose part is made wider."""

    dim: int
    axes: Axes
    """What splits the dim; more than one rank in all."""
    before: int
    """Rows that come from the previous rank."""
    after: int
    """Rows that come from the next rank."""


def exchanges(context: OperatorContext) -> tuple[Exchange, ...]:
    """The exchanges of an operator as it is split, in the order of forward."""
    rule = rule_of(context.signature)
    dims, placements = (rule.inputs[0], context.inputs[0]) if rule.collectives else (None, None)
    if dims is None or placements is None:
        return ()
    found: list[Exchange] = []
    for internal in rule.collectives:
        if internal.halo is None:
            continue
        dim = next(number for number, factors in enumerate(dims) if factors[:1] == (internal.factor,))
        axes = tuple(axis for axis, p in enumerate(placements) if p.is_shard and p.dim == dim)
        if math.prod(context.mesh_shape[axis] for axis in axes) > 1:
            before, after = internal.halo
            found.append(Exchange(dim=dim, axes=axes, before=before, after=after))
    return tuple(found)


def widen(contexts: Sequence[OperatorContext], parts: Sequence[Tensor], communicator: Communicator) -> Parts:
    """Parts of operand 0 with the rows of their neighbours around them.

    Args:
        contexts: the operator on each rank of this process.
        parts: of operand 0, as placed.
        communicator: exchanges the rows.
    """
    wide = [part.detach() for part in parts]
    for exchange in exchanges(contexts[0]):
        dim, before, after = exchange.dim, exchange.before, exchange.after
        to_previous = [part.narrow(dim, 0, after) for part in wide]
        to_next = [part.narrow(dim, part.shape[dim] - before, before) for part in wide]
        from_previous, from_next = communicator.halo_exchange(to_previous, to_next, exchange.axes)
        first = [_padding(contexts[0], to_next[i]) if rows is None else rows for i, rows in enumerate(from_previous)]
        last = [_padding(contexts[0], to_previous[i]) if rows is None else rows for i, rows in enumerate(from_next)]
        wide = [_joined(*each, dim) for each in zip(first, wide, last, strict=True)]
    return wide


Borders = tuple[tuple[Tensor, Tensor], ...]
"""Per exchange the rows that it put before and behind a part."""


def borders(context: OperatorContext, wide: Tensor) -> Borders:
    """Copies of the rows of neighbours around a widened part: with them it can be made again from the part alone."""
    found: list[tuple[Tensor, Tensor]] = []
    for exchange in reversed(exchanges(context)):
        dim, length = exchange.dim, wide.shape[exchange.dim]
        last = wide.narrow(dim, length - exchange.after, exchange.after)
        found.append((wide.narrow(dim, 0, exchange.before).clone(), last.clone()))
        wide = wide.narrow(dim, exchange.before, length - exchange.before - exchange.after)
    return tuple(reversed(found))


def with_borders(context: OperatorContext, part: Tensor, rows: Borders) -> Tensor:
    """A widened part from the part and its ``borders``, without communication."""
    for exchange, (first, last) in zip(exchanges(context), rows, strict=True):
        part = _joined(first, part, last, exchange.dim)
    return part


def narrow(contexts: Sequence[OperatorContext], gradients: Sequence[Tensor], communicator: Communicator) -> Parts:
    """Gradients of the parts of operand 0, given those of the widened parts; the adjoint of ``widen``."""
    result = list(gradients)
    for exchange in reversed(exchanges(contexts[0])):
        dim, before, after = exchange.dim, exchange.before, exchange.after
        to_previous = [each.narrow(dim, 0, before) for each in result]
        to_next = [each.narrow(dim, each.shape[dim] - after, after) for each in result]
        from_previous, from_next = communicator.halo_exchange(to_previous, to_next, exchange.axes)
        own = [each.narrow(dim, before, each.shape[dim] - before - after).clone() for each in result]
        for each, first, last in zip(own, from_previous, from_next, strict=True):
            if first is not None:
                each.narrow(dim, 0, after).add_(first)
            if last is not None:
                each.narrow(dim, each.shape[dim] - before, before).add_(last)
        result = own
    return result


def _joined(first: Tensor, part: Tensor, last: Tensor, dim: int) -> Tensor:
    return torch.cat([first, part, last], dim).contiguous()


def _padding(context: OperatorContext, like: Tensor) -> Tensor:
    """What lies beyond the ends of the whole dim: nothing that a window's result could come from."""
    if context.signature.type != "MaxPool":
        return torch.zeros_like(like)
    return torch.full_like(like, lowest(like))


def lowest(value: Tensor) -> float:
    """The least value of a tensor's element type."""
    return -math.inf if value.is_floating_point() else torch.iinfo(value.dtype).min
