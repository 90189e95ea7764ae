"""Plans that experts write by hand, as rules on the space, and checks that a plan really is one of them.

A rule names weights by the model's own parameter names; what it leaves open (reshapes, activations, biases,
microbatches, recomputation) the search fills in as well as it can, so that an expert's plan is priced at its best.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from tap_planner.graph import Graph
from tap_planner.plan import Constraint, Decisions, OperatorDecision, parse_constraint
from tap_planner.sharding import Placement, map_batch


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Where a model's weights are: shell patterns of parameter names."""

    column: tuple[str, ...] = ()
    """Projections whose outputs Megatron splits (q, k, v, up)."""
    row: tuple[str, ...] = ()
    """Projections whose inputs it splits (o, down)."""
    norm: tuple[str, ...] = ()
    """Normalisations, by parameter, operator type or operator id."""
    residual: tuple[str, ...] = ()
    """Additions to the residual stream, by operator id."""
    experts: tuple[str, ...] = ()
    """Weights with one matrix for each expert."""
    tables: tuple[str, ...] = ()
    """Embedding tables that are large enough to be split by rows."""
    dense: tuple[str, ...] = ()
    """Weights beside experts and tables."""
    width: int = 8
    """Devices that one layer can be split over (heads, experts)."""
    has_sequence: bool = False
    """Whether the residual stream is [batch, sequence, hidden] with a sequence that can be split."""


Check = Callable[["Plan"], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """A way to write plans by hand."""

    name: str
    mesh: Callable[[int, int], str]
    """(devices, width) -> mesh"""
    zero: int
    rules: Callable[[Anatomy], tuple[str, ...]]
    check: Check
    suits: Callable[[Anatomy], bool]
    """Whether it can be written for a model."""

    def constraints(self, anatomy: Anatomy, mesh: str) -> tuple[Constraint, ...]:
        """Its rules for one model; where one layer takes all devices there is no ``dp`` to ask anything of."""
        rules = map(parse_constraint, self.rules(anatomy))
        return tuple(rule for rule in rules if rule.axis != "dp" or "dp=" in mesh)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A plan, and what its model is made of."""

    anatomy: Anatomy
    decisions: Decisions
    graph: Graph
    axes: Mapping[str, int] = field(default_factory=dict)
    """Name -> number."""

    def readers(self, patterns: tuple[str, ...]) -> Iterator[tuple[OperatorDecision, int]]:
        """(operator, operand) of every read of the parameters; each pattern must name something."""
        for pattern in patterns:
            found = list(self._readers(pattern))
            assert found, f"{pattern} names no parameter"
            yield from found

    def _readers(self, pattern: str) -> Iterator[tuple[OperatorDecision, int]]:
        for operator in self.decisions.operators:
            for position, operand in enumerate(operator.inputs):
                read = None if operand is None else self.graph.tensors[operand.tensor].read
                if read is not None and fnmatchcase(read.parameter, pattern):
                    yield operator, position

    def operand(self, operator: OperatorDecision, position: int, axis: str) -> tuple[Placement, int]:
        """Placement of an operand on an axis, and its number of dims."""
        operand = operator.inputs[position]
        assert operand is not None
        return operand.placement[self.axes[axis]], len(self.graph.tensors[operand.tensor].type.shape)

    def output(self, operator: OperatorDecision, axis: str) -> tuple[Placement, int]:
        """Placement of the first output on an axis, and its number of dims."""
        output = operator.outputs[0]
        return output.placement[self.axes[axis]], len(output.shape)

    def named(self, patterns: tuple[str, ...]) -> Iterator[OperatorDecision]:
        """Operators by type or id, or by a parameter that they read."""
        for operator in self.decisions.operators:
            reads = (self.graph.tensors[o.tensor].read for o in operator.inputs if o is not None)
            names = (operator.type, operator.id, *(read.parameter for read in reads if read is not None))
            if any(fnmatchcase(name, pattern) for name in names for pattern in patterns):
                yield operator


# -- rules -------------------------------------------------------------------------------------------------------


def _each(patterns: tuple[str, ...], demand: str) -> tuple[str, ...]:
    return tuple(f"{pattern}:{demand}" for pattern in patterns)


def _data_parallel(*axes: str) -> Callable[[Anatomy], tuple[str, ...]]:
    return lambda anatomy: ("*:replicate", *(f"batch={axis}" for axis in axes))


def _tensor_parallel(between: str) -> Callable[[Anatomy], tuple[str, ...]]:
    """Column, then row; ``between`` is what the normalisations and the residual stream are on ``tp``."""
    return lambda anatomy: (
        "batch=dp",
        *_each(anatomy.column, "tp=column"),
        *_each(anatomy.row, "tp=row"),
        *_each((*anatomy.norm, *anatomy.residual), f"tp={between}"),
    )


def _expert_parallel(anatomy: Anatomy) -> tuple[str, ...]:
    beside = (*anatomy.dense, *anatomy.norm, *anatomy.residual)
    return ("batch=dp", *_each(anatomy.experts, "ep=expert"), *_each(beside, "ep=batch"))


def _row_wise(anatomy: Anatomy) -> tuple[str, ...]:
    return (
        *_each(anatomy.tables, "rows=vocabulary"),
        *_each(anatomy.dense, "dp=batch"),
        *_each(anatomy.dense, "rows=batch"),
    )


# -- checks ------------------------------------------------------------------------------------------------------


def _is_data_parallel(*axes: str, zero: int) -> Check:
    """Every parameter is whole (but for ZeRO), what has a batch is split along it on every axis."""

    def check(plan: Plan) -> None:
        assert all(p.is_replicate for parameter in plan.decisions.parameters for p in parameter.placement)
        batches = map_batch(plan.graph).choices
        for operator in plan.decisions.operators:
            choices = batches.get(operator.id)
            assert not choices or all(operator.strategy[plan.axes[axis]] in choices for axis in axes), operator.id
        reduced = [parameter for parameter in plan.decisions.parameters if parameter.data_axes]
        assert reduced
        assert all(parameter.zero_level == zero for parameter in reduced)
        if zero == 3:
            numbers = {plan.axes[axis] for axis in axes}
            assert all(
                set(parameter.zero_axes) == numbers for parameter in reduced if len(parameter.data_axes) == len(axes)
            )
            assert any(len(parameter.data_axes) == len(axes) for parameter in reduced)

    return check


def _is_tensor_parallel(sequence: bool) -> Check:
    """Column: the weight's last dim and the output are split; row: the dim before and a sum is left; between them the
    residual stream is whole, or split along the sequence."""

    def check(plan: Plan) -> None:
        for operator, position in plan.readers(plan.anatomy.column):
            weight, rank = plan.operand(operator, position, "tp")
            output, output_rank = plan.output(operator, "tp")
            assert weight.is_shard and weight.dim == rank - 1, operator.id
            assert output.is_shard and output.dim == output_rank - 1, operator.id
        for operator, position in plan.readers(plan.anatomy.row):
            weight, rank = plan.operand(operator, position, "tp")
            assert weight.is_shard and weight.dim == rank - 2, operator.id
            assert plan.output(operator, "tp")[0].is_partial, operator.id
        between = list(plan.named((*plan.anatomy.norm, *plan.anatomy.residual)))
        assert between
        for operator in between:
            output, _ = plan.output(operator, "tp")
            assert output.is_replicate if not sequence else (output.is_shard and output.dim == 1), operator.id

    return check


def _is_expert_parallel(plan: Plan) -> None:
    """Experts are split by expert, everything else by the batch."""
    for operator, position in plan.readers(plan.anatomy.experts):
        weight, rank = plan.operand(operator, position, "ep")
        assert weight.is_shard and weight.dim == rank - 3, operator.id
    for operator, position in plan.readers(plan.anatomy.dense):
        assert plan.operand(operator, position, "ep")[0].is_replicate, operator.id
        output, _ = plan.output(operator, "ep")
        assert output.is_shard and output.dim == 0, operator.id


def _is_row_wise(plan: Plan) -> None:
    """Tables are split by rows, so that looking up leaves a sum; the dense layers are split by the batch."""
    for operator, position in plan.readers(plan.anatomy.tables):
        table, _ = plan.operand(operator, position, "rows")
        assert table.is_shard and table.dim == 0, operator.id
        assert plan.output(operator, "rows")[0].is_partial, operator.id
    for operator, position in plan.readers(plan.anatomy.dense):
        for axis in ("dp", "rows"):
            assert plan.operand(operator, position, axis)[0].is_replicate, operator.id


# -- the experts -------------------------------------------------------------------------------------------------


def _across(inner: str) -> Callable[[int, int], str]:
    return lambda devices, width: f"dp={devices // width},{inner}={width}" if devices > width else f"{inner}={width}"


def _always(anatomy: Anatomy) -> bool:
    return True


EXPERTS: tuple[Expert, ...] = (
    Expert(
        name="DDP",
        mesh=lambda devices, width: f"dp={devices}",
        zero=0,
        rules=_data_parallel("dp"),
        check=_is_data_parallel("dp", zero=0),
        suits=_always,
    ),
    Expert(
        name="FSDP",
        mesh=lambda devices, width: f"dp={devices}",
        zero=3,
        rules=_data_parallel("dp"),
        check=_is_data_parallel("dp", zero=3),
        suits=_always,
    ),
    Expert(
        name="ZeRO-3, 2 axes",
        mesh=lambda devices, width: f"dp={devices // 4},fsdp=4",
        zero=3,
        rules=_data_parallel("dp", "fsdp"),
        check=_is_data_parallel("dp", "fsdp", zero=3),
        suits=_always,
    ),
    Expert(
        name="Megatron TP",
        mesh=_across("tp"),
        zero=1,
        rules=_tensor_parallel("none"),
        check=_is_tensor_parallel(sequence=False),
        suits=lambda anatomy: bool(anatomy.column),
    ),
    Expert(
        name="Megatron TP+SP",
        mesh=_across("tp"),
        zero=1,
        rules=_tensor_parallel("d1"),
        check=_is_tensor_parallel(sequence=True),
        suits=lambda anatomy: bool(anatomy.column) and anatomy.has_sequence,
    ),
    Expert(
        name="DeepSpeed-MoE EP",
        mesh=_across("ep"),
        zero=2,
        rules=_expert_parallel,
        check=_is_expert_parallel,
        suits=lambda anatomy: bool(anatomy.experts),
    ),
    Expert(
        name="row-wise embeddings",
        mesh=lambda devices, width: f"dp={devices // width},rows={width}",
        zero=0,
        rules=_row_wise,
        check=_is_row_wise,
        suits=lambda anatomy: bool(anatomy.tables),
    ),
)
