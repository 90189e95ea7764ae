"""Whole operators on devices: placements of all traversal orders, the one that is simulated fastest, as a plan."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from tap_planner.errors import InfeasibleError, LimitReachedError, UsageError
from tap_planner.logs import NOTE
from tap_planner.plan import OrderOutcome, PlanOptions, gap_basis_points
from tap_planner.yaml_entries import near_miss

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster
    from tap_planner.device_placement import Built, ExactResult, PlacedPlan, Placing, Try
    from tap_planner.plan import Decisions, PlaceRule
    from tap_planner.program import Program
    from tap_planner.requests import PreparedSearch
    from tap_planner.simulate import Durations, Prediction

__all__ = ["FoundPlacement", "Placed", "Proof", "as_played", "build_problem", "find_placement", "outcomes_of", "prove"]

_log = logging.getLogger("tap_planner")

MAX_SIMULATED = 20_000
"""Operators of the placements that are simulated, together; the best one always is."""
MAX_EXACT_GROUPS = 70
"""Groups of operators up to which CP-SAT looks for an optimum."""
EXACT_SECONDS = 1.0
"""Of CP-SAT's own measure of effort."""
UNLIMITED_BYTES = 1 << 60
"""More than any device has."""


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A placement as a plan, simulated."""

    read: PreparedSearch
    built: Built
    placement: tuple[int, ...]
    """By group, its device."""
    order: str
    placer: str
    plan: PlacedPlan

    @cached_property
    def program(self) -> Program:
        """What each device does."""
        from tap_planner.program import lower

        return lower(self.plan.graph, self.plan.decisions)

    @cached_property
    def prediction(self) -> Prediction:
        """The step as it is simulated."""
        from tap_planner.simulate import predict

        return predict(self.program, self.read.cluster, self.plan.devices)

    @cached_property
    def durations(self) -> Durations:
        """What each instruction takes."""
        from tap_planner.simulate import Durations

        return Durations(self.program, self.read.cluster, devices=self.plan.devices)

    @property
    def buffers_bytes(self) -> int:
        """What the communicator takes on each device, if there is one."""
        return _buffers_bytes(self.read.cluster, len(self.plan.devices))

    @property
    def reserved_buffers_bytes(self) -> int:
        """What was kept free for it."""
        return _buffers_bytes(self.read.cluster, self.read.cluster.num_devices)

    @cached_property
    def objective_ns(self) -> int:
        """What the step takes where it is played in the order that the plan lists."""
        return as_played(self.built, self.read, self.placement, self.plan.decisions)


@dataclass(frozen=True, kw_only=True)
class FoundPlacement:
    """The best placement, and what was tried and proven."""

    best: Placed
    placing: Placing
    proof: Proof
    simulated: int


@dataclass(frozen=True, kw_only=True)
class Proof:
    """How fast a placement can be at most."""

    simple_ns: int
    """By the longest way and by the work shared out."""
    exact: ExactResult | None
    """What CP-SAT has found; None where the graph is too large, or nothing was left to be proven."""

    @property
    def bound_ns(self) -> int:
        """No placement is faster, however it is played."""
        return self.simple_ns if self.exact is None else max(self.simple_ns, self.exact.bound_ns)


def _buffers_bytes(cluster: Cluster, num_stages: int) -> int:
    from tap_planner.cost import num_communicators

    return num_communicators((), num_stages) * cluster.collective_buffers_bytes


def build_problem(read: PreparedSearch) -> Built:
    """What is placed of a model on a cluster, under the user's rules.

    Raises:
        UsageError: a rule names nothing that there is.
    """
    from tap_planner.device_placement import problem_of

    options = read.options
    limit = options.max_memory_bytes
    allowed, together = _rules(read)
    return problem_of(
        read.graph,
        read.cluster,
        precision=options.precision,
        training=options.mode == "train",
        optimizer=options.optimizer,
        optimizer_states=options.optimizer_states,
        allowed=allowed,
        together=together,
        limit_bytes=None if limit == "device" else UNLIMITED_BYTES if limit == "none" else limit,
    )


def _rules(read: PreparedSearch) -> tuple[dict[str, frozenset[int]], list[tuple[str, ...]]]:
    """By operator the devices on which it may lie; and what is kept together."""
    from tap_planner.search import Names

    names, operators = Names(read.graph), read.graph.operators
    allowed: dict[str, frozenset[int]] = {}
    together: list[tuple[str, ...]] = []
    for rule in read.options.places:
        found = tuple(operators[match.index].id for match in names.operators(rule.pattern))
        if not found:
            raise UsageError(
                f"--place '{rule}': nothing in {read.graph.name} is called {rule.pattern!r}",
                hint=names.near(rule.pattern),
            )
        if rule.is_together:
            together.append(found)
            continue
        devices = _devices_of(rule, read.cluster)
        for name in found:
            allowed[name] = allowed.get(name, devices) & devices
            if not allowed[name]:
                raise UsageError(
                    f"--place '{rule}': other rules forbid {name!r} all of these devices", hint="Loosen one of them."
                )
    return allowed, together


def _devices_of(rule: PlaceRule, cluster: Cluster) -> frozenset[int]:
    """The ranks that a rule allows."""
    ranks = rule.ranks
    if ranks is not None:
        if ranks[-1] >= cluster.num_devices:
            raise UsageError(
                f"--place '{rule}': device {ranks[-1]}, {cluster.name} has 0 to {cluster.num_devices - 1}",
                hint="Ranks count through the nodes, as tap-show --cluster lists them.",
            )
        return frozenset(ranks)
    first = 0
    for group in cluster.node_groups:
        if group.name == rule.where:
            return frozenset(range(first, first + group.num_devices))
        first += group.num_devices
    known = [group.name for group in cluster.node_groups]
    kinds = f"expected one of {', '.join(known)}" if known else f"{cluster.name} has no node_groups"
    raise UsageError(
        f"--place '{rule}': no node group is called {rule.where!r}, {kinds}{near_miss(rule.where, known)}",
        hint="Name a node group of cluster.yaml, or ranks as 0,2-3.",
    )


# -- finding -----------------------------------------------------------------------------------------------------


def find_placement(read: PreparedSearch) -> FoundPlacement:
    """Place a model under all orders that are asked for; of the best placements, take the one simulated fastest.

    Args:
        read: the model, bound, with cluster and options.

    Raises:
        InfeasibleError: proven: no placement fits.
        LimitReachedError: none was found that fits.
        UsageError: an order or a rule is wrong.
    """
    from tap_planner.device_placement import orders_for, place, priority_of

    built = build_problem(read)
    problem, options = built.problem, read.options
    asked = options.traversal_order
    orders = orders_for(problem) if asked == "auto" else (asked,)
    placing = place(problem, orders)
    best = placing.best
    if best is None:
        raise _nothing(read, built, placing)
    proof = prove(built, best, options)
    candidates = [
        placed_as(read, built, tried.placement, priority_of(problem, tried), tried.order, tried.placer)
        for tried in _worth_simulating(placing, len(read.graph.operators))
    ]
    exact = proof.exact
    if exact is not None and exact.placement is not None and exact.start_ns is not None:
        candidates.append(placed_as(read, built, exact.placement, exact.start_ns, "", "cp-sat"))
    chosen = min(candidates, key=lambda placed: (placed.prediction.step_ns, placed.objective_ns))
    found = FoundPlacement(best=chosen, placing=placing, proof=proof, simulated=len(candidates))
    _tell(found)
    return found


def prove(built: Built, best: Try, options: PlanOptions) -> Proof:
    """How fast a placement can be at most: by CP-SAT where the graph is small and that is not clear without.

    Args:
        built: what is placed.
        best: the fastest placement that was found, to start from.
        options: how near to the optimum is near enough.
    """
    from tap_planner.device_placement import lower_bound_ns, priority_of, solve_exactly

    problem = built.problem
    simple = lower_bound_ns(problem)
    near_enough = gap_basis_points(best.makespan_ns, simple) <= options.gap_basis_points
    if near_enough or problem.num_groups > MAX_EXACT_GROUPS:
        return Proof(simple_ns=simple, exact=None)
    exact = solve_exactly(
        problem, hint=best.placement, priority=priority_of(problem, best), deterministic_seconds=EXACT_SECONDS
    )
    return Proof(simple_ns=simple, exact=exact)


def placed_as(
    read: PreparedSearch, built: Built, placement: tuple[int, ...], priority: Sequence[int], order: str, placer: str
) -> Placed:
    """A placement, played by a priority, as a plan."""
    from tap_planner.device_placement import in_order_of_use, makespan_ns, placed_plan

    options, problem = read.options, built.problem
    renamed = in_order_of_use(problem, placement)
    if makespan_ns(problem, renamed, priority) <= makespan_ns(problem, placement, priority):
        placement = renamed
    plan = placed_plan(
        read.graph,
        built,
        placement,
        priority,
        precision=options.precision,
        optimizer=options.optimizer,
        optimizer_states=options.optimizer_states,
        loss_output=read.loss_output or "",
        name=order or placer,
    )
    return Placed(read=read, built=built, placement=placement, order=order, placer=placer, plan=plan)


def as_played(built: Built, read: PreparedSearch, placement: Sequence[int], decisions: Decisions) -> int:
    """What a step takes where every device runs of what is ready that which the plan has first: forward as operators
    are listed, then the chunks' backwards in the order of the schedule, each from its last operator to its first.

    Args:
        built: what is placed.
        read: the model.
        placement: by group, its device.
        decisions: the plan; its transfers are passed over.
    """
    from tap_planner.device_placement import makespan_ns

    operators = read.graph.operators
    forward = {operator.id: position for position, operator in enumerate(decisions.operators)}
    backward = {name: len(forward) + position for position, name in enumerate(_backwards(decisions))}
    tasks = zip(built.task_operator, built.problem.is_backward.tolist(), strict=True)
    priority = [(backward if back else forward)[operators[index].id] for index, back in tasks]
    return makespan_ns(built.problem, placement, priority)


def _backwards(decisions: Decisions) -> Iterator[str]:
    """Operators in the order of their backwards, stage by stage."""
    from tap_planner.schedule import Work

    pipeline = decisions.pipeline
    if pipeline is None:
        yield from (operator.id for operator in reversed(decisions.operators))
        return
    chunks = decisions.chunks
    for stage, order in enumerate(pipeline.schedule.orders):
        own = pipeline.schedule.chunks_of(stage)
        for slot in order:
            if slot.work is Work.BACKWARD:
                yield from (each.id for each in reversed(chunks[own[slot.chunk]][1]))


def _worth_simulating(placing: Placing, num_operators: int) -> Iterator[Try]:
    """The fastest placement, and the fastest of each order and of one device, that differ and fit."""
    left, orders, seen = MAX_SIMULATED, set[str](), set[tuple[int, ...]]()
    for tried in placing.tries:
        if not tried.fits or tried.order in orders or (seen and left <= 0):
            continue
        orders.add(tried.order)
        if tried.placement not in seen:
            seen.add(tried.placement)
            left -= num_operators
            yield tried


def _tell(found: FoundPlacement) -> None:
    """Which order won, and by how much."""
    best, outcomes = found.best, [outcome for outcome in outcomes_of(found.placing) if outcome.fits]
    orders = [outcome for outcome in outcomes if outcome.order]
    alone = next((outcome for outcome in outcomes if not outcome.order), None)
    shown = best.order or best.placer
    text = f"{shown} won: {best.prediction.step_ns / 1e6:.3f} ms a step on {len(best.plan.devices)} devices"
    if orders and orders[0].makespan_ns == orders[-1].makespan_ns:
        text += f"; before improvement every order makes {orders[0].makespan_ns / 1e6:.3f} ms"
    elif orders:
        first, last = orders[0], orders[-1]
        text += (
            f"; before improvement {first.order} is the best order with {first.makespan_ns / 1e6:.3f} ms, "
            f"{last.order} the worst with {last.makespan_ns / 1e6:.3f} ms"
        )
    if alone is not None:
        text += f"; one device takes {alone.makespan_ns / 1e6:.3f} ms"
    _log.log(NOTE, text)


def outcomes_of(placing: Placing) -> tuple[OrderOutcome, ...]:
    """The best try of each order before improvement, fastest first; of those that do not fit, the last ones."""
    best: dict[str, Try] = {}
    for tried in placing.tries:
        if not tried.placer.endswith(" improved"):
            best.setdefault(tried.order, tried)
    return tuple(
        OrderOutcome(order=t.order, placer=t.placer, makespan_ns=t.makespan_ns, fits=t.fits) for t in best.values()
    )


def _nothing(read: PreparedSearch, built: Built, placing: Placing) -> InfeasibleError | LimitReachedError:
    """Why there is no placement: proven, or as far as was looked."""
    from tap_planner.device_placement import ExactStatus, solve_exactly

    problem, shortage = built.problem, placing.shortage
    assert shortage is not None
    name = built.devices[shortage.device].name
    lacks = f"{name} lacks {shortage.device_bytes} bytes of {int(problem.capacity_bytes[shortage.device])}"
    if shortage.total_bytes > shortage.device_bytes:
        lacks += f" (all devices together {shortage.total_bytes})"
    hint = "--method auto may split operators; else give devices with more memory, or another --batch or --precision."
    total = int(problem.fixed_bytes.sum()) + sum(shared.num_bytes for shared in problem.shared)
    largest, most = int(problem.fixed_bytes.max()), int(problem.capacity_bytes.max())
    least = max(largest, -(-total // problem.num_devices))
    proven = largest > most or total > int(problem.capacity_bytes.sum())
    if not proven and problem.num_groups <= MAX_EXACT_GROUPS:
        status = solve_exactly(problem, deterministic_seconds=EXACT_SECONDS).status
        proven = status is ExactStatus.INFEASIBLE
    if proven:
        return InfeasibleError(
            f"no device placement of {read.graph.name} fits: in the one that lacks least {lacks}",
            hint=hint,
            least_memory_bytes=least,
            limit_bytes=most,
        )
    return LimitReachedError(
        f"no device placement of {read.graph.name} was found that fits: in the one that lacks least {lacks}; that "
        "another one fits is not excluded",
        hint=hint,
    )
