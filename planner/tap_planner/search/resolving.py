"""Rules of the user -> demands on the operators of a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from tap_planner.errors import UsageError
from tap_planner.graph import Graph
from tap_planner.operators import ComputeKind, FactorKind, FactorRule, record_of, rule_of
from tap_planner.plan import Constraint
from tap_planner.search.constraints import Demand, SpaceRules, StorageDemand
from tap_planner.search.matching import Match, Names
from tap_planner.search.roles import ROLES, Roles
from tap_planner.yaml_entries import near_miss

__all__ = ["keep_demands", "merge_rules", "resolve"]

_IN_BLOCKS = ("column", "row")
"""Roles whose split inside blocks (of a fused projection) is the same thing."""
_WORDS = ("none", "partial")


def resolve(graph: Graph, constraints: Sequence[Constraint], roles: Roles, *, partly: bool = False) -> SpaceRules:
    """Work out what rules ask of each operator.

    Args:
        graph: the graph.
        constraints: the rules.
        roles: what its factors are.
        partly: whether a rule may ask for what nothing that it names has.

    Raises:
        UsageError: a rule names nothing, or asks for what nothing that it names has.
    """
    return _Resolver(graph, roles, partly=partly).resolve(constraints)


def keep_demands(rules: SpaceRules, whole: SpaceRules) -> SpaceRules:
    """Rules of a microbatch with what is asked of operators of the whole batch that now lack the factors for it:
    nothing meets it. What is forbidden there needs no word here."""
    demands, tags = dict(rules.demands), dict(rules.tags)
    for name, asked in whole.demands.items():
        sources = {demand.source for demand in demands.get(name, ())}
        lacking = tuple(demand for demand in asked if not demand.forbid and demand.source not in sources)
        if lacking:
            demands[name] = (*demands.get(name, ()), *lacking)
            tags[name] = (*tags.get(name, ()), *lacking)
    return SpaceRules(demands=demands, storage=rules.storage, tags=tags, even=rules.even)


def merge_rules(*parts: SpaceRules) -> SpaceRules:
    """All rules together; their tags too."""
    demands: dict[str, tuple[Demand, ...]] = {}
    storage: dict[str, tuple[StorageDemand, ...]] = {}
    tags: dict[str, tuple[object, ...]] = {}
    for part in parts:
        for name, found in part.demands.items():
            demands[name] = (*demands.get(name, ()), *found)
        for name, asked in part.storage.items():
            storage[name] = (*storage.get(name, ()), *asked)
        for name, tag in part.tags.items():
            tags[name] = (*tags.get(name, ()), *tag)
    even = next((part.even for part in parts if part.even), "")
    return SpaceRules(demands=demands, storage=storage, tags=tags, even=even)


class _Resolver:
    def __init__(self, graph: Graph, roles: Roles, *, partly: bool) -> None:
        self._graph = graph
        self._partly = partly
        self._roles = roles
        self._names = Names(graph)
        self._demands: dict[str, list[Demand]] = {}
        self._storage: dict[str, list[StorageDemand]] = {}
        self._tags: dict[str, list[object]] = {}

    def resolve(self, constraints: Sequence[Constraint]) -> SpaceRules:
        """Each rule in turn."""
        for constraint in constraints:
            if constraint.kind == "batch":
                self._batch(constraint)
            elif constraint.kind == "replicate":
                self._replicate(constraint)
            else:
                self._operators(constraint)
        return SpaceRules(
            demands={name: tuple(found) for name, found in self._demands.items()},
            storage={name: tuple(found) for name, found in self._storage.items()},
            tags={name: tuple(found) for name, found in self._tags.items()},
        )

    def _rule(self, index: int) -> FactorRule:
        return rule_of(self._graph.operators[index].signature)

    def _add(self, index: int, demand: Demand) -> None:
        operator = self._graph.operators[index]
        self._demands.setdefault(operator.id, []).append(demand)
        self._tags.setdefault(operator.id, []).append(demand)

    def _store(self, parameter: str, demand: StorageDemand) -> None:
        self._storage.setdefault(parameter, []).append(demand)
        for index, _ in self._names.readers[parameter]:
            self._tags.setdefault(self._graph.operators[index].id, []).append(demand)

    # -- kinds of rules ----------------------------------------------------------------------------------------

    def _batch(self, constraint: Constraint) -> None:
        if constraint.forbid and self._roles.is_single:
            return  # nothing can be split any more
        for index, operator in enumerate(self._graph.operators):
            names = self._roles.of(operator, "batch")
            if names:
                demand = Demand(axis=constraint.axis, names=names, forbid=constraint.forbid, source=constraint.shown)
                self._add(index, demand)

    def _replicate(self, constraint: Constraint) -> None:
        parameters = self._names.parameters(constraint.pattern)
        if not parameters:
            raise UsageError(
                f"{constraint.shown}: no parameter is called {constraint.pattern!r}",
                hint=self._names.near(constraint.pattern, parameters_only=True),
            )
        for parameter in parameters:
            slots = self._names.readers[parameter]
            if len(slots) > 1:
                self._store(parameter, StorageDemand(axis=None, sharded=False, source=constraint.shown))
                continue
            for index, position in slots:
                bases = _held(self._rule(index), (position,))
                self._add(index, Demand(axis=None, bases=bases, forbid=True, source=constraint.shown))

    def _operators(self, constraint: Constraint) -> None:
        matches = self._names.operators(constraint.pattern)
        if not matches:
            raise UsageError(
                f"{constraint.shown}: no operator, parameter or tensor is called {constraint.pattern!r}",
                hint=self._names.near(constraint.pattern),
            )
        found = list(self._split(constraint, matches) if not constraint.value else self._valued(constraint, matches))
        if not found and not self._partly:
            raise UsageError(*self._nothing(constraint, matches))
        for match, demand in found:
            self._add(match.index, demand)
        if not constraint.value:
            self._split_storage(constraint)

    def _nothing(self, constraint: Constraint, matches: Sequence[Match]) -> tuple[str]:
        count = f"{len(matches)} operator{'s' if len(matches) > 1 else ''}"
        if not constraint.value:
            return (f"{constraint.shown}: matches {count} that nothing can split",)
        known = list(self._values(matches))
        near = next((near_miss(part, known) for part in constraint.value.split("|") if part not in known), "")
        return (
            f"{constraint.shown}: matches {count}, none of which has {constraint.value.replace('|', ' or ')}{near}; "
            f"they have {', '.join(known)}",
        )

    def _values(self, matches: Sequence[Match]) -> Iterator[str]:
        """Values that matched operators have."""
        yield "none"
        operators = [self._graph.operators[match.index] for match in matches]
        for role in ROLES:
            if any(self._roles.of(operator, role) for operator in operators):
                yield role
        yield from sorted({name for match in matches for name in _splittable(self._rule(match.index))})

    # -- a bare axis -------------------------------------------------------------------------------------------

    def _split(self, constraint: Constraint, matches: Sequence[Match]) -> Iterator[tuple[Match, Demand]]:
        """Weights and products of what is matched; where there are none, all that is matched."""
        heavy = [match for match in matches if self._is_heavy(match.index)]
        for match in heavy or matches:
            bases = self._split_bases(match)
            if bases:
                yield (
                    match,
                    Demand(axis=constraint.axis, bases=bases, forbid=constraint.forbid, source=constraint.shown),
                )

    def _is_heavy(self, index: int) -> bool:
        operator = self._graph.operators[index]
        contraction = record_of(operator.signature).kind is ComputeKind.CONTRACTION
        return contraction or bool(self._roles.weights(operator))

    def _split_bases(self, match: Match) -> frozenset[str]:
        """Factors of the weight; of the matched vector where there is no weight; any where there is no parameter."""
        rule = self._rule(match.index)
        weights = self._roles.weights(self._graph.operators[match.index])
        named = tuple(position for position in match.operands if position in weights)
        if weights and (named or match.itself):
            return _held(rule, named or weights)
        if match.operands and not match.itself:
            return _held(rule, match.operands)
        return frozenset(_splittable(rule))

    def _split_storage(self, constraint: Constraint) -> None:
        for parameter in self._names.parameters(constraint.pattern):
            slots = self._names.readers[parameter]
            weight = any(position in self._roles.weights(self._graph.operators[index]) for index, position in slots)
            if len(slots) > 1 and weight:
                demand = StorageDemand(axis=constraint.axis, sharded=not constraint.forbid, source=constraint.shown)
                self._store(parameter, demand)

    # -- values ------------------------------------------------------------------------------------------------

    def _valued(self, constraint: Constraint, matches: Sequence[Match]) -> Iterator[tuple[Match, Demand]]:
        parts = constraint.value.split("|")
        for match in matches:
            names, bases = self._meant(match.index, parts)
            if not (names or bases) and not set(parts) <= set(_WORDS):
                continue
            if "none" in parts:
                names |= {"none"}
            yield (
                match,
                Demand(
                    axis=constraint.axis,
                    names=frozenset(names),
                    bases=frozenset(bases),
                    forbid=constraint.forbid,
                    source=constraint.shown,
                ),
            )

    def _meant(self, index: int, parts: Iterable[str]) -> tuple[set[str], set[str]]:
        """Exact names, and names in whatever blocks, of what an operator has of the values (but ``none``)."""
        operator, rule = self._graph.operators[index], self._rule(index)
        names: set[str] = set()
        bases: set[str] = set()
        splittable = set(_splittable(rule))
        for part in parts:
            if part == "partial" and rule.partial:
                bases.add(part)
            if part.partition("[")[0] in splittable:
                (names if "[" in part else bases).add(part)
            if part in ROLES:
                (bases if part in _IN_BLOCKS else names).update(self._roles.of(operator, part))
            if part == "sequence" and rule.rings:
                bases.add("ring")
        return names, bases


def _splittable(rule: FactorRule) -> Iterator[str]:
    for factor in rule.factors:
        if factor.kind is not FactorKind.FIXED and factor.size > 1:
            yield factor.name
    if rule.rings:
        yield "ring"


def _held(rule: FactorRule, positions: Sequence[int]) -> frozenset[str]:
    """Splittable factors of some operands."""
    splittable = set(_splittable(rule))
    factors = {factor for position in positions for dim in rule.inputs[position] or () for factor in dim}
    return frozenset(rule.factors[factor].name for factor in factors) & splittable
