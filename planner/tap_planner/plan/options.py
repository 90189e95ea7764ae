"""What the user asks of the planner: options as given, constraints, and the whole request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from tap_planner.operators import CustomRule
from tap_planner.plan.overlap import AS_LIBRARY
from tap_planner.plan.place_rules import PlaceRule
from tap_planner.plan.rules import Constraint

MODES = ("train", "infer")
OPTIMIZERS = ("adamw", "sgd")
OPTIMIZER_STATES = ("fp32", "bf16")
"""Element types of AdamW's moments."""
PRECISIONS = ("bf16", "fp16", "fp32", "fp64")
LOSSES = ("mean", "sum", "cross-entropy")
RECOMPUTES = ("none", "selective", "full")
OBJECTIVES = ("time", "memory", "communication")
COSTS = ("topology", "volume")
METHODS = ("sharding", "device-placement", "auto")
"""How a model is spread: tensors split (data, tensor, pipeline parallelism), whole operators on devices, or either."""
TRAVERSAL_ORDERS = (
    *("topo", "reversed-topo", "dfs-preorder", "dfs-postorder", "bfs", "lexico-topo"),
    "upward-rank",
)
"""Of device placement, beside ``random:SEED``; ``device_placement.order_groups`` makes them."""
TARGETS = ("torchtitan", "megatron", "deepspeed", "transformers")

Auto = Literal["auto"]
"""The search chooses."""


DEFAULT_SCHEDULE = "1f1b"
"""Of a pipeline."""


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
    optimizer_states: str = "fp32"
    """Element type of AdamW's moments: ``fp32`` (float64 at fp64), ``bf16``, or ``auto``: bf16 where that pays."""
    loss: str | None = None
    """``mean``, ``sum`` or ``cross-entropy``; None in a request: the mean, with a warning; None in inference."""
    loss_output: str | None = None
    """Graph output that the loss reads; None in a request: the first float output."""
    objective: str = "time"
    """What is to be least: ``time`` (objective A), ``memory`` (per device; of the plans that need the least, the time)
    or ``communication`` (bytes that a device sends in a step)."""
    method: str = "sharding"
    """``sharding`` (operators are split, and run in pipelines), ``device-placement`` (every operator whole, on one
    device), or ``auto``: whichever is predicted faster."""
    traversal_order: str = "auto"
    """Of device placement: ``auto``, one of ``TRAVERSAL_ORDERS``, or ``random:SEED``."""
    places: tuple[PlaceRule, ...] = ()
    """Of device placement: where operators may lie."""
    cost: str = "topology"
    """How communication is priced: ``topology``, or ``volume``: what is sent over one bandwidth, for comparison."""
    overlap: str = AS_LIBRARY
    """What the runtime that will run the plan hides behind computation: ``none``, ``data``, ``all`` (``Overlap``), or
    ``auto``: what is usual over the cluster's library. It concerns the prediction alone."""
    zero: int | Auto = "auto"
    """ZeRO level 0 to 3."""
    microbatches: int | Auto = "auto"
    recompute: str = "auto"
    """``auto``, ``none``, ``selective`` or ``full``."""
    mesh: str | None = None
    """``dp=2,tp=2``, or ``pp=4,dp=2,tp=2`` with four pipeline stages; None: the search chooses."""
    stages: int | Auto = 1
    """Pipeline stages of the meshes that the search chooses (a ``mesh`` that is given names its own)."""
    schedule: str = DEFAULT_SCHEDULE
    """Of a pipeline: one of ``schedule.SCHEDULES``, ``auto``, or the name of ``order``."""
    order: tuple[str, ...] = ()
    """Lines of an order of the user's own (``schedule.parse_order``); empty: what ``schedule`` names."""
    chunks: int | None = None
    """Parts of the model on each pipeline stage; None: as few as the schedule needs, several with ``auto``."""
    max_axes: int = 2
    """Most axes of a mesh that the search chooses."""
    allow_idle: bool = False
    """Whether a mesh may have fewer devices than there are."""
    gap_basis_points: int = 10
    """The search ends when its plan is proven to be within this of the optimum; 0: at the optimum."""
    max_regret_basis_points: int | None = None
    """Of a plan that stays near to an old one: by how much its objective may exceed that of the best plan."""
    max_memory_bytes: int | Literal["device", "none"] = "device"
    """Limit per device: ``device`` (its usable memory), ``none`` (no limit) or bytes."""
    constraints: tuple[Constraint, ...] = ()
    target: str | None = None
    """Framework (``TARGETS``) that must be able to express the plan; None: whatever ``tap-apply`` runs."""
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
