"""Memory of parameters, gradients and optimizer states, and the time of the optimizer's step.

ZeRO: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC'20: level 1 shards
the optimizer's states, 2 the gradients as well, 3 the parameters as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tap_planner.cluster import Device
from tap_planner.cost.compute import PRECISION_BYTES, element_bits
from tap_planner.cost.rounding import to_ns
from tap_planner.errors import UsageError

OPTIMIZERS = ("adamw", "sgd")
OPTIMIZER_STATES = ("fp32", "bf16")
"""Element types of AdamW's two moments; ``fp32`` is float64 where the precision is."""

_MASTER_BYTES = {"fp32": 0, "bf16": 4, "fp16": 4, "fp64": 0}
"""A float32 copy of the parameter that the optimizer updates, where the parameter itself is too coarse."""
_STATE_BYTES = {"fp32": 4, "bf16": 4, "fp16": 4, "fp64": 8}
"""One of AdamW's two moments, unless they are bfloat16."""
_BF16_STATE_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterBytes:
    """Bytes that one trainable element takes, unsharded."""

    parameter: int
    gradient: int
    optimizer: int
    """States, with the float32 master copy where the precision needs one."""

    @property
    def total(self) -> int:
        """All three."""
        return self.parameter + self.gradient + self.optimizer


class ParameterMemory(NamedTuple):
    """Bytes on one device."""

    parameters: int
    gradients: int
    optimizer: int


def parameter_bytes(precision: str, optimizer: str, optimizer_states: str = "fp32") -> ParameterBytes:
    """Bytes per trainable element: fp32 AdamW 4 + 4 + 8, bf16 AdamW 2 + 2 + 12, fp64 AdamW 8 + 8 + 16.

    With moments in bfloat16 AdamW's states take 4 bytes less: 4 + 4 + 4 and 2 + 2 + 8. Plain SGD keeps no state but the
    float32 master of a 16-bit parameter.

    Args:
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        optimizer: ``adamw`` or ``sgd``.
        optimizer_states: of AdamW's moments, ``fp32`` or ``bf16``; the master copy stays what it is.

    Raises:
        UsageError: for another precision, optimizer or element type.
    """
    if precision not in PRECISION_BYTES:
        raise UsageError(f"precision {precision!r}, expected one of {', '.join(PRECISION_BYTES)}")
    if optimizer not in OPTIMIZERS:
        raise UsageError(f"optimizer {optimizer!r}, expected one of {', '.join(OPTIMIZERS)}")
    if optimizer_states not in OPTIMIZER_STATES:
        raise UsageError(f"optimizer states {optimizer_states!r}, expected one of {', '.join(OPTIMIZER_STATES)}")
    moment = _STATE_BYTES[precision] if optimizer_states == "fp32" else _BF16_STATE_BYTES
    moments = 2 * moment if optimizer == "adamw" else 0
    size = PRECISION_BYTES[precision]
    return ParameterBytes(parameter=size, gradient=size, optimizer=_MASTER_BYTES[precision] + moments)


def parameter_memory(
    num_elements_local: int,
    *,
    dtype: str = "float32",
    shards: int,
    zero_level: int,
    precision: str,
    optimizer: str,
    optimizer_states: str = "fp32",
    trainable: bool,
) -> ParameterMemory:
    """Bytes of one parameter on one device.

    Args:
        num_elements_local: elements on the device before ZeRO, that is after tensor sharding.
        dtype: stored element type. Floats of 16 bits and more are cast to the precision; quantised ones keep their
            size, and elements under a byte are packed anew on each device, the last byte filled up.
        shards: ranks over which ZeRO shards (1: none); a shard is rounded up.
        zero_level: 0 none, 1 optimizer states, 2 and gradients, 3 and parameters.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        optimizer: ``adamw`` or ``sgd``.
        optimizer_states: of AdamW's moments, ``fp32`` or ``bf16``.
        trainable: False for frozen parameters and in inference: the parameter alone, never sharded by ZeRO.
    """
    size = parameter_bytes(precision, optimizer, optimizer_states)
    if not trainable:
        return ParameterMemory(-(-num_elements_local * element_bits(dtype, precision) // 8), 0, 0)
    _check_zero(zero_level, shards)
    shard = -(-num_elements_local // shards)
    return ParameterMemory(
        parameters=size.parameter * (shard if zero_level >= 3 else num_elements_local),
        gradients=size.gradient * (shard if zero_level >= 2 else num_elements_local),
        optimizer=size.optimizer * (shard if zero_level >= 1 else num_elements_local),
    )


def unsharded_bytes(num_elements_local: int, *, zero_level: int, precision: str, optimizer: str) -> int:
    """Bytes of the whole local copies that exist beside ZeRO's shards while a trainable parameter's group is in use:
    its gradient before it is reduced (levels 2 and 3), and the gathered parameter (level 3).

    Args:
        num_elements_local: elements on the device before ZeRO.
        zero_level: 0 to 3.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        optimizer: ``adamw`` or ``sgd``.
    """
    size = parameter_bytes(precision, optimizer)
    per_element = (size.gradient if zero_level >= 2 else 0) + (size.parameter if zero_level >= 3 else 0)
    return num_elements_local * per_element


def optimizer_ns(
    num_elements_local: int,
    *,
    shards: int,
    zero_level: int,
    precision: str,
    optimizer: str,
    optimizer_states: str = "fp32",
    device: Device,
) -> int:
    """Time of the optimizer's step for one trainable parameter, without a launch floor (additive over parameters).

    The step is bound by memory: it reads the gradient, reads and writes the states (with the master copy), and writes
    the parameter; without a master copy it reads the parameter too.

    Args:
        num_elements_local: elements on the device before ZeRO.
        shards: ranks over which ZeRO shards the states.
        zero_level: from level 1 on each rank updates its shard only.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        optimizer: ``adamw`` or ``sgd``.
        optimizer_states: of AdamW's moments, ``fp32`` or ``bf16``.
        device: gives memory bandwidth and the share of it that is reached.
    """
    _check_zero(zero_level, shards)
    size = parameter_bytes(precision, optimizer, optimizer_states)
    updated = -(-num_elements_local // shards) if zero_level >= 1 else num_elements_local
    parameter_passes = 1 if _MASTER_BYTES[precision] else 2
    moved = size.gradient + 2 * size.optimizer + parameter_passes * size.parameter
    reached_permille = device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille
    return to_ns(updated * moved * 1000 / reached_permille)


def _check_zero(zero_level: int, shards: int) -> None:
    if zero_level not in (0, 1, 2, 3):
        raise UsageError(f"ZeRO level {zero_level}, expected 0, 1, 2 or 3")
    if shards < 1:
        raise ValueError(f"{shards} shards, expected at least 1")
