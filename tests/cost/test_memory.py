"""Memory of parameters and states, and the optimizer's step."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.cluster import catalogue_device
from tap_planner.cost import ParameterMemory, optimizer_ns, parameter_bytes, parameter_memory
from tap_planner.errors import UsageError

GPT3_ELEMENTS = 96 * (12 * 12288**2 + 13 * 12288) + (50257 + 2048) * 12288 + 2 * 12288
"""Of GPT-3: 96 layers of 12 h^2 + 13 h, token and position tables, the last normalisation."""


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [
        ("fp32", "adamw", (4, 4, 8)),
        ("bf16", "adamw", (2, 2, 12)),
        ("fp16", "adamw", (2, 2, 12)),
        ("fp64", "adamw", (8, 8, 16)),
        ("fp32", "sgd", (4, 4, 0)),
        ("bf16", "sgd", (2, 2, 4)),
        ("fp64", "sgd", (8, 8, 0)),
    ],
)
def test_bytes_per_element(precision: str, optimizer: str, expected: tuple[int, int, int]) -> None:
    """Parameter, gradient and states as defined for each precision."""
    size = parameter_bytes(precision, optimizer)
    assert (size.parameter, size.gradient, size.optimizer) == expected
    assert size.total == sum(expected)


@pytest.mark.parametrize(
    ("precision", "optimizer", "expected"),
    [("fp32", "adamw", 4), ("bf16", "adamw", 8), ("fp16", "adamw", 8), ("fp32", "sgd", 0), ("bf16", "sgd", 4)],
)
def test_moments_in_bfloat16(precision: str, optimizer: str, expected: int) -> None:
    """Two moments of 2 bytes, beside the float32 master copy of 16-bit parameters; parameter and gradient stay."""
    size, usual = parameter_bytes(precision, optimizer, "bf16"), parameter_bytes(precision, optimizer)
    assert size.optimizer == expected
    assert (size.parameter, size.gradient) == (usual.parameter, usual.gradient)
    memory = [
        parameter_memory(
            10,
            shards=4,
            zero_level=level,
            precision=precision,
            optimizer=optimizer,
            optimizer_states="bf16",
            trainable=True,
        )
        for level in range(4)
    ]
    assert [states for _, _, states in memory] == [expected * 10, expected * 3, expected * 3, expected * 3]


def test_gpt3_with_moments_in_bfloat16() -> None:
    """175B on 8 x 128 devices with ZeRO 1: 4 bytes an element held, 8 (master, two moments) over 128; at 0 all 12."""
    elements = GPT3_ELEMENTS // 8
    for level, per_element in ((0, 12), (1, 4 + 8 / 128), (3, 12 / 128)):
        memory = parameter_memory(
            elements,
            shards=128,
            zero_level=level,
            precision="bf16",
            optimizer="adamw",
            optimizer_states="bf16",
            trainable=True,
        )
        assert sum(memory) == pytest.approx(per_element * elements, rel=1e-6)


@pytest.mark.parametrize(("zero_level", "gigabytes"), [(0, 349), (1, 89), (2, 46)])
def test_gpt3_with_tp_8_and_128_way_data(zero_level: int, gigabytes: int) -> None:
    """175B at 16 B a parameter: 349 GB a device plain, 89 GB with ZeRO 1, 46 GB with ZeRO 2."""
    memory = parameter_memory(
        GPT3_ELEMENTS // 8, shards=128, zero_level=zero_level, precision="bf16", optimizer="adamw", trainable=True
    )
    assert round(sum(memory) / 1e9) == gigabytes


def test_shards_are_rounded_up() -> None:
    """10 elements over 4 ranks are shards of 3."""
    levels = [
        parameter_memory(10, shards=4, zero_level=level, precision="fp32", optimizer="adamw", trainable=True)
        for level in range(4)
    ]
    assert levels == [(40, 40, 80), (40, 40, 24), (40, 12, 24), (12, 12, 24)]


def test_inference_holds_parameters_only() -> None:
    """Without training neither gradients nor states exist, and ZeRO has no effect."""
    memory = parameter_memory(10, shards=4, zero_level=3, precision="bf16", optimizer="adamw", trainable=False)
    assert memory == ParameterMemory(20, 0, 0)


@given(st.integers(0, 10**9), st.integers(1, 64))
def test_more_zero_is_never_more_memory_or_time(num_elements: int, shards: int) -> None:
    """Each level takes at most the memory of the one before, and the step at most its time."""
    options = {"shards": shards, "precision": "bf16", "optimizer": "adamw"}
    sums = [sum(parameter_memory(num_elements, zero_level=z, trainable=True, **options)) for z in range(4)]
    assert sums == sorted(sums, reverse=True)
    device = catalogue_device("l4")
    steps = [optimizer_ns(num_elements, zero_level=z, device=device, **options) for z in range(4)]
    assert steps == sorted(steps, reverse=True)


def test_optimizer_time() -> None:
    """AdamW in bf16 moves 2 + 2 x 12 + 2 bytes an element, at 94 % of 2039 GB/s."""
    device = catalogue_device("a100-sxm4-80gb")
    ns = optimizer_ns(10**9, shards=8, zero_level=1, precision="bf16", optimizer="adamw", device=device)
    assert ns == pytest.approx(10**9 / 8 * 28 / (2039e9 * 0.94) * 1e9, abs=1)


@pytest.mark.parametrize(("precision", "moved"), [("bf16", 2 + 2 * 8 + 2), ("fp32", 4 + 2 * 4 + 2 * 4)])
def test_optimizer_time_with_moments_in_bfloat16(precision: str, moved: int) -> None:
    """Gradient read, states read and written, parameter written (and read where there is no master): fewer bytes."""
    device = catalogue_device("a100-sxm4-80gb")
    ns = optimizer_ns(
        10**9,
        shards=8,
        zero_level=1,
        precision=precision,
        optimizer="adamw",
        optimizer_states="bf16",
        device=device,
    )
    assert ns == pytest.approx(10**9 / 8 * moved / (2039e9 * 0.94) * 1e9, abs=1)


def test_wrong_options() -> None:
    """Unknown optimizers, element types and ZeRO levels are refused."""
    with pytest.raises(UsageError, match="optimizer states 'fp8', expected one of fp32, bf16"):
        parameter_bytes("bf16", "adamw", "fp8")
    with pytest.raises(UsageError, match="lion"):
        parameter_bytes("bf16", "lion")
    with pytest.raises(UsageError, match="ZeRO level 4"):
        parameter_memory(1, shards=1, zero_level=4, precision="bf16", optimizer="sgd", trainable=True)
