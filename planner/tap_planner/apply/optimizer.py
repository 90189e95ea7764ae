"""Optimizers on local parts or flat shards: elementwise, so that what a rank holds is all it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tap_planner.errors import ApplyError

StateKey = tuple[str, int]
"""A parameter's name or a bucket, and the position of the rank among those held here."""


class Optimizer(Protocol):
    """Updates one tensor at a time and keeps its state under a key."""

    learning_rate: float

    def update(self, key: StateKey, value: Tensor, gradient: Tensor) -> Tensor:
        """The value after one step."""
        ...


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of optimizer states and master values: at least float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(slots=True)
class _AdamState:
    steps: int
    master: Tensor
    first: Tensor
    second: Tensor


class AdamW:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch.optim's defaults.

    Moments in bfloat16 are a matter of storage (as in TransformerEngine's ``FusedAdam`` with ``exp_avg_dtype``): a step
    widens them, computes in the type of the master values, and rounds the new ones to the nearest when it keeps them.

    Args:
        states: element type of the moments: ``fp32`` (that of the master values) or ``bf16``.
        learning_rate: of every step.
        betas: how much of the moments stays.
        epsilon: added to the root of the second moment.
        weight_decay: share of the value, times the learning rate, that goes with each step.
    """

    def __init__(
        self,
        states: str = "fp32",
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.learning_rate = learning_rate
        self._rounds = states == "bf16"
        self._betas = betas
        self._epsilon = epsilon
        self._weight_decay = weight_decay
        self._states: dict[StateKey, _AdamState] = {}

    def update(self, key: StateKey, value: Tensor, gradient: Tensor) -> Tensor:
        """The value after one step."""
        state = self._states.get(key)
        if state is None:
            master = value.detach().to(state_dtype(value.dtype), copy=True)
            kept = torch.bfloat16 if self._rounds else master.dtype
            state = _AdamState(0, master, torch.zeros_like(master, dtype=kept), torch.zeros_like(master, dtype=kept))
            self._states[key] = state
        gradient = gradient.to(state.master.dtype)
        state.steps += 1
        beta1, beta2 = self._betas
        state.master.mul_(1 - self.learning_rate * self._weight_decay)
        first = state.first.to(gradient.dtype).lerp_(gradient, 1 - beta1)
        second = state.second.to(gradient.dtype).mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = self.learning_rate / (1 - beta1**state.steps)
        denominator = (second.sqrt() / (1 - beta2**state.steps) ** 0.5).add_(self._epsilon)
        state.master.addcdiv_(first, denominator, value=-step_size)
        state.first, state.second = first.to(state.first.dtype), second.to(state.second.dtype)
        return state.master.to(value.dtype, copy=True)


class SGD:
    """Plain stochastic gradient descent."""

    def __init__(self, learning_rate: float = 1e-2) -> None:
        self.learning_rate = learning_rate
        self._masters: dict[StateKey, Tensor] = {}

    def update(self, key: StateKey, value: Tensor, gradient: Tensor) -> Tensor:
        """The value after one step."""
        dtype = state_dtype(value.dtype)
        if value.dtype == dtype:
            return value - self.learning_rate * gradient
        master = self._masters.get(key)
        master = value.detach().to(dtype) if master is None else master
        self._masters[key] = master - self.learning_rate * gradient.to(dtype)
        return self._masters[key].to(value.dtype)


def make_optimizer(name: str, states: str = "fp32") -> Optimizer:
    """The optimizer of a plan.

    Args:
        name: ``adamw`` or ``sgd``.
        states: element type of AdamW's moments, ``fp32`` or ``bf16``; SGD has none.

    Raises:
        ApplyError: the name is unknown.
    """
    if name == "adamw":
        return AdamW(states)
    if name == "sgd":
        return SGD()
    raise ApplyError(f"optimizer {name!r} is unknown, expected adamw or sgd", hint="plan with --optimizer adamw")
