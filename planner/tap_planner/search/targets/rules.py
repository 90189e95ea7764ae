"""What a framework can express -> demands on the operators of a graph.

On a data axis every operator works on its own samples; on a context axis on its own part of the sequence. On a tensor
axis weights are split by column or row (tables of tokens by vocabulary, attention by heads), what lies between a column
and a row split follows it, and what touches the residual stream is whole, or split along the sequence where the
framework can. No framework passes on unreduced sums, and none splits the residual stream along its width.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from tap_planner.graph import Graph, Operator
from tap_planner.operators import OUTPUT, ComputeKind, FactorKind, FactorRule, record_of, rule_of
from tap_planner.search.constraints import Demand, SpaceRules, StorageDemand
from tap_planner.search.matching import Names
from tap_planner.search.roles import Roles
from tap_planner.search.targets.types import AxisRole, SequenceParallel, Target, Variant

__all__ = ["target_rules"]

_SELECTING = ("TopK", "ArgMax", "NonZero")
_REACH = 8
"""Operators between a router's weight and the selection of experts, at most."""


def target_rules(target: Target, variant: Variant, graph: Graph, roles: Roles) -> SpaceRules:
    """The demands of a framework on every operator, for every name that an axis may have."""
    return _Translation(target, variant, graph, roles).rules()


class _Translation:
    def __init__(self, target: Target, variant: Variant, graph: Graph, roles: Roles) -> None:
        self._target = target
        self._sequence_parallel = variant.sequence_parallel
        self._graph = graph
        self._roles = roles
        self._source = f"--target {target.name}"
        self._batched = any(roles.of(operator, "batch") for operator in graph.operators)
        self._routers, self._behind_routers = _routers(graph, roles)
        self._known: dict[Demand, Demand] = {}

    def rules(self) -> SpaceRules:
        """Demands by operator; on data and context axes parameters are whole."""
        demands = {operator.id: tuple(self._demands(operator)) for operator in self._graph.operators}
        whole = tuple(
            StorageDemand(axis=name, sharded=False, source=self._source)
            for name, role in self._target.axis_names()
            if role is not AxisRole.TENSOR
        )
        readers = Names(self._graph).readers
        return SpaceRules(
            demands=demands,
            storage={name: whole for name, slots in readers.items() if len(slots) > 1},
            tags=demands,
            even=self._source,
        )

    def _demands(self, operator: Operator) -> Iterator[Demand]:
        rule = rule_of(operator.signature)
        allowed = {
            AxisRole.DATA: self._data(operator, rule),
            AxisRole.CONTEXT: self._context(operator, rule),
            AxisRole.ULYSSES: self._ulysses(operator, rule),
            AxisRole.TENSOR: self._tensor(operator, rule),
        }
        for axis, role in self._target.axis_names():
            choices = allowed[role]
            if role in self._target.expert_roles:
                choices = choices | self._of(operator, rule, "expert")
            demand = Demand(axis=axis, names=choices.names, bases=choices.bases, source=self._source)
            yield self._known.setdefault(demand, demand)

    def _of(self, operator: Operator, rule: FactorRule, *roles: str) -> _Choices:
        """Choices that split a role, where the operator lets it be split."""
        splittable = _splittable(rule)
        names = {name for role in roles for name in self._roles.of(operator, role)}
        return _Choices(names=frozenset(name for name in names if name.partition("[")[0] in splittable))

    # -- axes that split samples or sequences ------------------------------------------------------------------

    def _data(self, operator: Operator, rule: FactorRule) -> _Choices:
        return self._of(operator, rule, "batch") or _WHOLE

    def _context(self, operator: Operator, rule: FactorRule) -> _Choices:
        """Along the sequence of the queries; what all sequences share (masks, positions) may be whole."""
        sequence = self._of(operator, rule, "sequence")
        if _is_contraction(operator) and not self._roles.weights(operator):
            queries = {rule.factors[factor].name for dim in rule.inputs[0] or () for factor in dim}
            made = {rule.factors[factor].name for dim in rule.outputs[0] for factor in dim}
            sequence = _Choices(names=frozenset(n for n in sequence.names if n.partition("[")[0] in queries & made))
        if not sequence or (self._batched and not self._roles.of(operator, "batch")):
            return sequence | _WHOLE
        return sequence

    def _ulysses(self, operator: Operator, rule: FactorRule) -> _Choices:
        """Along the sequence, but attention by heads."""
        heads = self._of(operator, rule, "head")
        if heads and not self._roles.weights(operator):
            return heads if _is_contraction(operator) else heads | self._context(operator, rule)
        return self._context(operator, rule)

    # -- the tensor axis ---------------------------------------------------------------------------------------

    def _tensor(self, operator: Operator, rule: FactorRule) -> _Choices:
        if operator.type == "Loss":
            return self._of(operator, rule, "vocabulary") | _WHOLE if self._target.split_loss else _WHOLE
        if self._roles.weights(operator):
            if _is_contraction(operator):
                return self._weight(operator, rule)
            if self._roles.of(operator, "vocabulary") & _looked_up(rule):
                return self._embedding(operator, rule)
        if self._roles.of(operator, "head"):
            heads = self._of(operator, rule, "head")
            return heads | _WHOLE if self._target.whole_attention or not heads or self._is_shared(operator) else heads
        return self._between(operator, rule)

    def _is_shared(self, operator: Operator) -> bool:
        """Whether an operator works on what all samples share: nobody minds if it is whole."""
        return not self._batched or not self._roles.of(operator, "batch")

    def _weight(self, operator: Operator, rule: FactorRule) -> _Choices:
        if operator.id in self._routers:
            return self._residual(operator, rule)
        hidden = frozenset() if self._target.any_side else self._roles.of(operator, "hidden")
        sides = self._roles.of(operator, "column") | self._roles.of(operator, "row")
        split = _Choices(bases=frozenset(sides - hidden) & _splittable(rule))
        if not split:
            return self._residual(operator, rule)
        return split | _WHOLE if self._target.whole_weights else split

    def _embedding(self, operator: Operator, rule: FactorRule) -> _Choices:
        """Tables that the samples' own ids select from; tables of positions are whole."""
        if self._is_shared(operator) and self._batched:
            return _WHOLE
        choices = _Choices()
        for word in self._target.embeddings:
            choices = choices | (_WHOLE if word == "none" else self._of(operator, rule, word))
        return choices or _WHOLE

    def _between(self, operator: Operator, rule: FactorRule) -> _Choices:
        """What follows split weights, or lies on the residual stream."""
        others = {name for role in ("batch", "sequence", "hidden", "expert") for name in self._roles.of(operator, role)}
        inner = frozenset(
            factor.name
            for factor in rule.factors
            if factor.kind is FactorKind.PARALLEL and factor.size > 1 and factor.name not in others
        )
        on_residual = self._roles.of(operator, "hidden") or not inner
        if on_residual:
            return self._residual(operator, rule)
        following = _Choices(bases=inner)
        loose = self._target.whole_weights or self._is_shared(operator) or self._roles.of(operator, "expert")
        routed = operator.id in self._behind_routers
        return following | self._residual(operator, rule) if loose or routed or operator.type == OUTPUT else following

    def _residual(self, operator: Operator, rule: FactorRule) -> _Choices:
        """Whole, or split along the sequence: as the framework has it."""
        sequence = self._of(operator, rule, "sequence")
        if self._target.sequence_parallel is SequenceParallel.MODULES:
            return sequence | _WHOLE
        if not self._sequence_parallel or not sequence:
            return _WHOLE
        return sequence | _WHOLE if self._is_shared(operator) else sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choices:
    """Choices that a framework has on an axis."""

    names: frozenset[str] = frozenset()
    """Exactly."""
    bases: frozenset[str] = frozenset()
    """In whatever blocks."""

    def __or__(self, other: _Choices) -> _Choices:
        return _Choices(names=self.names | other.names, bases=self.bases | other.bases)

    def __bool__(self) -> bool:
        return bool(self.names or self.bases)


_WHOLE = _Choices(names=frozenset({"none"}))


def _is_contraction(operator: Operator) -> bool:
    return record_of(operator.signature).kind is ComputeKind.CONTRACTION


def _splittable(rule: FactorRule) -> frozenset[str]:
    return frozenset(f.name for f in rule.factors if f.kind is not FactorKind.FIXED and f.size > 1)


def _looked_up(rule: FactorRule) -> frozenset[str]:
    """Factors that are selected from: summed over, and in no output."""
    return frozenset(factor.name for factor in rule.factors if factor.kind is FactorKind.SUM)


def _routers(graph: Graph, roles: Roles) -> tuple[frozenset[str], frozenset[str]]:
    """Products with a weight whose result only goes, by way of small operators, into a selection of experts; and those
    small operators."""
    makers = {name: operator for operator in graph.operators for name in operator.outputs}
    routers: set[str] = set()
    between: set[str] = set()
    reached = [operator for operator in graph.operators if operator.type in _SELECTING]
    for _ in range(_REACH):
        sources = [makers[name] for operator in reached for name in operator.inputs if name in makers]
        found = [operator for operator in sources if _is_contraction(operator)]
        routers.update(operator.id for operator in found if roles.weights(operator))
        reached = [operator for operator in sources if not _is_contraction(operator) and operator.id not in between]
        between.update(operator.id for operator in reached)
    return frozenset(routers), frozenset(between)
