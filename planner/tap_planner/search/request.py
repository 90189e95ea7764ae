"""What is asked of the search, and what it answers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

from tap_planner.cluster import Cluster, Mesh
from tap_planner.cost import PriceList, StageShare
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.folding import FoldedGraph
from tap_planner.graph import Graph
from tap_planner.plan import Decisions, Nearness, StatesChoice
from tap_planner.search.configuration import Pipeline
from tap_planner.search.constraints import StrategyFilter
from tap_planner.search.graphs import MicrobatchGraphs
from tap_planner.search.obstacles import Obstacle, find_obstacles
from tap_planner.search.proof import Leaf


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRequest:
    """What to search."""

    graphs: MicrobatchGraphs
    """The graphs, bound with the batch of one microbatch."""
    batch: int
    """Global batch."""
    cluster: Cluster
    meshes: tuple[Mesh, ...]
    precision: str
    optimizer: str
    training: bool
    zero_levels: tuple[int, ...]
    recomputes: tuple[str, ...]
    microbatches: int | None
    """None: the search chooses."""
    limit_bytes: int | None
    gap: Fraction
    """The search ends when its plan is proven to be within this share of the optimum."""
    constraints: Callable[[Mesh, Graph], StrategyFilter]
    """Mesh and graph of one microbatch -> what the rules leave."""
    loss_output: str | None
    optimizer_states: str = "fp32"
    """Element type of AdamW's moments, for the whole plan: ``fp32`` or ``bf16``."""
    uniform_settings: bool = False
    """Whether recompute and ZeRO must be one setting for the whole plan."""
    hybrid_zero: bool = True
    """Whether ZeRO may shard over the inner ones of the data axes only."""
    prices: PriceList = PriceList.TIME
    """What is minimised. With ``PriceList.VOLUME`` all that is called ns, here and in what the search answers, is bytes
    that a device sends."""
    ceiling_ns: int | None = None
    """What is proven not to be faster than this is left alone; ``NothingFasterError`` where nothing else is."""
    pipeline: Pipeline | None = None
    """Stages that all meshes have. The microbatch count is given then: more of them may be faster."""
    lean: bool = False
    """Whether values under which the limit cannot be kept are left out beforehand: where the limit is the least memory
    that there is, few plans keep it."""

    @property
    def num_stages(self) -> int:
        """Stages of a pipeline. With more than one, times and bytes (the limit, too) are those of all stages
        together."""
        return 1 if self.pipeline is None else self.pipeline.num_stages

    @property
    def stage_shares(self) -> tuple[StageShare, ...]:
        """What the times of unlike stages count in those of all together; none where stages are alike."""
        return self.graphs.stage_shares(self.cluster, self.precision, self.pipeline, self.microbatches)

    def folded(self, microbatches: int) -> FoldedGraph:
        """The graph of one microbatch, folded."""
        return self.graphs.folded(microbatches)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchStatistics:
    """How much was looked at."""

    meshes: int
    configurations: int
    """Configurations of the space."""
    solved: int
    pruned: int
    strategies: int
    """Strategies of all operators on the chosen mesh."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Smallest:
    """The least memory of any plan, with its proof."""

    num_bytes: int | None
    """Of a plan that was found; None where none within the limit was."""
    bound_bytes: int
    """No plan of the space that fits needs less."""
    leaves: tuple[Leaf, ...]
    """How every part of the space is bounded; their ``bound_ns`` are bytes."""
    configurations: int
    """Configurations of the space."""


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan found, with its proof. The decisions are written out when they are first asked for."""

    write: Callable[[], Decisions]
    """Makes the decisions."""
    folded: FoldedGraph
    mesh: Mesh
    objective_ns: int
    bound_ns: int
    """No plan of the space has a smaller objective."""
    memory_bytes: int
    multiplier: Fraction
    """Of the Lagrangian bound, in ns per byte; 0 where the limit does not bind."""
    statistics: SearchStatistics
    leaves: tuple[Leaf, ...]
    """How every part of the space is bounded."""
    notes: tuple[str, ...]
    runners_up: tuple[SearchResult, ...] = ()
    """Plans on other meshes or with other microbatch counts whose objective is within the gap as well, best first."""
    contenders: tuple[SearchResult, ...] = ()
    """The best plans found on a few other meshes whose objective is beyond the gap, but not far."""
    smallest: Smallest | None = None
    """The proof that no plan needs less memory, where that was to be the least."""
    near: Nearness | None = None
    """How little it changes of an old plan that it was to stay near to."""
    pipeline: Pipeline | None = None
    """Stages that the plan is for, but not cut in: objective, bound and memory are those of all of them together."""
    states: StatesChoice | None = None
    """What was compared where the element type of the moments was left open."""

    @cached_property
    def decisions(self) -> Decisions:
        """The decisions of every operator, tensor and parameter."""
        return self.write()

    @cached_property
    def obstacles(self) -> tuple[Obstacle, ...]:
        """Why axes of the mesh are used less than they could be."""
        return find_obstacles(self.folded.graph, self.decisions.axes)


class NothingFitsError(InfeasibleError):
    """Nothing fits, and by what that is proven.

    Args:
        error: the answer.
        leaves: all parts of the space.
    """

    def __init__(self, error: InfeasibleError, leaves: tuple[Leaf, ...]) -> None:
        super().__init__(
            error.message,
            hint=error.hint,
            least_memory_bytes=error.least_memory_bytes,
            limit_bytes=error.limit_bytes,
        )
        self.leaves = leaves


class NothingFasterError(LimitReachedError):
    """No plan is faster than the request's ceiling.

    Args:
        leaves: how every part of the space is bounded.
    """

    def __init__(self, leaves: tuple[Leaf, ...]) -> None:
        super().__init__("no plan is faster than asked for")
        self.leaves = leaves


def _held_back(request: SearchRequest, limit: int) -> str:
    """What of the device is no part of the limit."""
    reserved = request.cluster.reserved_memory_bytes
    if not reserved or limit != request.cluster.usable_memory_bytes:
        return ""
    return f", with {reserved} bytes of the device reserved"


def does_not_fit(request: SearchRequest, least: int, limit: int, needs: str) -> InfeasibleError:
    """The answer that nothing fits.

    Args:
        request: what was asked.
        least: the least bytes per device that are needed.
        limit: what there is.
        needs: what needs them, as ``every plan needs``.
    """
    return InfeasibleError(
        f"no plan fits: {needs} at least {gigabytes(least)} per device "
        f"({least} bytes), the limit is {gigabytes(limit)} ({limit} bytes{_held_back(request, limit)})",
        hint=_infeasible_hint(request, least, limit),
        least_memory_bytes=least,
        limit_bytes=limit,
    )


def _infeasible_hint(request: SearchRequest, least: int, limit: int) -> str:
    devices = request.cluster.num_devices
    needed = -(-least * devices // max(limit, 1))
    hint = f"use about {needed} such devices (there are {devices})"
    if 3 not in request.zero_levels and request.training:
        hint += ", or allow --zero 3"
    if "full" not in request.recomputes and request.training:
        hint += ", or allow --recompute full"
    return hint


def gigabytes(num_bytes: int) -> str:
    """``85.90 GB``."""
    return f"{num_bytes / 1e9:.2f} GB"
