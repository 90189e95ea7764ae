"""What runs again before the backward of a region under selective recompute: a minimum cut.

Which tensors to keep from forward to backward, so that everything that backward reads is kept or can be made again from
kept ones by cheap operators? Fewest bytes first, then fewest operators that run again. It is a question about the graph
alone (global sizes, no placements), so that the answer is one for all plans and all equal regions.

The cut: Ford and Fulkerson 1956; which operators run again is a choice between two sides, and a tensor costs its bytes
where it is read on one side and not made there (a project selection problem, Picard 1976).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import networkx as nx

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import CUSTOM_RULE, ComputeKind, TensorType, kept_for_backward, record_of, rule_of

CHEAP_FLOPS = 512
"""Most FLOPs per element of the outputs of an operator that may run again. A product over the head dim (2 x 64 to 2 x
256) lies below, one over the hidden dim (2 x 768 and more) above: Korthikanti et al. 2022, "Reducing Activation
Recomputation in Large Transformer Models", section 5, recompute just the former."""

_COMPUTED_BITS = 16
"""Bits of floats of 16 bits and more: they take the plan's precision, and the cut shall not depend on it."""
_DIGITS = re.compile(r"[0-9]+")

_END = -1
"""The side of what does not run again."""
_START = -2
"""The side of what does."""


def rerun_operators(graph: Graph, operator_indices: Sequence[int]) -> frozenset[int]:
    """The operators of a region that run again before its backward, where it is recomputed selectively.

    Never among them: operators above ``CHEAP_FLOPS``, random ones, control flow, custom and unknown ones, and those
    with an output that is read outside the region or is one of the graph's.

    Args:
        graph: bound for training.
        operator_indices: the region, indices into ``Graph.operators``.

    Returns:
        Indices into ``Graph.operators``.
    """
    indices = sorted(operator_indices)
    inside = set(indices)
    read_outside = set(graph.outputs)
    for index, operator in enumerate(graph.operators):
        if index not in inside:
            read_outside.update(name for name in operator.inputs if name is not None)
    return _rerun(graph, indices, read_outside)


def rerun_by_region(graph: Graph, regions: Sequence[Sequence[int]]) -> tuple[frozenset[int], ...]:
    """``rerun_operators`` of each of the regions that make up a graph, in one pass.

    Args:
        graph: bound for training.
        regions: indices of the operators of each; together all of the graph's.
    """
    region_of = {index: number for number, indices in enumerate(regions) for index in indices}
    maker = {name: index for index, operator in enumerate(graph.operators) for name in operator.outputs}
    read_outside = set(graph.outputs)
    for index, operator in enumerate(graph.operators):
        read_outside.update(
            name
            for name in operator.inputs
            if name is not None and name in maker and region_of[maker[name]] != region_of[index]
        )
    return tuple(_rerun(graph, sorted(indices), read_outside) for indices in regions)


def _rerun(graph: Graph, indices: Sequence[int], read_outside: set[str]) -> frozenset[int]:
    problem = _problem(graph, [graph.operators[index] for index in indices], read_outside)
    return frozenset(indices[position] for position in _minimum_cut(problem))


def made_gradients(graph: Graph, operator: Operator) -> tuple[bool, ...]:
    """Per operand, whether the operator's backward makes its gradient."""
    if not any(graph.tensors[name].requires_gradient for name in operator.outputs):
        return (False,) * len(operator.inputs)
    differentiable = record_of(operator.signature).differentiable_operands
    return tuple(
        name is not None
        and graph.tensors[name].requires_gradient
        and (differentiable is None or position in differentiable)
        for position, name in enumerate(operator.inputs)
    )


def is_cheap(graph: Graph, operator: Operator) -> bool:
    """Whether an operator may run again: few FLOPs per element, and the same result each time."""
    signature = operator.signature
    record = record_of(signature)
    if record.random or not record.known or operator.type == "Loss" or graph.body(operator) is not None:
        return False
    if signature.attribute(CUSTOM_RULE) is not None:
        return False
    if record.kind is not ComputeKind.CONTRACTION:
        return True
    rule = rule_of(signature)
    points = math.prod(factor.size for index, factor in enumerate(rule.factors) if index not in rule.layout)
    return 2 * points <= CHEAP_FLOPS * sum(output.num_elements for output in signature.outputs)


@dataclass(frozen=True, slots=True)
class _Node:
    """An operator of a region; tensors are numbered by first appearance."""

    may_rerun: bool
    reads: tuple[int, ...]
    makes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Problem:
    """A region without its names: equal regions have equal problems."""

    nodes: tuple[_Node, ...]
    bytes: tuple[int, ...]
    """Per tensor."""
    wanted: frozenset[int]
    """Tensors that backward reads."""


def _problem(graph: Graph, operators: Sequence[Operator], read_outside: set[str]) -> _Problem:
    numbers: dict[str, int] = {}
    sizes: list[int] = []
    wanted: set[int] = set()
    nodes: list[_Node] = []

    def number(name: str) -> int:
        if name not in numbers:
            numbers[name] = len(numbers)
            sizes.append(_num_bytes(graph.tensors[name].type))
        return numbers[name]

    for operator in operators:
        reads = [
            name if name is not None and graph.tensors[name].kind in (TensorKind.ACTIVATION, TensorKind.INPUT) else None
            for name in operator.inputs
        ]
        kept_inputs, kept_outputs = kept_for_backward(record_of(operator.signature), made_gradients(graph, operator))
        wanted.update(number(name) for position in kept_inputs if (name := reads[position]) is not None)
        wanted.update(number(operator.outputs[position]) for position in kept_outputs)
        nodes.append(
            _Node(
                may_rerun=is_cheap(graph, operator) and read_outside.isdisjoint(operator.outputs),
                reads=tuple(dict.fromkeys(number(name) for name in reads if name is not None)),
                makes=tuple(number(name) for name in operator.outputs),
            )
        )
    return _Problem(tuple(nodes), tuple(sizes), frozenset(wanted))


def _num_bytes(type: TensorType) -> int:
    """Bytes of a whole tensor, by the width in its type's name (a byte for ``bool`` and ``string``)."""
    width = _DIGITS.search(type.dtype)
    bits = _COMPUTED_BITS if type.is_float else int(width.group()) if width else 8
    return -(-type.num_elements * bits // 8)


@lru_cache(maxsize=1024)
def _minimum_cut(problem: _Problem) -> frozenset[int]:
    """Positions of the operators that run again.

    An operator on the side of the start runs again; a tensor on that side is wanted by backward or by an operator that
    runs again. The edge of a wanted tensor to its maker is cut, and its bytes are paid, where the maker does not run
    again. One operator more costs less than one byte.
    """
    network = nx.DiGraph()
    network.add_nodes_from((_START, _END))
    maker = {tensor: position for position, node in enumerate(problem.nodes) for tensor in node.makes}
    unit = len(problem.nodes) + 1
    first_tensor = len(problem.nodes)
    for position, node in enumerate(problem.nodes):
        if not node.may_rerun:
            continue
        network.add_edge(position, _END, capacity=1)
        for tensor in node.reads:
            network.add_edge(position, first_tensor + tensor)
    for tensor, size in enumerate(problem.bytes):
        made_by = maker.get(tensor, _END)
        if made_by != _END and not problem.nodes[made_by].may_rerun:
            made_by = _END
        network.add_edge(first_tensor + tensor, made_by, capacity=size * unit)
    for tensor in sorted(problem.wanted):
        network.add_edge(_START, first_tensor + tensor)
    _, (again, _) = nx.minimum_cut(network, _START, _END)
    return frozenset(node for node in again if 0 <= node < len(problem.nodes))
