"""The optimizers are torch's."""

from __future__ import annotations

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


def test_unknown_optimizer() -> None:
    """A name that no plan of ours has is refused."""
    with pytest.raises(ApplyError, match="lion"):
        make_optimizer("lion")
