"""The bound, canonical, immutable graph that everything else reads."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from tap_planner.graph.constants import ConstantStore
from tap_planner.operators import CACHE_OPERAND, OUTPUT, AttributeValue, OperatorSignature, TensorType


class TensorKind(enum.Enum):
    """Where a tensor's value comes from."""

    INPUT = "input"
    PARAMETER = "parameter"
    """A read of a parameter (trainable or not), see ``ParameterRead``."""
    CONSTANT = "constant"
    """Depends on no input and no parameter; every rank can make any part of it."""
    ACTIVATION = "activation"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterRead:
    """How a tensor reads a stored parameter: a permutation of its dims, perhaps with dims of size 1 added."""

    parameter: str
    dims: tuple[int | None, ...]
    """For each dim of the tensor the dim of the stored parameter, or None for an added dim of size 1. Stored dims
    that are missing have size 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A value of the graph."""

    name: str
    """ONNX name."""
    type: TensorType
    kind: TensorKind
    requires_gradient: bool
    """Float, depends on a trainable parameter, and the loss depends on it (False everywhere in inference)."""
    read: ParameterRead | None = None
    """For ``TensorKind.PARAMETER``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A stored parameter of the model: one ONNX initializer (or weight-like Constant)."""

    name: str
    type: TensorType
    """Stored type; the precision option says what it is cast to."""
    trainable: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """What control flow that depends on data carries: a branch or loop body, run as a whole by ``run_body``."""

    content: bytes
    """A serialised ONNX model with operands ``i0``, ``i1``, ... and without weights."""
    key: str
    """SHA-256 of ``content``: the value of the operator's attribute ``body``."""
    num_nodes: int
    """Nodes inside, at any depth."""
    label: str
    """The node in the file, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One operator; it is identified by ``id``."""

    id: str
    """Name of the first output."""
    name: str
    """Node name for display; may be empty or doubled."""
    signature: OperatorSignature
    inputs: tuple[str | None, ...]
    """Tensor names; None for an absent optional operand."""
    outputs: tuple[str, ...]
    """Tensor names; an unused optional output has a made-up unique name."""

    @property
    def type(self) -> str:
        """Operator type."""
        return self.signature.type

    @property
    def attributes(self) -> tuple[tuple[str, AttributeValue], ...]:
        """Attributes, with the structural integer operands among them."""
        return self.signature.attributes


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """A bound model: static shapes, operators in topological order, no weights."""

    name: str
    """Base name of the model file."""
    operators: tuple[Operator, ...]
    tensors: Mapping[str, Tensor]
    parameters: tuple[Parameter, ...]
    """In order of first use."""
    inputs: tuple[str, ...]
    """Graph inputs that are fed at run time (``labels`` last where cross-entropy adds it)."""
    outputs: tuple[str, ...]
    """Graph outputs (tensor names after canonicalisation), without the loss; in inference results of ``Output``
    operators."""
    output_names: tuple[str, ...]
    """The ONNX names of ``outputs``."""
    loss: str | None
    """Name of the loss tensor (output of the last operator, type ``Loss``) when training, else None."""
    batch: int
    """Size of the global batch."""
    dims: Mapping[str, int]
    """How symbolic dims were bound."""
    batch_dims: Mapping[str, int | None]
    """For each graph input the dim that carries the batch, or None."""
    constants: ConstantStore
    """Values of the tensors of kind CONSTANT, computed when asked for."""
    file_sha256: str
    digest: str
    """SHA-256 of the bound graph without weights and without file name."""
    warnings: tuple[str, ...]
    """What the user should know (default loss, ...)."""
    ruled: tuple[str, ...] = ()
    """Types of the operators that were bound with a custom rule, sorted."""
    bodies: Mapping[str, Body] = field(default_factory=dict)
    """Bodies of control flow that stays whole, by the operators' attribute ``body``."""
    is_batch_fixed: bool = False
    """Whether the model cannot be bound with another batch."""
    new_positions: int | None = None
    """By how many positions (tokens) a step advances the caches in inference; None without caches, or where they
    differ."""

    @property
    def caches(self) -> Mapping[str, int]:
        """For each graph input that a step returns in its next state, the ``Output`` operator (index) that says where
        it lies between steps."""
        return {
            name: index
            for index, operator in enumerate(self.operators)
            if operator.type == OUTPUT
            for name in operator.inputs[CACHE_OPERAND:]
            if name is not None
        }

    def tensor(self, name: str) -> Tensor:
        """The tensor called ``name``."""
        return self.tensors[name]

    def body(self, operator: Operator) -> Body | None:
        """The body that an operator carries, None for all but control flow."""
        return self.bodies.get(str(operator.signature.attribute("body", ""))) if self.bodies else None
