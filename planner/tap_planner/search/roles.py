"""What the factors of operators are in the words of the field: batch, sequence, head, vocabulary, expert, column, row.

Column, row and expert are read off a weight's own operator. The others are dims of the model that are followed from
where they are known (the graph's inputs, an attention, a table that is looked up) through the factor rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property

from tap_planner.graph import Graph, Operator, TensorKind
from tap_planner.operators import ComputeKind, FactorKind, FactorRule, record_of, rule_of
from tap_planner.sharding import map_batch

__all__ = ["ROLES", "Names", "Roles"]

ROLES = ("batch", "sequence", "head", "vocabulary", "expert", "column", "row", "hidden")
"""The readable names."""

Names = frozenset[str]
"""Names of choices as plans write them: ``n``, or ``m[8]`` for a part inside each of 8 equal blocks."""

_Dim = tuple[str, int, int]
"""Tensor, dim, and how many blocks of the dim lie outside (1: the dim begins with it)."""
_Part = tuple[int, int]
"""Factor, and blocks outside (1: the factor itself)."""

_NONE: Names = frozenset()
_ATTENTION = (
    "Attention",
    "MultiHeadAttention",
    "GroupQueryAttention",
    "PackedAttention",
    "DecoderMaskedMultiHeadAttention",
)
_NORMALISED = ("LayerNormalization", "RMSNormalization", "SimplifiedLayerNormalization", "SkipLayerNormalization",
               "SkipSimplifiedLayerNormalization", "EmbedLayerNormalization")  # fmt: skip


class Roles:
    """Roles of the factors of a graph's operators, worked out when they are asked for.

    Args:
        graph: the graph of one microbatch.
        whole: the graph of the whole batch. Where a microbatch is one sample, whatever had a batch there still has
            one, though nothing can split it any more.
    """

    def __init__(self, graph: Graph, whole: Graph | None = None) -> None:
        self._graph = graph
        self._batched = graph if whole is None or graph.batch > 1 else whole
        self._rules = [rule_of(operator.signature) for operator in graph.operators]
        self._found: dict[str, Mapping[str, Names]] = {}

    def of(self, operator: Operator, role: str) -> Names:
        """Names of the choices that split what ``role`` says; empty where the operator has no such thing."""
        if role not in self._found:
            self._found[role] = self._find(role)
        return self._found[role].get(operator.id, _NONE)

    @property
    def is_single(self) -> bool:
        """Whether the graph is one sample of a batch."""
        return self._batched is not self._graph and self._batched.batch > 1

    def _find(self, role: str) -> Mapping[str, Names]:
        if role == "batch":
            return map_batch(self._batched).choices
        if role in ("column", "row"):
            return self._each(_column if role == "column" else _row)
        starts: Callable[[], Iterable[_Dim]] = {
            "sequence": self._sequences,
            "head": self._heads,
            "vocabulary": self._vocabularies,
            "expert": self._experts,
            "hidden": self._normalised,
        }[role]
        return self._follow(starts())

    # -- weights -----------------------------------------------------------------------------------------------

    def weights(self, operator: Operator) -> tuple[int, ...]:
        """Operands that read a parameter with two or more dims of more than one element."""
        return self._weights[operator.id]

    @cached_property
    def _weights(self) -> Mapping[str, tuple[int, ...]]:
        return {
            operator.id: tuple(position for position, name in enumerate(operator.inputs) if self._is_weight(name))
            for operator in self._graph.operators
        }

    def _is_weight(self, name: str | None) -> bool:
        tensor = None if name is None else self._graph.tensors[name]
        return tensor is not None and tensor.read is not None and sum(size > 1 for size in tensor.type.shape) > 1

    def _each(self, role: Callable[[FactorRule, tuple[int, ...], Operator], Iterable[int]]) -> Mapping[str, Names]:
        found: dict[str, Names] = {}
        for operator, rule in zip(self._graph.operators, self._rules, strict=True):
            factors = role(rule, self.weights(operator), operator)
            if factors:
                found[operator.id] = frozenset(rule.factors[factor].name for factor in factors)
        return found

    # -- where dims of the model are known ---------------------------------------------------------------------

    def _sequences(self) -> Iterator[_Dim]:
        """The dim after the batch of inputs with two or three dims."""
        for name in self._graph.inputs:
            if self._graph.batch_dims.get(name) == 0 and len(self._graph.tensors[name].type.shape) in (2, 3):
                yield name, 1, 1

    def _heads(self) -> Iterator[_Dim]:
        """Dims that both activations of a product, or the operands of a fused attention, go through side by side."""
        for operator, rule in zip(self._graph.operators, self._rules, strict=True):
            for factor in _heads(rule, operator, self._is_activation, self.of(operator, "batch")):
                yield from _places(rule, operator, factor)

    def _is_activation(self, name: str | None) -> bool:
        return name is not None and self._graph.tensors[name].kind is TensorKind.ACTIVATION

    def _vocabularies(self) -> Iterator[_Dim]:
        """The dim of a table that ids select from, and the classes of the loss."""
        for operator, rule in zip(self._graph.operators, self._rules, strict=True):
            if operator.type == "Loss":
                name = operator.inputs[0]
                assert name is not None
                yield name, len(self._graph.tensors[name].type.shape) - 1, 1
            elif record_of(operator.signature).kind is not ComputeKind.CONTRACTION:
                for position in self.weights(operator):
                    for factor in _looked_up(rule, position):
                        yield from _places(rule, operator, factor)

    def _experts(self) -> Iterator[_Dim]:
        """Leading dims of a weight that holds one matrix for each expert."""
        for operator, rule in zip(self._graph.operators, self._rules, strict=True):
            for factor in _expert(rule, self.weights(operator), operator):
                yield from _places(rule, operator, factor)

    def _normalised(self) -> Iterator[_Dim]:
        """What normalisations go over: the width of the residual stream."""
        for operator, rule in zip(self._graph.operators, self._rules, strict=True):
            kept = {factor for output in rule.outputs[:1] for dim in output for factor in dim}
            for factor in range(len(rule.factors)):
                fixed = (
                    operator.type.rpartition("::")[2] in _NORMALISED and rule.factors[factor].kind is FactorKind.FIXED
                )
                mean = operator.type == "ReduceMean" and factor not in kept
                if fixed or mean:
                    yield from _places(rule, operator, factor)

    # -- following ---------------------------------------------------------------------------------------------

    def _follow(self, starts: Iterable[_Dim]) -> Mapping[str, Names]:
        """Mark dims from ``starts`` on, with the data and against it, until nothing is added."""
        marks: dict[str, set[tuple[int, int]]] = {}
        for name, dim, blocks in starts:
            marks.setdefault(name, set()).add((dim, blocks))
        carried: list[set[_Part]] = [set() for _ in self._rules]
        forwards = True
        while True:
            grown = False
            order = range(len(self._rules)) if forwards else range(len(self._rules) - 1, -1, -1)
            for index in order:
                grown |= self._step(index, carried[index], marks)
            if not grown:
                return self._names(carried)
            forwards = not forwards

    def _step(self, index: int, carried: set[_Part], marks: dict[str, set[tuple[int, int]]]) -> bool:
        operator, rule = self._graph.operators[index], self._rules[index]
        operands = list(zip((*operator.inputs, *operator.outputs), (*rule.inputs, *rule.outputs), strict=True))
        new: set[_Part] = set()
        for name, operand in operands:
            if name is not None and operand is not None:
                for dim, blocks in marks.get(name, ()):
                    new |= set(_parts_at(rule, operand[dim], blocks))
        if new <= carried:
            return False
        carried |= new
        for name, operand in operands:
            if name is not None and operand is not None:
                marks.setdefault(name, set()).update(_dims_of(rule, operand, carried))
        return True

    def _names(self, carried: list[set[_Part]]) -> Mapping[str, Names]:
        found: dict[str, Names] = {}
        for operator, rule, parts in zip(self._graph.operators, self._rules, carried, strict=True):
            if parts:
                names = ((rule.factors[factor].name, blocks) for factor, blocks in parts)
                found[operator.id] = frozenset(n if blocks == 1 else f"{n}[{blocks}]" for n, blocks in names)
        return found


def _places(rule: FactorRule, operator: Operator, factor: int) -> Iterator[_Dim]:
    """Where a factor lies in the operands and outputs."""
    for name, operand in zip((*operator.inputs, *operator.outputs), (*rule.inputs, *rule.outputs), strict=True):
        if name is not None and operand is not None:
            for dim, blocks in _dims_of(rule, operand, {(factor, 1)}):
                yield name, dim, blocks


def _dims_of(
    rule: FactorRule, operand: tuple[tuple[int, ...], ...], parts: Iterable[_Part]
) -> Iterator[tuple[int, int]]:
    wanted: dict[int, list[int]] = {}
    for factor, blocks in parts:
        wanted.setdefault(factor, []).append(blocks)
    for dim, factors in enumerate(operand):
        outer = 1
        for factor in factors:
            for blocks in wanted.get(factor, ()):
                yield dim, outer * blocks
            outer *= rule.factors[factor].size


def _parts_at(rule: FactorRule, factors: tuple[int, ...], blocks: int) -> Iterator[_Part]:
    """The factor of a dim in which what has ``blocks`` blocks outside begins."""
    outer = 1
    for factor in factors:
        size = rule.factors[factor].size
        inner = blocks // outer
        if blocks % outer == 0 and size > inner and size % inner == 0:
            yield factor, inner
            return
        outer *= size


# -- one operator ------------------------------------------------------------------------------------------------


def _holds(operand: tuple[tuple[int, ...], ...] | None, factor: int) -> bool:
    return operand is not None and any(factor in dim for dim in operand)


def _of_weight(rule: FactorRule, weights: tuple[int, ...], kind: FactorKind) -> Iterator[tuple[int, int]]:
    """(weight, factor) of the factors of that kind that a weight holds."""
    for position in weights:
        for index, factor in enumerate(rule.factors):
            if factor.kind is kind and factor.size > 1 and _holds(rule.inputs[position], index):
                yield position, index


def _others(rule: FactorRule, position: int) -> list[tuple[tuple[int, ...], ...] | None]:
    return [operand for other, operand in enumerate(rule.inputs) if other != position]


def _column(rule: FactorRule, weights: tuple[int, ...], operator: Operator) -> set[int]:
    """What the weight gives to the output and shares with no activation (biases aside)."""
    experts = _expert(rule, weights, operator)
    return {
        factor
        for position, factor in _of_weight(rule, weights, FactorKind.PARALLEL)
        if factor not in experts and not any(len(o or ()) > 1 and _holds(o, factor) for o in _others(rule, position))
    }


def _row(rule: FactorRule, weights: tuple[int, ...], operator: Operator) -> set[int]:
    """What is summed over."""
    return {factor for _, factor in _of_weight(rule, weights, FactorKind.SUM)}


def _expert(rule: FactorRule, weights: tuple[int, ...], operator: Operator) -> set[int]:
    """Leading dims of a stack of matrices."""
    if record_of(operator.signature).kind is not ComputeKind.CONTRACTION:
        return set()
    found: set[int] = set()
    for position, factor in _of_weight(rule, weights, FactorKind.PARALLEL):
        operand = rule.inputs[position]
        assert operand is not None
        in_output = any(_holds(output, factor) for output in rule.outputs)
        stacked = operator.type == "MatMul" and any(factor in dim for dim in operand[:-2])
        shared = operator.type == "Einsum" and any(_holds(other, factor) for other in _others(rule, position))
        if in_output and (stacked or shared):
            found.add(factor)
    return found


def _heads(
    rule: FactorRule, operator: Operator, is_activation: Callable[[str | None], bool], batch: Names
) -> Iterator[int]:
    kind = operator.type.rpartition("::")[2]
    product = record_of(operator.signature).kind is ComputeKind.CONTRACTION and sum(
        is_activation(name) for name in operator.inputs
    ) == len([name for name in operator.inputs if name is not None])
    for index, factor in enumerate(rule.factors):
        if factor.kind is not FactorKind.PARALLEL or factor.size < 2 or factor.name in batch:
            continue
        if kind in _ATTENTION:
            if factor.name in ("h", "heads"):
                yield index
        elif product and len(rule.inputs) == 2 and all(_holds(operand, index) for operand in rule.inputs):
            yield index


def _looked_up(rule: FactorRule, position: int) -> Iterator[int]:
    """Dims of a table that no other operand and no output holds."""
    for index in {factor for dim in rule.inputs[position] or () for factor in dim}:
        if rule.factors[index].size > 1 and rule.factors[index].kind is FactorKind.SUM:
            yield index
