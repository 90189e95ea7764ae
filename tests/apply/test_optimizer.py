"""The optimizers are torch's."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tap_planner.apply.optimizer import SGD, AdamW, Optimizer, make_optimizer
from tap_planner.errors import ApplyError


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (AdamW(), lambda p: torch.optim.AdamW([p], lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)),
        (SGD(), lambda p: torch.optim.SGD([p], lr=1e-2)),
    ],
    ids=["adamw", "sgd"],
)
def test_equals_torch(ours: Optimizer, theirs) -> None:  # type: ignore[no-untyped-def]
    """Five steps give what torch.optim gives."""
    generator = torch.Generator().manual_seed(0)
    value = torch.randn(7, 3, dtype=torch.float64, generator=generator)
    expected = torch.nn.Parameter(value.clone())
    reference = theirs(expected)
    for _ in range(5):
        gradient = torch.randn(7, 3, dtype=torch.float64, generator=generator)
        value = ours.update(("w", 0), value, gradient)
        expected.grad = gradient
        reference.step()
    torch.testing.assert_close(value, expected.detach(), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_low_precision_keeps_a_master(name: str) -> None:
    """Updates too small for bfloat16 add up in the float32 master copy."""
    optimizer = make_optimizer(name)
    value, gradient = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 1e-2, dtype=torch.bfloat16)
    for _ in range(60):
        value = optimizer.update(("w", 0), value, gradient)
    assert float(value) < 1.0


def rounded(values: np.ndarray) -> np.ndarray:
    """To the nearest bfloat16 (ties to even) by the bits of float32, in float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


def test_moments_in_bfloat16_by_hand() -> None:
    """Eight steps in closed form: the step uses the new moments as computed, the next one finds them rounded.

    They are not those of moments that are kept as they are, and only the moments are rounded.
    """
    generator = np.random.default_rng(3)
    ours = make_optimizer("adamw", "bf16")
    value = generator.standard_normal((5, 4))
    expected, first, second = value.copy(), np.zeros((5, 4)), np.zeros((5, 4))
    exact = make_optimizer("adamw")
    unrounded = torch.from_numpy(value.copy())
    found = torch.from_numpy(value.copy())
    for step in range(1, 9):
        gradient = generator.standard_normal((5, 4)) * 10.0 ** generator.integers(-4, 2, (5, 4))
        found = ours.update(("w", 0), found, torch.from_numpy(gradient))
        unrounded = exact.update(("w", 0), unrounded, torch.from_numpy(gradient))
        first = 0.9 * first + 0.1 * gradient
        second = 0.999 * second + 0.001 * gradient**2
        expected *= 1 - 1e-3 * 0.01
        expected -= 1e-3 * (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-8)
        first, second = rounded(first), rounded(second)
        np.testing.assert_allclose(found.numpy(), expected, rtol=1e-12, atol=1e-14)
    assert 1e-7 < float((found - unrounded).abs().max()) < 1e-3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_kept_in_bfloat16(dtype: torch.dtype) -> None:
    """Both moments take 2 bytes an element, the master values at least 4: what the memory model counts."""
    optimizer = AdamW("bf16")
    optimizer.update(("w", 0), torch.ones(6, dtype=dtype), torch.ones(6, dtype=dtype))
    (state,) = optimizer._states.values()
    assert state.first.dtype == state.second.dtype == torch.bfloat16
    assert state.master.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)


def test_a_second_moment_in_bfloat16_does_not_fade() -> None:
    """With the default 0.999 the rounding takes back what a step takes off (docs/decisions/optimizer-states.md): after
    one large gradient steps stay small, where float32 moments let them grow again."""
    steps: dict[str, float] = {}
    for states in ("fp32", "bf16"):
        optimizer, value = make_optimizer("adamw", states), torch.zeros(1)
        value = optimizer.update(("w", 0), value, torch.full((1,), 100.0))
        for _ in range(3000):
            value = optimizer.update(("w", 0), value, torch.full((1,), 1e-3))
        before = value.clone()
        after = optimizer.update(("w", 0), value, torch.full((1,), 1e-3))
        steps[states] = abs(float(after - before))
    assert 0 < steps["bf16"] < steps["fp32"] / 2


def test_unknown_optimizer() -> None:
    """A name that no plan of ours has is refused."""
    with pytest.raises(ApplyError, match="lion"):
        make_optimizer("lion")
