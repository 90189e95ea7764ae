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
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) with torch.optim's defaults."""

    def __init__(
        self,
        learning_rate: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        epsilon: float = 1e-8,
        weight_decay: float = 0.01,
    ) -> None:
        self.learning_rate = learning_rate
        self._betas = betas
        self._epsilon = epsilon
        self._weight_decay = weight_decay
        self._states: dict[StateKey, _AdamState] = {}

    def update(self, key: StateKey, value: Tensor, gradient: Tensor) -> Tensor:
        """The value after one step."""
        state = self._states.get(key)
        if state is None:
            master = value.detach().to(state_dtype(value.dtype), copy=True)
            state = _AdamState(0, master, torch.zeros_like(master), torch.zeros_like(master))
            self._states[key] = state
        gradient = gradient.to(state.master.dtype)
        state.steps += 1
        beta1, beta2 = self._betas
        state.master.mul_(1 - self.learning_rate * self._weight_decay)
        state.first.lerp_(gradient, 1 - beta1)
        state.second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        step_size = self.learning_rate / (1 - beta1**state.steps)
        denominator = (state.second.sqrt() / (1 - beta2**state.steps) ** 0.5).add_(self._epsilon)
        state.master.addcdiv_(state.first, denominator, value=-step_size)
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


def make_optimizer(name: str) -> Optimizer:
    """The optimizer of a plan.

    Raises:
        ApplyError: the name is unknown.
    """
    if name == "adamw":
        return AdamW()
    if name == "sgd":
        return SGD()
    raise ApplyError(f"optimizer {name!r} is unknown, expected adamw or sgd", hint="plan with --optimizer adamw")
