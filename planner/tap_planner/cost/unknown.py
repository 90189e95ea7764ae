"""What operators that nobody knows cost: they are replicated, and only their bytes are known."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from tap_planner.cost.compute import element_bits, operator_work
from tap_planner.graph import Graph, Operator
from tap_planner.operators import TensorType, record_of, rule_of

__all__ = ["UnknownOperators", "unknown_operators"]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownOperators:
    """The operators of a graph without a record, and what they touch."""

    counts: tuple[tuple[str, int], ...]
    """Type and number of operators, sorted by type."""
    bytes: int
    """Operands and results of these operators in one step, whole, forward and backward."""
    total_bytes: int
    """The same of all operators."""

    @property
    def warning(self) -> str:
        """All types in one message, with what to do."""
        shown = ", ".join(f"{type} ({count} operator{'s' if count > 1 else ''})" for type, count in self.counts)
        be, its, it = ("is", "its", "it") if len(self.counts) == 1 else ("are", "their", "them")
        return (
            f"{shown} {be} not known: replicated on every device; {its} operands and results are "
            f"{_percent(self.bytes, self.total_bytes)} of the bytes that the step touches; "
            f"describe {it} with --custom-rule FILE (docs/custom-rules.md)"
        )


def unknown_operators(graph: Graph, precision: str) -> UnknownOperators | None:
    """The operators without a record, or None if there are none.

    Args:
        graph: bound with the global batch.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
    """
    unknown = [operator for operator in graph.operators if not record_of(operator.signature).known]
    if not unknown:
        return None
    return UnknownOperators(
        counts=tuple(sorted(Counter(operator.type for operator in unknown).items())),
        bytes=sum(_touched_bytes(graph, operator, precision) for operator in unknown),
        total_bytes=sum(_touched_bytes(graph, operator, precision) for operator in graph.operators),
    )


def _touched_bytes(graph: Graph, operator: Operator, precision: str) -> int:
    signature = operator.signature
    record = record_of(signature)
    inputs = tuple(0 if operand is None else _bytes(operand, precision) for operand in signature.inputs)
    outputs = tuple(_bytes(output, precision) for output in signature.outputs)
    makes_gradients = any(graph.tensors[name].requires_gradient for name in operator.outputs)
    needed = [
        makes_gradients
        and name is not None
        and graph.tensors[name].requires_gradient
        and (record.differentiable_operands is None or position in record.differentiable_operands)
        for position, name in enumerate(operator.inputs)
    ]
    work = operator_work(
        record,
        factor_sizes=tuple(factor.size for factor in rule_of(signature).factors),
        input_bytes=inputs,
        output_bytes=outputs,
        gradient_operands=sum(needed),
        gradient_bytes=sum(size for size, wanted in zip(inputs, needed, strict=True) if wanted),
    )
    return work.forward_bytes + work.backward_bytes


def _bytes(type_: TensorType, precision: str) -> int:
    return -(-type_.num_elements * element_bits(type_.dtype, precision) // 8)


def _percent(part: int, whole: int) -> str:
    """Whole percents, one decimal below ten."""
    tenths = (1000 * part + whole // 2) // max(whole, 1)
    if part > 0 and tenths == 0:
        return "less than 0.1 %"
    return f"{tenths // 10} %" if tenths >= 100 or tenths % 10 == 0 else f"{tenths // 10}.{tenths % 10} %"
