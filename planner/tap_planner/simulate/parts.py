"""What parts of a product take, and parts of a collective: each is priced as what it is."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cost import local_work
from tap_planner.graph import TensorKind
from tap_planner.operators import ComputeKind, record_of, rule_of
from tap_planner.program import Part, Program, local_factor_sizes, local_operands, part_gradients
from tap_planner.sharding import local_elements
from tap_planner.simulate.durations import Durations

_TYPES = frozenset(
    {
        *("MatMul", "Gemm", "Einsum"),
        *(f"com.microsoft::{name}" for name in ("FusedMatMul", "FusedGemm", "GemmFastGelu", "MatMulNBits")),
    }
)
"""Operators that may be done in parts, where no dim is one of both operands and the result."""


class PartTimes:
    """What products and collectives take in parts.

    Args:
        program: the plan, lowered.
        durations: of its instructions.
    """

    def __init__(self, program: Program, durations: Durations) -> None:
        self._program = program
        self._durations = durations
        self._rows: dict[int, int | None] = {}
        self._parts: dict[tuple[int, bool, int], int | None] = {}

    def is_product(self, index: int) -> bool:
        """Whether an operator is a product of rows with a matrix."""
        return self._row(index) is not None

    def product_ns(self, index: int, *, backward: bool, parts: int) -> int | None:
        """One of equal parts of a product's rows; None where there are fewer rows.

        Args:
            index: of the operator.
            backward: whether it is the gradient of its operand that is made.
            parts: how many.
        """
        key = (index, backward, parts)
        if key not in self._parts:
            self._parts[key] = self._part_ns(*key)
        return self._parts[key]

    def collective_ns(
        self, kind: str, axes: tuple[int, ...], elements: int, dtype: str, *, stage: int | None, parts: int
    ) -> int:
        """A collective of one of equal parts of a payload.

        Args:
            kind: of the collective.
            axes: over which.
            elements: of the whole payload.
            dtype: its element type.
            stage: on whose links.
            parts: how many.
        """
        num_bytes = self._durations.compute.tensor_bytes(dtype, -(-elements // parts))
        return self._durations.links.cost(kind, axes, num_bytes, stage).ns

    def _row(self, index: int) -> int | None:
        """The longest factor of a product's rows; None where an operator is none."""
        if index not in self._rows:
            self._rows[index] = self._longest_row(index)
        return self._rows[index]

    def _longest_row(self, index: int) -> int | None:
        signature, decision = self._program.graph.operators[index].signature, self._program.decisions.operators[index]
        if record_of(signature).type not in _TYPES:
            return None
        rule = rule_of(signature)
        sides = [frozenset(factor for dim in operand or () for factor in dim) for operand in rule.inputs[:2]]
        result = frozenset(factor for dim in rule.outputs[0] for factor in dim)
        if len(sides) < 2 or sides[0] & sides[1] & result:
            return None
        first = decision.inputs[0]
        is_matrix = first is None or self._program.graph.tensors[first.tensor].kind is TensorKind.PARAMETER
        sizes = local_factor_sizes(self._program, index)
        return max(sides[is_matrix] & result, key=lambda factor: sizes[factor], default=None)

    def _part_ns(self, index: int, backward: bool, parts: int) -> int | None:
        program, row = self._program, self._row(index)
        assert row is not None
        operator, decision = program.graph.operators[index], program.decisions.operators[index]
        rule, sizes = rule_of(operator.signature), list(local_factor_sizes(program, index))
        whole = sizes[row]
        if whole < parts:
            return None
        sizes[row] = -(-whole // parts)

        def share(elements: int, dims: Sequence[Sequence[int]] | None) -> int:
            return -(-elements * sizes[row] // whole) if any(row in dim for dim in dims or ()) else elements

        made = [
            local_elements(output.shape, given.placement, program.decisions.mesh_shape)
            for output, given in zip(operator.signature.outputs, decision.outputs, strict=True)
        ]
        compute = self._durations.compute_of(index)
        work = local_work(
            compute,
            operator.signature,
            factor_sizes=tuple(sizes),
            input_elements=[share(*pair) for pair in zip(local_operands(program, index), rule.inputs, strict=True)],
            output_elements=[share(*pair) for pair in zip(made, rule.outputs, strict=True)],
            requires_gradient=part_gradients(program.graph, decision, Part.INPUTS),
        )
        flops, num_bytes = work.forward_flops, work.forward_bytes
        if backward:  # whose floor is one operator's, however many parts that launches
            flops, num_bytes = work.backward_flops, work.backward_bytes
        return compute.time_ns(flops, num_bytes, ComputeKind.CONTRACTION)
