"""Windows over space: sizes of what they make, and how a split dim exchanges rows with its neighbours.

A dim of space is split in equal, contiguous chunks of the operand and of the result. The windows of a chunk of the
result then reach over both ends of the chunk of the operand: those rows (the *halo*) are received from the direct
neighbours, one exchange per dim, each of what the one before has made wider (Dryden et al., "Improving strong-scaling
of CNN training by exploiting finer-grained parallelism", 2019, section III).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tap_planner.operators.attributes import flag_of, ints_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import DimFactors, InternalCollective, OperatorSignature

__all__ = ["Space", "gathered_space", "scattered_space", "spatial", "window_counts"]


def spatial(signature: OperatorSignature, name: str, default: int) -> tuple[int, ...]:
    """A spatial attribute with one entry per spatial dim (two for pads)."""
    rank = len(operand(signature, 0).shape) - 2
    count = 2 * rank if name == "pads" else rank
    values = ints_of(signature, name, (default,) * count)
    if len(values) != count:
        raise shape_error(signature, f"{count} entries in {name!r}, got {list(values)}")
    return values


def window_counts(signature: OperatorSignature, kernel: tuple[int, ...]) -> tuple[int, ...]:
    """Number of windows per dim: sizes of the result's space."""
    sizes = operand(signature, 0).shape[2:]
    strides, dilations = spatial(signature, "strides", 1), spatial(signature, "dilations", 1)
    pads, ceil = spatial(signature, "pads", 0), flag_of(signature, "ceil_mode")
    result: list[int] = []
    for dim, size in enumerate(sizes):
        begin, end, stride = pads[dim], pads[dim + len(sizes)], strides[dim]
        span = size + begin + end - dilations[dim] * (kernel[dim] - 1) - 1
        if span < 0:
            raise shape_error(signature, f"space of at least the kernel {list(kernel)}")
        count = (-(-span // stride) if ceil else span // stride) + 1
        # A last window that would start in the padding at the end is left out (ONNX operators, MaxPool).
        if ceil and (count - 1) * stride >= size + begin:
            count -= 1
        result.append(count)
    return tuple(result)


@dataclass(frozen=True, slots=True, kw_only=True)
class Space:
    """The factors of space in the operand and in the result of a windowed operator."""

    operand: Dims
    result: Dims
    layout: tuple[int, ...]
    """Factors for the stride: they lay out a dim, and are no loop."""
    halos: tuple[tuple[int, int], ...]
    """Per dim, rows of the operand that a part needs from the previous and from the next one."""

    def exchanges(self, leading: Dims, shape: Sequence[int]) -> tuple[InternalCollective, ...]:
        """The exchanges of halo rows, in the order in which they are made.

        Args:
            leading: factors of the operand's dims before space.
            shape: of the operand.
        """
        dims = (*leading, *self.operand)
        bare = 1
        for dim, size in zip(dims, shape, strict=True):
            bare *= 1 if dim else size
        found: list[InternalCollective] = []
        widened: list[tuple[DimFactors, int]] = []
        for number, halo in enumerate(self.halos):
            if not any(halo):
                continue
            own = self.operand[number]
            others = [dim for dim in dims if dim and dim != own and all(dim != known for known, _ in widened)]
            found.append(
                InternalCollective(
                    factor=own[0],
                    kind="halo_exchange",
                    elements=tuple(factor for dim in others for factor in dim),
                    multiplier=bare,
                    halo=halo,
                    widened=tuple(widened),
                    backward_of=0,
                )
            )
            widened.append((own, sum(halo)))
        return tuple(found)


def _space(
    builder: RuleBuilder,
    sizes: Sequence[int],
    results: Sequence[int],
    strides: Sequence[int],
    halos: Sequence[tuple[int, int] | None],
    unsplit: tuple[str, str],
    *,
    grows: bool,
) -> Space:
    """Space whose dims are split where they have a halo (maybe of no rows); ``grows``: the stride is the result's."""
    operands: list[DimFactors] = []
    made: list[DimFactors] = []
    layout: list[int] = []
    kept: list[tuple[int, int]] = []
    for dim, (size, result, stride, halo) in enumerate(zip(sizes, results, strides, halos, strict=True)):
        outer, inner = (size, result) if grows else (result, size)
        per_chunk = 1 if grows else stride
        least = 0 if halo is None else -(-max(halo) // per_chunk)
        if halo is None or inner != outer * stride or outer < 2 * max(least, 1):
            operands.append(builder.fixed(f"{unsplit[0]}{dim}", size) if unsplit[0] else ())
            made.append(builder.fixed(f"{unsplit[1]}{dim}", result) if unsplit[1] else ())
            kept.append((0, 0))
            continue
        chunk = builder.factor(f"s{dim}", outer, least_part=least)
        step = builder.fixed(f"t{dim}", stride)
        layout.extend(step)
        operands.append(chunk if grows else chunk + step)
        made.append(chunk + step if grows else chunk)
        kept.append(halo)
    return Space(operand=tuple(operands), result=tuple(made), layout=tuple(layout), halos=tuple(kept))


def gathered_space(
    builder: RuleBuilder, signature: OperatorSignature, kernel: Sequence[int], unsplit: tuple[str, str]
) -> Space:
    """Space of an operator whose results gather windows (convolution, pooling).

    Result o reads the operand from ``o stride - begin`` on, so a chunk of c results, and of ``c stride`` operands,
    needs ``begin`` rows before its own and ``extent - stride - begin`` behind them. It works out on every chunk if
    the operand has ``stride`` rows for every result: what the last chunk lacks is the padding at the end.

    Args:
        builder: takes the factors.
        signature: with its result.
        kernel: its size per dim.
        unsplit: names of the fixed factors of dims that cannot be split, in the operand and in the result; "": none.
    """
    strides, dilations = spatial(signature, "strides", 1), spatial(signature, "dilations", 1)
    begins = spatial(signature, "pads", 0)
    halos: list[tuple[int, int] | None] = []
    for size, stride, dilation, begin in zip(kernel, strides, dilations, begins, strict=False):
        behind = dilation * (size - 1) + 1 - stride - begin
        halos.append((begin, max(0, behind)) if begin >= 0 else None)
    sizes, results = operand(signature, 0).shape[2:], signature.outputs[0].shape[2:]
    return _space(builder, sizes, results, strides, halos, unsplit, grows=False)


def scattered_space(
    builder: RuleBuilder, signature: OperatorSignature, kernel: Sequence[int], unsplit: tuple[str, str]
) -> Space:
    """Space of an operator that adds windows up (transposed convolution); arguments as of ``gathered_space``.

    Operand i adds to the results from ``i stride - begin`` on, ``extent`` of them. A chunk's results, ``stride`` per
    operand, therefore also need the ``floor((extent - 1 - begin) / stride)`` operands before it and the
    ``ceil(begin / stride)`` behind it.
    """
    strides, dilations = spatial(signature, "strides", 1), spatial(signature, "dilations", 1)
    begins = spatial(signature, "pads", 0)
    halos: list[tuple[int, int] | None] = []
    for size, stride, dilation, begin in zip(kernel, strides, dilations, begins, strict=False):
        before = max(0, (dilation * (size - 1) - begin) // stride)
        halos.append((before, -(-begin // stride)) if begin >= 0 else None)
    sizes, results = operand(signature, 0).shape[2:], signature.outputs[0].shape[2:]
    return _space(builder, sizes, results, strides, halos, unsplit, grows=True)
