"""What the user asks of the planner: options as given, constraints, and the whole request."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tap_planner.errors import UsageError
from tap_planner.operators import CustomRule

MODES = ("train", "infer")
OPTIMIZERS = ("adamw", "sgd")
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
LOSSES = ("mean", "sum", "cross-entropy")
RECOMPUTES = ("none", "full")

Auto = Literal["auto"]
"""The search chooses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Constraint:
    """A rule that every plan of the space must keep: an axis on which a factor may not, or must, be split."""

    kind: Literal["batch", "operator"]
    """``batch``: the factor that carries the batch, in every operator."""
    pattern: str = ""
    """Shell pattern for operator ids, names or types (kind ``operator``)."""
    axis: str
    value: str = ""
    """Strategy value on the axis: a factor, ``none`` or ``partial`` (kind ``operator``)."""
    forbid: bool
    """True: the choice is not allowed; False: it is the only one allowed."""

    def __str__(self) -> str:
        sign = "!=" if self.forbid else "="
        if self.kind == "batch":
            return f"batch{sign}{self.axis}"
        return f"{self.pattern}:{self.axis}{sign}{self.value}"


_BATCH = re.compile(r"batch(?P<sign>!?=)(?P<axis>[A-Za-z_]\w*)")
_OPERATOR = re.compile(r"(?P<pattern>.+):(?P<axis>[A-Za-z_]\w*)(?P<sign>!?=)(?P<value>[\w\[\]]+)")


def parse_constraint(text: str) -> Constraint:
    """Read ``batch!=AXIS``, ``PATTERN:AXIS=FACTOR`` or ``PATTERN:AXIS!=FACTOR``.

    Raises:
        UsageError: the text is none of these.
    """
    match = _BATCH.fullmatch(text)
    if match:
        return Constraint(kind="batch", axis=match["axis"], forbid=match["sign"] == "!=")
    match = _OPERATOR.fullmatch(text)
    if match is None:
        raise UsageError(
            f"--constraint {text!r} is not understood, expected batch!=AXIS or PATTERN:AXIS=FACTOR",
            hint="For example: --constraint 'batch!=tp' or --constraint 'MatMul:tp=n'.",
        )
    return Constraint(
        kind="operator",
        pattern=match["pattern"],
        axis=match["axis"],
        value=match["value"],
        forbid=match["sign"] == "!=",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Everything that decides about a plan beside the model and the cluster; a plan stores it to be re-planned."""

    mode: str = "train"
    """``train`` or ``infer``."""
    batch: int | None = None
    """Global batch of one step; None only in a request: the model's own (a plan stores the bound value)."""
    precision: str = "bf16"
    """``bf16``, ``fp16``, ``fp32`` or ``fp64``."""
    optimizer: str = "adamw"
    """``adamw`` or ``sgd`` (not used in inference)."""
    loss: str | None = None
    """``mean``, ``sum`` or ``cross-entropy``; None in a request: the mean, with a warning; None in inference."""
    loss_output: str | None = None
    """Graph output that the loss reads; None in a request: the first float output."""
    cost: str = "topology"
    """Cost model."""
    zero: int | Auto = "auto"
    """ZeRO level 0 to 3."""
    microbatches: int | Auto = "auto"
    recompute: str = "auto"
    """``auto``, ``none`` or ``full``."""
    mesh: str | None = None
    """``dp=2,tp=2``; None: the search chooses."""
    max_axes: int = 2
    """Most axes of a mesh that the search chooses."""
    gap_basis_points: int = 10
    """The search ends when its plan is proven to be within this of the optimum; 0: at the optimum."""
    max_memory_bytes: int | Literal["device", "none"] = "device"
    """Limit per device: ``device`` (its usable memory), ``none`` (no limit) or bytes."""
    constraints: tuple[Constraint, ...] = ()
    dims: Mapping[str, int] = field(default_factory=dict)
    """Symbolic dims as given."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Whole shapes of inputs as given."""
    values: Mapping[str, int | tuple[int, ...]] = field(default_factory=dict)
    """Integer inputs that are constants, as given: one number for all elements, or one for each."""
    batch_dim: str | None = None
    """Symbolic dim that carries the batch."""
    freeze: tuple[str, ...] = ()
    """Patterns of parameters that are not trained."""
    train: tuple[str, ...] = ()
    """Patterns of parameters that are trained although their role does not say so."""
    custom_rules: tuple[CustomRule, ...] = ()
    """Rules of operators without a record; a plan stores those that its model uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """A question to the planner."""

    model: Path
    """ONNX file."""
    cluster: str
    """Path of a cluster.yaml, or the shorthand ``4x8:h100-sxm5-80gb``."""
    options: PlanOptions = field(default_factory=PlanOptions)


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyRequest:
    """A wish to run a plan."""

    plan: Path
    model: Path
    """ONNX file, already found (given, beside the plan, or in the current folder)."""
    nproc: int | None = None
    """Local processes to start; None: join a launcher's, or emulate all ranks in this process."""
    inputs: Path | None = None
    """``.npz`` with the inputs by name; None: synthetic ones by ``seed``."""
    seed: int = 0
    steps: int = 1
    init_random: bool = False
    """Make random weights by ``seed`` instead of reading them."""
    verify: bool = False
    """Compare with single-process execution, and the collectives with the plan's."""
    backend: str | None = None
    """``gloo`` or ``nccl``; None: by device."""
    custom_ops: tuple[Path, ...] = ()
    """Python files with torch functions of operators that have none here; their code is run."""
