"""Times of operators: FLOPs over the matrix units' rate and bytes over the memory's, or the launch's floor.

The roofline (Williams, Waterman, Patterson, CACM 52(4), 2009) takes the larger of FLOPs and bytes; measured steps are
nearer to their sum, as a kernel's first loads and last stores hide behind nothing. The host launches operators while
the device works on those before: of launch and work the slower counts (docs/decisions/launch-or-work.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.cluster import STAND_INS, Device
from tap_planner.cost.rounding import ceil_ns, ceil_ns_array
from tap_planner.errors import ClusterError, UnsupportedGraphError, UsageError
from tap_planner.operators import ComputeKind, OperatorRecord

PRECISION_BYTES: Mapping[str, int] = {"fp32": 4, "bf16": 2, "fp16": 2, "fp64": 8}
"""Bytes of an element that is computed with, by precision."""

_COMPUTED = ("float64", "float32", "float16", "bfloat16")
"""Element types that are cast to the precision."""
_BITS = {
    "bool": 8,
    "string": 128,  # nominal: strings stay on the host
    "complex64": 64,
    "complex128": 128,
    "int64": 64,
    "uint64": 64,
    "int32": 32,
    "uint32": 32,
    "int16": 16,
    "uint16": 16,
    "int8": 8,
    "uint8": 8,
    "int4": 4,
    "uint4": 4,
    "int2": 2,
    "uint2": 2,
    "float4e2m1": 4,
}

_PEAK_DTYPES: Mapping[str, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}
"""Element type whose peak serves a precision, see ``STAND_INS``."""

_ATTENTION = frozenset(
    {
        "Attention",
        "com.microsoft::Attention",
        "com.microsoft::DecoderMaskedMultiHeadAttention",
        "com.microsoft::GroupQueryAttention",
        "com.microsoft::MultiHeadAttention",
    }
)
"""Operators made of two matrix products of b x h x q x k x d each; their factors count both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one device does for one operator."""

    forward_flops: int
    forward_bytes: int
    backward_flops: int
    backward_bytes: int


_NO_WORK = Work(forward_flops=0, forward_bytes=0, backward_flops=0, backward_bytes=0)


def element_bits(dtype: str, precision: str) -> int:
    """Bits of one element.

    Args:
        dtype: ONNX element type in lower case; floats of 16 bits and more take the precision's size.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.

    Raises:
        UnsupportedGraphError: if the element type is not known.
    """
    if dtype in _COMPUTED:
        return 8 * PRECISION_BYTES[precision]
    if dtype.startswith("float8"):
        return 8
    if dtype not in _BITS:
        raise UnsupportedGraphError(f"element type {dtype!r}, expected one of {', '.join((*_COMPUTED, *_BITS))}")
    return _BITS[dtype]


class ComputeModel:
    """Times of operators on one device at one precision.

    Args:
        device: the device.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        kinds: unlike devices that do equal parts, of which ``device`` has the slowest figures (``slowest_device``); an
            operator's work then takes what it takes on the slowest of them, which need not be the same for another one.
            None: the device itself.

    Raises:
        UsageError: for another precision.
        ClusterError: if the device has no peak that serves the precision.
    """

    def __init__(self, device: Device, precision: str, kinds: Sequence[Device] = ()) -> None:
        if precision not in PRECISION_BYTES:
            raise UsageError(f"precision {precision!r}, expected one of {', '.join(PRECISION_BYTES)}")
        self.device = device
        self.precision = precision
        self.peak_dtype, self.peak_flops_per_s = _peak(device, precision)
        self._paces, self._attention_paces = (
            tuple(dict.fromkeys(_pace(kind, precision, attention=attention) for kind in kinds or (device,)))
            for attention in (False, True)
        )

    def element_bytes(self, dtype: str) -> int:
        """Bytes of one element of ``dtype``; types under a byte take a whole one (see ``tensor_bytes``)."""
        return -(-element_bits(dtype, self.precision) // 8)

    def tensor_bytes(self, dtype: str, num_elements: int) -> int:
        """Bytes of ``num_elements`` of ``dtype``; types under a byte are packed and the last byte is filled up."""
        return -(-num_elements * element_bits(dtype, self.precision) // 8)

    def floor_ns(self, *, backward: bool = False) -> int:
        """What any operator takes at least."""
        return self.device.backward_floor_ns if backward else self.device.launch_ns

    def time_ns(
        self, flops: int, num_bytes: int, kind: ComputeKind, *, backward: bool = False, attention: bool = False
    ) -> int:
        """The larger of launch and work, FLOPs and bytes over what the device reaches; 0 for views and empty work.

        Args:
            flops: of the operator.
            num_bytes: that it moves.
            kind: of the operator.
            backward: whether it is a backward, whose floor is another one.
            attention: whether it is fused attention (``is_attention``), which reaches a share of its own.
        """
        if kind is ComputeKind.VIEW or (flops == 0 and num_bytes == 0):
            return 0
        paces = self._attention_paces if attention else self._paces
        ns = ceil_ns(max(flops * per_flop + num_bytes * per_byte for per_flop, per_byte in paces))
        return max(ns, self.floor_ns(backward=backward))

    def times_ns(
        self,
        flops: np.ndarray,
        num_bytes: np.ndarray,
        kind: ComputeKind,
        *,
        backward: bool = False,
        attention: bool = False,
    ) -> np.ndarray:
        """``time_ns`` elementwise: int64 arrays of one shape to an int64 array of that shape."""
        flops, num_bytes = np.broadcast_arrays(np.asarray(flops, np.int64), np.asarray(num_bytes, np.int64))
        if kind is ComputeKind.VIEW:
            return np.zeros(flops.shape, dtype=np.int64)
        ns = ceil_ns_array(_work_ns(self._attention_paces if attention else self._paces, flops, num_bytes))
        return np.where((flops == 0) & (num_bytes == 0), 0, np.maximum(ns, self.floor_ns(backward=backward)))


def _work_ns(paces: Sequence[tuple[float, float]], flops: np.ndarray, num_bytes: np.ndarray) -> np.ndarray:
    """What work takes at the slowest of paces."""
    (per_flop, per_byte), *others = paces
    ns = flops * per_flop + num_bytes * per_byte
    for per_flop, per_byte in others:
        ns = np.maximum(ns, flops * per_flop + num_bytes * per_byte)
    return ns


def _pace(device: Device, precision: str, *, attention: bool) -> tuple[float, float]:
    """Nanoseconds of a FLOP and of a byte."""
    dtype, flops_per_s = _peak(device, precision)
    return (
        1e12 / (flops_per_s * device.efficiency_permille(dtype, attention=attention)),
        1e12 / (device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille),
    )


def _peak(device: Device, precision: str) -> tuple[str, int]:
    found = device.serving_peak(_PEAK_DTYPES[precision])
    if found is not None:
        return found
    wanted = " or ".join(dtype for dtype, _ in STAND_INS[_PEAK_DTYPES[precision]])
    raise ClusterError(
        f"the device {device.name} has no peak for the precision {precision}: found "
        f"{', '.join(device.peak_flops) or 'none'}, expected {wanted}",
        hint="Choose another --precision, or give the device's peak_flops in cluster.yaml.",
    )


def operator_work(
    record: OperatorRecord,
    *,
    factor_sizes: tuple[int, ...],
    input_bytes: tuple[int, ...],
    output_bytes: tuple[int, ...],
    gradient_operands: int,
    gradient_bytes: int = 0,
    points: int | None = None,
) -> Work:
    """FLOPs and memory traffic of an operator on one device.

    A contraction does 2 x product of the factors FLOPs forward, and as many backward per operand that needs a
    gradient (dA = dC B^T, dB = A^T dC); for each it reads the output's gradient again. Attention does two products
    forward, and backward one product for the probabilities' gradient plus one per operand. Everything else only moves
    bytes: operands in, results out; backward reads the output's gradient and what was saved, and writes the operands'
    gradients.

    Args:
        record: the operator's record.
        factor_sizes: local sizes of the rule's factors.
        input_bytes: local bytes of each operand (0 where absent).
        output_bytes: local bytes of each output.
        gradient_operands: how many operands need a gradient; 0 in inference.
        gradient_bytes: local bytes of those operands.
        points: of a contraction's loops, with what fills tiles (``padded_points``); None: the product of the factors.
    """
    if record.kind is ComputeKind.VIEW:
        return _NO_WORK
    forward_flops, backward_flops = _flops(
        record, math.prod(factor_sizes) if points is None else points, gradient_operands
    )
    backward_bytes = 0
    if gradient_operands:
        reads = gradient_operands if record.kind is ComputeKind.CONTRACTION else 1
        saved = sum(input_bytes[index] for index in record.saved_inputs if index < len(input_bytes))
        saved += sum(output_bytes[index] for index in record.saved_outputs if index < len(output_bytes))
        backward_bytes = reads * sum(output_bytes) + saved + gradient_bytes
    return Work(
        forward_flops=forward_flops,
        forward_bytes=sum(input_bytes) + sum(output_bytes),
        backward_flops=backward_flops,
        backward_bytes=backward_bytes,
    )


def is_attention(record: OperatorRecord) -> bool:
    """Whether an operator is fused attention."""
    return record.type in _ATTENTION


def _flops(record: OperatorRecord, points: int, gradient_operands: int) -> tuple[int, int]:
    if record.kind is not ComputeKind.CONTRACTION:
        return 0, 0
    product = 2 * points
    if is_attention(record):
        return product, product // 2 * (min(gradient_operands, 3) + 1) if gradient_operands else 0
    return product, product * gradient_operands
