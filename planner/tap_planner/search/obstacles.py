"""Why an axis is not used: operators none of whose dims can be cut into as many parts as the axis has devices."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tap_planner.graph import Graph
from tap_planner.operators import FactorKind, OperatorSignature, rule_of
from tap_planner.plan import AxisDecision
from tap_planner.sharding import axis_choices, make_strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class Obstacle:
    """Operators that every device along an axis computes in full, as their sizes do not divide."""

    axis: str
    num_devices: int
    operators: tuple[str, ...]
    """Ids, in graph order."""
    type: str
    """Of the first of them."""
    sizes: tuple[int, ...]
    """Of the first: what may be split, but not into so many equal parts."""

    def __str__(self) -> str:
        """One line."""
        first = f"{self.operators[0]!r} ({self.type})"
        others = f" and {len(self.operators) - 1} more" if len(self.operators) > 1 else ""
        one = len(self.sizes) == 1
        sizes = ("size " if one else "sizes ") + ", ".join(map(str, self.sizes)) + (" is" if one else " are")
        return (
            f"operator {first}{others} cannot be split along {self.axis}: {sizes} no multiple of {self.num_devices}; "
            "every device of the axis computes all of it"
        )


def find_obstacles(graph: Graph, axes: tuple[AxisDecision, ...]) -> tuple[Obstacle, ...]:
    """The obstacles on each axis.

    A dim by itself may be split unevenly. A factor that shares a dim with others (heads in ``batch x heads``, or in
    the columns of a projection) may not: a cut would go through a head.

    Args:
        graph: bound with the batch of one microbatch.
        axes: of the chosen mesh.
    """
    return tuple(_of_axis(graph, axis) for axis in axes if any(_blocked(graph, axis.size)))


def _of_axis(graph: Graph, axis: AxisDecision) -> Obstacle:
    blocked = list(_blocked(graph, axis.size))
    index, sizes = blocked[0]
    return Obstacle(
        axis=axis.name,
        num_devices=axis.size,
        operators=tuple(graph.operators[number].id for number, _ in blocked),
        type=graph.operators[index].type,
        sizes=sizes,
    )


def _blocked(graph: Graph, num_devices: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(operator index, sizes) of operators that could be split into so many parts if only they divided."""
    known: dict[OperatorSignature, tuple[int, ...]] = {}
    for index, operator in enumerate(graph.operators):
        if operator.signature not in known:
            known[operator.signature] = _sizes_in_the_way(operator.signature, num_devices)
        if known[operator.signature]:
            yield index, known[operator.signature]


def _sizes_in_the_way(signature: OperatorSignature, num_devices: int) -> tuple[int, ...]:
    rule = rule_of(signature)
    factors = [factor for factor in rule.factors if factor.kind is not FactorKind.FIXED]
    sizes = tuple(factor.size for factor in factors if factor.size > num_devices > 1)
    if not sizes:
        return ()
    hints: list[tuple[int, ...]] = [() for _ in rule.factors]
    choices = [c for c in axis_choices(rule, hints, [False] * len(signature.inputs)) if c.kind == "factor"]
    splittable = any(make_strategy(signature, rule, (choice,), (num_devices,)) for choice in choices)
    return () if splittable else sizes
