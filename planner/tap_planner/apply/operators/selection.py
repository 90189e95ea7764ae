"""Selection by value, writing into caches, turning sequences around, counting words."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.operators.context import Operands, OperatorContext, operator, optional, present, torch_dtype


@operator("Compress")
def compress(context: OperatorContext, operands: Operands) -> Tensor:
    """Slices whose condition is true; a condition shorter than the dim is false behind its end."""
    value, axis = present(operands, 0), context.signature.attribute("axis")
    condition = optional(operands, 1)
    if condition is None:
        indices = torch.tensor(context.ints("indices"), dtype=torch.int64, device=value.device)
    else:
        indices = condition.reshape(-1).nonzero().squeeze(1)
    context.check_count(len(indices))
    if not isinstance(axis, int):
        return value.reshape(-1).index_select(0, indices)
    return value.index_select(axis, indices)


@operator("NonZero")
def non_zero(context: OperatorContext, operands: Operands) -> Tensor:
    """[rank, count] positions of what is not zero."""
    value = present(operands, 0)
    found = value.reshape(1).nonzero()[:, :0] if value.dim() == 0 else value.nonzero()
    context.check_count(len(found))
    return found.mT.contiguous()


@operator("Unique")
def unique(context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Distinct elements or slices, sorted or in order of appearance; where each first is, which each is, how many."""
    value, axis = present(operands, 0), context.signature.attribute("axis")
    dim = axis if isinstance(axis, int) else None
    array = value.detach().cpu().numpy()
    distinct, first, inverse, counts = np.unique(
        array, return_index=True, return_inverse=True, return_counts=True, axis=dim
    )
    context.check_count(len(first))
    inverse = inverse.reshape(-1)
    if not context.flag("sorted", True):
        order = np.argsort(first, kind="stable")
        distinct, first, counts = np.take(distinct, order, dim or 0), first[order], counts[order]
        inverse = np.argsort(order, kind="stable")[inverse]
    made = (distinct, first, inverse, counts)[: len(context.outputs)]
    return tuple(torch.from_numpy(np.ascontiguousarray(found)).to(value.device) for found in made)


@operator("ReverseSequence")
def reverse_sequence(context: OperatorContext, operands: Operands) -> Tensor:
    """Each sequence's first elements in reverse order; what lies behind its length stays."""
    value, lengths = present(operands, 0), present(operands, 1)
    time, batch = context.int("time_axis"), context.int("batch_axis")
    steps = torch.arange(value.shape[time], device=value.device).unsqueeze(batch)
    ends = lengths.unsqueeze(time)
    index = torch.where(steps < ends, ends - 1 - steps, steps)
    index = index.reshape(*index.shape, *(1,) * (value.dim() - 2))
    return value.gather(time, index.expand(value.shape))


@operator("TensorScatter")
def tensor_scatter(context: OperatorContext, operands: Operands) -> Tensor:
    """A cache into which an update is written at each sample's own position."""
    past, update, starts = present(operands, 0), present(operands, 1), optional(operands, 2)
    dim, limit = context.int("axis"), past.shape[context.int("axis")]
    steps = torch.arange(update.shape[dim], device=past.device)
    if starts is None:
        starts = torch.zeros(past.shape[0], dtype=torch.int64, device=past.device)
    places = starts[:, None] + steps
    if context.text("mode", "linear") == "circular":
        places = places % limit
    elif places.numel() and (int(places.min()) < 0 or int(places.max()) >= limit):
        raise context.unsupported(f"it writes at {int(places.max())} of a cache of {limit}")
    places = places.reshape(past.shape[0], *(-1 if at == dim else 1 for at in range(1, past.dim())))
    return past.scatter(dim, places.expand(update.shape), update)


def _pool(context: OperatorContext) -> dict[tuple[int, ...], int]:
    """From each n-gram of the wanted lengths to its number; n-grams of one length follow one another."""
    words, starts = context.ints("pool_int64s"), context.ints("ngram_counts")
    shortest, longest = context.int("min_gram_length"), context.int("max_gram_length")
    found: dict[tuple[int, ...], int] = {}
    number = 0
    for length, (start, end) in enumerate(zip(starts, (*starts[1:], len(words)), strict=True), start=1):
        for at in range(start, end - length + 1, length):
            if shortest <= length <= longest:
                found[words[at : at + length]] = number
            number += 1
    return found


def _counts(context: OperatorContext, row: list[int], pool: dict[tuple[int, ...], int], width: int) -> list[float]:
    columns = context.ints("ngram_indexes")
    counts = [0.0] * width
    for length in sorted({len(gram) for gram in pool}):
        # How far the words of an n-gram lie apart does not matter for a single word: it counts once.
        for skip in range(1, (0 if length == 1 else context.int("max_skip_count")) + 2):
            for at in range(len(row) - skip * (length - 1)):
                number = pool.get(tuple(row[at : at + skip * (length - 1) + 1 : skip]))
                if number is not None:
                    counts[columns[number]] += 1.0
    return counts


@operator("TfIdfVectorizer")
def count_grams(context: OperatorContext, operands: Operands) -> Tensor:
    """How often each n-gram of a pool occurs in each text (TF), whether it does (IDF), weighted."""
    words = present(operands, 0)
    output = context.signature.outputs[0]
    width = output.shape[-1]
    pool = _pool(context)
    rows = [_counts(context, row, pool, width) for row in words.reshape(-1, words.shape[-1]).tolist()]
    dtype = torch_dtype(output.dtype, context.dtype)
    counts = torch.tensor(rows, dtype=dtype, device=words.device).reshape(*words.shape[:-1], width)
    mode, weights = context.text("mode"), context.signature.attribute("weights")
    if mode == "IDF":
        counts = counts.sign()
    if mode == "TF" or not isinstance(weights, tuple) or not weights:
        return counts
    # Weights belong to n-grams, columns to outputs.
    spread = [math.nan] * width
    for number, column in enumerate(context.ints("ngram_indexes")):
        spread[column] = float(weights[number])
    factors = torch.tensor(spread, dtype=dtype, device=words.device)
    return torch.where(counts == 0, counts, counts * factors)
