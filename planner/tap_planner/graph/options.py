"""What the user may say about how a model is bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from tap_planner.operators import CustomRule

LossKind = Literal["mean", "sum", "cross-entropy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """The loss that training minimises."""

    kind: LossKind | None = None
    """None: the mean, with a warning."""
    output: str | None = None
    """ONNX name of the graph output it reads; None: the first float output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindOptions:
    """Values of symbolic dims and inputs, the global batch, and how the model is trained."""

    batch: int | None = None
    """Global batch of one step."""
    dims: Mapping[str, int] = field(default_factory=dict)
    """``name`` or ``input.0`` to size."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole shapes of inputs, for those that have no rank."""
    values: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    """Integer or boolean inputs that become constants: one number for all elements, or one for each."""
    batch_dim: str | None = None
    """Symbolic dim that carries the batch where it is not called ``batch`` and does not lead."""
    training: bool = False
    ends: bool = False
    """Without training: every output gets an ``Output`` operator, as plans for inference need it to be true."""
    loss: LossOptions = field(default_factory=LossOptions)
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained."""
    train: tuple[str, ...] = ()
    """Patterns of parameters that are trained although their role does not say so (applied after ``freeze``)."""
    custom_rules: tuple[CustomRule, ...] = ()
    """Rules of operators without a record, at most one per type."""
