"""Operators on weights of 2, 4 or 8 bits in blocks, several to a byte: MatMulNBits, GatherBlockQuantized.

A packed weight is split only between whole blocks, so that no byte and no scale is cut. Operands of one dim that hold
something per row and block (``[rows x blocks]``) are a compound dim.
"""

from __future__ import annotations

from tap_planner.operators.attributes import int_of, operand
from tap_planner.operators.building import Dims, RuleBuilder, shape_error
from tap_planner.operators.types import (
    ComputeKind,
    DimFactors,
    FactorRule,
    OperatorRecord,
    OperatorSignature,
    TensorType,
)

__all__ = ["RECORDS"]


class _Product:
    """Sizes of a MatMulNBits: ``A [.., K]``, ``B [N, blocks, bytes of a block]``."""

    def __init__(self, signature: OperatorSignature) -> None:
        self.signature = signature
        self.columns, self.inner = int_of(signature, "N"), int_of(signature, "K")
        self.block, self.bits = int_of(signature, "block_size"), int_of(signature, "bits", 4)
        self.blocks = -(-self.inner // self.block)
        self.point_bytes = -(-self.blocks * self.bits // 8)

    def given(self, position: int) -> TensorType | None:
        """Type of an optional operand."""
        return self.signature.inputs[position] if position < len(self.signature.inputs) else None

    @property
    def packed_points(self) -> bool:
        """Whether zero points lie several to a byte, so that blocks cannot be told apart."""
        points = self.given(3)
        return points is not None and points.dtype == "uint8" and self.bits < 8

    def check(self) -> None:
        """Refuse operands that do not fit each other."""
        data, weight = operand(self.signature, 0).shape, operand(self.signature, 1).shape
        rows = (self.columns, self.blocks)
        if data[-1:] != (self.inner,) or weight[:2] != rows or weight[2:] != (self.block * self.bits // 8,):
            expected = f"{self.inner} columns and a packed weight of {[*rows, self.block * self.bits // 8]}"
            raise shape_error(self.signature, expected)
        for position in (2, 3):
            found = self.given(position)
            per_row = self.point_bytes if position == 3 and self.packed_points else self.blocks
            if found is not None and found.shape not in ((self.columns * per_row,), (self.columns, per_row)):
                raise shape_error(self.signature, f"{per_row} in operand {position} for each of {self.columns} rows")


def _product_rule(signature: OperatorSignature) -> FactorRule:
    """``(b.., (kb k)) (n, kb, bytes) (n kb) -> (b.., n)``: K is summed over and split in whole blocks.

    It is not split where the last block is short, where an index says which block a column belongs to, or where zero
    points of several blocks share a byte.
    """
    sizes = _Product(signature)
    builder = RuleBuilder(signature)
    rows = builder.each("m", operand(signature, 0).shape[:-1])
    n = builder.factor("n", sizes.columns)
    even = sizes.inner % sizes.block == 0
    layout: list[int] = []

    def laid_out(name: str, size: int) -> DimFactors:
        made = builder.fixed(name, size)
        layout.extend(made)
        return made

    if even:
        whole = sizes.packed_points or sizes.given(4) is not None
        blocks = (builder.fixed if whole else builder.summed)("kb", sizes.blocks)
        inner = blocks + builder.fixed("k", sizes.block)
    else:
        inner = builder.fixed("k", sizes.inner)
        blocks = laid_out("kb", sizes.blocks)

    def per_row(found: TensorType | None, per_block: DimFactors) -> Dims | None:
        if found is None:
            return None
        return (n, per_block) if len(found.shape) == 2 else (n + per_block,)

    bytes_of_points = laid_out("z", sizes.point_bytes) if sizes.packed_points else blocks
    inputs: list[Dims | None] = [(*rows, inner), (n, blocks, laid_out("byte", sizes.block * sizes.bits // 8))]
    inputs += [per_row(sizes.given(2), blocks), per_row(sizes.given(3), bytes_of_points)]
    inputs += [None if sizes.given(4) is None else (inner,), None if sizes.given(5) is None else (n,)]
    count = len(signature.inputs)
    ways = [("P", "R", "R", "R", "R", "P")[:count]]
    return builder.build(inputs[:count], ((*rows, n),), additive=(5,), partial=ways, layout=layout)


def _product_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    sizes = _Product(signature)
    sizes.check()
    data = operand(signature, 0)
    return (TensorType(dtype=data.dtype, shape=(*data.shape[:-1], sizes.columns)),)


class _Lookup:
    """Sizes of a GatherBlockQuantized."""

    def __init__(self, signature: OperatorSignature) -> None:
        data, scale = operand(signature, 0), operand(signature, 2)
        rank = len(data.shape)
        self.signature = signature
        self.gathered = int_of(signature, "gather_axis", 0) % rank
        self.quantised = int_of(signature, "quantize_axis", 1) % rank
        self.block = int_of(signature, "block_size", 128)
        self.per_byte = 8 // int_of(signature, "bits", 4) if data.dtype == "uint8" else 1
        self.data, self.indices = data.shape, operand(signature, 1).shape
        self.shape = (*data.shape[:-1], data.shape[-1] * self.per_byte)
        expected = tuple(
            -(-size // self.block) if dim == self.quantised else size for dim, size in enumerate(self.shape)
        )
        if (
            scale.shape != expected
            or self.gathered == self.quantised
            or (self.per_byte > 1 and self.quantised != rank - 1)
        ):
            raise shape_error(signature, f"scales of shape {list(expected)} for blocks along another dim than the rows")

    @property
    def packed_points(self) -> bool:
        """Whether zero points of several blocks share a byte."""
        return self.per_byte > 1 and len(self.signature.inputs) > 3 and self.signature.inputs[3] is not None

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.shape[: self.gathered], *self.indices, *self.shape[self.gathered + 1 :])


def _lookup_rule(signature: OperatorSignature) -> FactorRule:
    """As Gather; the quantised dim is (blocks, elements of a block), and rows of scales go with rows of data."""
    sizes = _Lookup(signature)
    axis, builder = sizes.gathered, RuleBuilder(signature)
    layout: list[int] = []
    data: list[DimFactors] = []
    scales: list[DimFactors] = []
    results: list[DimFactors] = []
    index_dims = builder.each("i", sizes.indices)
    for dim, size in enumerate(sizes.shape):
        if dim == sizes.quantised:
            even = size % sizes.block == 0
            make = builder.factor if even and not sizes.packed_points else builder.fixed
            blocks = make("qb", -(-size // sizes.block))
            inner = builder.fixed("q", sizes.block if even else size)
            packed = inner
            if sizes.per_byte > 1:
                packed = builder.fixed("byte", (sizes.block if even else size) // sizes.per_byte)
                layout.extend(packed)
            data.append(blocks + packed if even else packed)
            scales.append(blocks)
            results.append(blocks + inner if even else inner)
        elif dim == axis:
            data.append(builder.summed("v", size))
            scales.append(data[-1])
            results.extend(index_dims)
        else:
            data.append(builder.factor(f"d{dim}", size))
            scales.append(data[-1])
            results.append(data[-1])
    inputs: list[Dims | None] = [tuple(data), index_dims, tuple(scales)]
    for found in signature.inputs[3:]:
        inputs.append(None if found is None else _point_dims(found.shape, tuple(scales), sizes, builder))
    return builder.build(inputs, (tuple(results),), layout=layout)


def _point_dims(shape: tuple[int, ...], scales: Dims, sizes: _Lookup, builder: RuleBuilder) -> Dims:
    """Zero points lie as scales do; packed ones have several blocks in a byte of the quantised dim."""
    return tuple(
        builder.fixed("z", size) if dim == sizes.quantised and sizes.packed_points else scales[dim]
        for dim, size in enumerate(shape)
    )


def _lookup_infer(signature: OperatorSignature, num_outputs: int) -> tuple[TensorType, ...]:
    return (TensorType(dtype=operand(signature, 2).dtype, shape=_Lookup(signature).result),)


RECORDS: tuple[OperatorRecord, ...] = (
    OperatorRecord(
        type="com.microsoft::MatMulNBits",
        rule=_product_rule,
        infer=_product_infer,
        kind=ComputeKind.CONTRACTION,
        saved_inputs=(1, 2, 3, 4),
        trainable_operands=(5,),
        differentiable_operands=(0, 5),
        quantised_operands=(1, 2, 3, 4),
    ),
    OperatorRecord(
        type="com.microsoft::GatherBlockQuantized",
        rule=_lookup_rule,
        infer=_lookup_infer,
        kind=ComputeKind.MEMORY,
        differentiable_operands=(),
        quantised_operands=(0, 2, 3),
    ),
)
"""Records of the operators on packed weights."""
