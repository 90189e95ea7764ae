"""Alpha-beta costs of collectives on the topology, with contention of the groups that run at the same time.

Per level l let U_l be what may leave one child per second (a device at level 0; a node, by all its NICs, at level 1),
c_l the number of groups that share it, a_l the latency. S is the logical payload (see ``CollectiveModel``), n the
number of ranks, r_l the peers of a group at level l, h_l the hops of a ring at level l (their sum is n - 1).

    ring           all_reduce      2 sum(h_l a_l) + 2 (n-1)/n S max(c_l/U_l)
                   all_gather,       sum(h_l a_l) +   (n-1)/n S max(c_l/U_l)
                   reduce_scatter
                   broadcast         sum(h_l a_l) +           S max(c_l/U_l)       (pipelined in chunks; not gloo)
    hierarchical   all_reduce      sum over l of 2 (r_l - 1) a_l + 2 (r_l-1)/r_l S c_l/U_l
                   all_gather,     half of it
                   reduce_scatter
    tree           all_reduce      2 sum(ceil(log2 r_l) a_l) + S max(t_l c_l/U_l)  (double binary trees)
                   broadcast       sum over rounds of a_l + max(m_l S/U_l)               (gloo: binomial; m_l messages
                                   leave the busiest child at once, a_l of the outermost level that they cross)
    nvls           all_reduce      2 a_0 + S/U_0 inside a node; across k nodes
                                   2 a_0 + 2 ceil(log2 k) a_1 + S max(1/U_0, t_1 c_1/U_1)
    pairwise       all_to_all      sum of a_l over the n - 1 peers, by the level that parts them
                                   + S/n max(pairs_l/U_l)
    direct         send_recv,      max(a_l) + S max(c_l/U_l)
                   halo_exchange   (every rank with its neighbours in the group at once, both ways)
                   ring_exchange   (one step: every rank to the next of the group, the last to the first)

Ring and recursive forms: Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in MPICH",
2005; Patarasuk, Yuan, "Bandwidth optimal all-reduce algorithms", 2009. Double binary trees: Sanders, Speck, Traeff,
2009, as in NCCL 2.4. Hierarchical: reduce-scatter inside, all-reduce of S/g across by g concurrent lanes, all-gather
inside; the lanes of one group together move what one lane with S would. It needs groups that lie evenly on the nodes.
Latency per level as in NCCL's src/graph/tuning.cc: a ring pays the network only where it changes the node.
Trees: between k children of a level, those in all of its domains, half of the data has its root on each side, so
t_l = 2 (k-1)/k; inside a node they are chains whose inner members send up and down, t_0 = 2, of two members 1.
nvls: where the switch of the node sums (NVLink SHARP; NCCL 2.17), each device sends its tensor once. Across nodes the
sums of the nodes go through trees meanwhile (NCCL's NVLSTree).

Every call takes ``Cluster.collective_launch_ns`` besides. How near an algorithm comes to a level's links is that
level's ``Pace`` of it: U_l is multiplied by its efficiency, a_l grows by its latency.

On a ``mesh`` level a group of r of the m devices only uses its own links, (r - 1)/(m - 1) of a device's bandwidth.
Where a level says what a device sends in groups of each size (hybrid cube mesh), that is U_0: see
``Level.device_bandwidth``. Where all traffic of a node passes its host (PCIe without peer access), U_0 is at most the
host's bandwidth by the number of devices: all of them speak at once.
On unlike nodes U_l and a_l are those of each node that a group touches, the slowest of them counting; groups of
different kinds choose their algorithms by themselves, and the slowest group is the cost.
gloo has rings only but for its broadcast, and its reduce_scatter is an all_reduce of which each rank keeps a part. Its
bytes were counted on a link (docs/cost-model.md, "Bytes over a link"); ``cost/link_traffic.py`` says which messages.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from tap_planner.cluster import Cluster, Mesh, lays_rings, part_of
from tap_planner.cost.groups import GroupShape, LevelShare, group_shapes, stage_shapes
from tap_planner.cost.rounding import ceil_ns, ceil_ns_array

COLLECTIVE_KINDS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast"),
    *("send_recv", "halo_exchange", "ring_exchange"),
)
_NEIGHBOURS = ("send_recv", "halo_exchange", "ring_exchange")
_NS_PER_S = 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCost:
    """Time of one collective, and the algorithm that takes it."""

    ns: int
    algorithm: str
    """``ring``, ``tree``, ``hierarchical``, ``nvls``, ``pairwise``, ``direct``; ``none`` where nothing is sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmCost:
    """An algorithm on given groups: time = ``alpha_ns`` + bytes x ``ns_per_byte``."""

    name: str
    alpha_ns: float
    ns_per_byte: float


_Line = tuple[str, int, Fraction]
"""Algorithm, latency in ns, ns per byte; exact until the one conversion to float."""


class CollectiveModel:
    """Costs of collectives over axes of one mesh on one cluster.

    ``num_bytes`` is everywhere the logical payload handed to the communicator, on one rank: all_reduce the local
    tensor; all_gather and reduce_scatter the full tensor (shard x group size); all_to_all the send buffer; broadcast
    and send_recv the tensor; halo_exchange the rows received from both neighbours; ring_exchange what is passed on.
    Costs never decrease with the bytes; zero bytes and groups of one rank cost nothing.

    Args:
        cluster: the topology.
        mesh: all devices of the cluster, or the part of them that it names.

    Raises:
        ClusterError: if mesh and cluster do not fit.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh) -> None:
        self.cluster = part_of(cluster, mesh)
        self.mesh = mesh
        self._shapes: dict[tuple[tuple[int, ...], int | None, bool], tuple[GroupShape, ...]] = {}
        self._choices: dict[tuple[str, tuple[int, ...], int | None], tuple[tuple[AlgorithmCost, ...], ...]] = {}
        self._among: dict[tuple[str, tuple[int, ...]], tuple[tuple[AlgorithmCost, ...], ...]] = {}
        self._of_shapes: dict[tuple[str, tuple[GroupShape, ...]], tuple[tuple[AlgorithmCost, ...], ...]] = {}

    def on_links(self, cluster: Cluster) -> CollectiveModel:
        """The same groups on links of other figures; ``cluster`` differs from this model's in those only."""
        model = copy.copy(self)
        model.cluster, model._choices, model._among, model._of_shapes = cluster, {}, {}, {}
        return model

    def cost(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> CollectiveCost:
        """Cost of the cheapest algorithm that the library has (ties: the first of ``choices``), for the slowest group.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            axes: indices of the mesh axes that make up the group.
            num_bytes: logical payload.
            stage: only the groups of this pipeline stage count, while those of all stages communicate; None: all.
        """
        return self._cost(self._choices.get((kind, axes, stage)) or self.choices(kind, axes, stage), num_bytes)

    def among(self, kind: str, stages: tuple[int, ...], num_bytes: int) -> CollectiveCost:
        """``cost`` between some pipeline stages: every rank of them with those at the same coordinates, all at once.

        Args:
            kind: one of ``COLLECTIVE_KINDS``.
            stages: the members, in any order.
            num_bytes: logical payload.
        """
        key = (kind, stages)
        if key not in self._among:
            shapes = stage_shapes(self.cluster, self.mesh, tuple(sorted(stages)))
            if (kind, shapes) not in self._of_shapes:
                self._of_shapes[kind, shapes] = self._algorithms(kind, shapes)
            self._among[key] = self._of_shapes[kind, shapes]
        return self._cost(self._among[key], num_bytes)

    @staticmethod
    def _cost(choices: tuple[tuple[AlgorithmCost, ...], ...], num_bytes: int) -> CollectiveCost:
        slowest = CollectiveCost(ns=0, algorithm="none")
        if num_bytes <= 0:
            return slowest
        for algorithms in choices:
            best_ns, best = 0, "none"
            for algorithm in algorithms:
                ns = ceil_ns(algorithm.alpha_ns + num_bytes * algorithm.ns_per_byte)
                if best == "none" or ns < best_ns:
                    best_ns, best = ns, algorithm.name
            if best != "none" and (slowest.algorithm == "none" or best_ns > slowest.ns):
                slowest = CollectiveCost(ns=best_ns, algorithm=best)
        return slowest

    def costs_ns(self, kind: str, axes: tuple[int, ...], num_bytes: np.ndarray) -> np.ndarray:
        """``cost(...).ns`` for each element of an int64 array, as an int64 array of the same shape."""
        return self._slowest(self.choices(kind, axes), num_bytes)

    def rate_ns(self, kind: str, axes: tuple[int, ...], num_bytes: int, stage: int | None = None) -> int:
        """The cost without latency: additive over the parts of a bucket, up to rounding. Arguments as ``cost``."""
        return ceil_ns(num_bytes * self._rate(kind, axes, stage)) if num_bytes > 0 else 0

    def rates_ns(self, kind: str, axes: tuple[int, ...], num_bytes: np.ndarray) -> np.ndarray:
        """``rate_ns`` for each element of an int64 array, as an int64 array of the same shape."""
        best = AlgorithmCost(name="rate", alpha_ns=0.0, ns_per_byte=self._rate(kind, axes))
        return self._slowest(((best,),), num_bytes)

    def _rate(self, kind: str, axes: tuple[int, ...], stage: int | None = None) -> float:
        """Nanoseconds per byte of the slowest group by its fastest algorithm."""
        choices = self._choices.get((kind, axes, stage)) or self.choices(kind, axes, stage)
        return max(min((a.ns_per_byte for a in algorithms), default=0.0) for algorithms in choices)

    def choices(
        self, kind: str, axes: tuple[int, ...], stage: int | None = None
    ) -> tuple[tuple[AlgorithmCost, ...], ...]:
        """Per kind of group the algorithms that the library has for the collective; none for groups of one rank.

        Groups differ in kind on unlike nodes only. All of them communicate at once: the slowest counts.
        """
        key = (kind, axes, stage)
        if key not in self._choices:
            self._choices[key] = self._algorithms(kind, self.shapes(axes, stage, by_rank=self.goes_by_rank(kind)))
        return self._choices[key]

    def _algorithms(self, kind: str, shapes: Sequence[GroupShape]) -> tuple[tuple[AlgorithmCost, ...], ...]:
        if kind not in COLLECTIVE_KINDS:
            raise ValueError(f"collective {kind!r}, expected one of {', '.join(COLLECTIVE_KINDS)}")
        return tuple(
            tuple(
                AlgorithmCost(name=name, alpha_ns=float(alpha), ns_per_byte=float(rate))
                for name, alpha, rate in _lines(kind, self.cluster, shape)
            )
            for shape in shapes
        )

    def algorithms(self, kind: str, axes: tuple[int, ...]) -> tuple[AlgorithmCost, ...]:
        """``choices`` on equal nodes, where all groups are of one kind."""
        (algorithms,) = self.choices(kind, axes)
        return algorithms

    def goes_by_rank(self, kind: str) -> bool:
        """Whether ranks speak to each other in the order of their numbers: always in exchanges with neighbours; in
        rings and trees of a library that does not look for an order that suits the links."""
        return kind in _NEIGHBOURS or (kind != "all_to_all" and not lays_rings(self.cluster))

    def shapes(self, axes: Sequence[int], stage: int | None = None, *, by_rank: bool = False) -> tuple[GroupShape, ...]:
        """How the groups of ``axes`` lie on the topology, one shape per kind of group; see ``group_shapes``."""
        key = (tuple(sorted(set(axes))), stage, by_rank)
        if key not in self._shapes:
            self._shapes[key] = group_shapes(self.cluster, self.mesh, key[0], stage, by_rank=by_rank)
        return self._shapes[key]

    @classmethod
    def _slowest(cls, choices: tuple[tuple[AlgorithmCost, ...], ...], num_bytes: np.ndarray) -> np.ndarray:
        found = [cls._cheapest(algorithms, num_bytes) for algorithms in choices]
        return np.maximum.reduce(found)

    @staticmethod
    def _cheapest(algorithms: tuple[AlgorithmCost, ...], num_bytes: np.ndarray) -> np.ndarray:
        payload = np.asarray(num_bytes, dtype=np.int64)
        best = np.zeros(payload.shape, dtype=np.int64)
        for index, algorithm in enumerate(algorithms):
            ns = ceil_ns_array(algorithm.alpha_ns + payload * algorithm.ns_per_byte)
            best = ns if index == 0 else np.minimum(best, ns)
        return np.where(payload > 0, best, 0)


def num_passes(library: str, kind: str) -> int:
    """How often a ring passes the payload on for an all_reduce, all_gather or reduce_scatter."""
    return 2 if kind == "all_reduce" or (library == "gloo" and kind == "reduce_scatter") else 1


def _lines(kind: str, cluster: Cluster, shape: GroupShape) -> list[_Line]:
    if shape.num_ranks == 1:
        return []
    launch_ns = cluster.collective_launch_ns
    return [(name, launch_ns + alpha, rate) for name, alpha, rate in _sent(kind, cluster, shape)]


def _sent(kind: str, cluster: Cluster, shape: GroupShape) -> list[_Line]:
    """The algorithms that the library has, without the launch of the call."""
    if kind == "all_to_all":
        return [_pairwise(_Links(cluster, "pairwise", exchange=True), shape)]
    if kind in ("send_recv", "halo_exchange", "ring_exchange"):
        links = _Links(cluster, "direct", pair=True)
        latency = max(links.latency(share) for share in shape.shares if share.is_used)
        return [("direct", latency, links.bottleneck(shape))]
    ring = _Links(cluster, "ring")
    gloo = cluster.library == "gloo"
    if kind == "broadcast":
        whole = ("ring", ring.around(shape), ring.bottleneck(shape))
        return [_binomial_tree(_Links(cluster, "tree", pair=True), shape) if gloo else whole]
    passes = num_passes(cluster.library, kind)
    lines = [_ring(ring, shape, passes)]
    if gloo:
        return lines
    if kind == "all_reduce":
        lines.append(_tree(_Links(cluster, "tree"), shape))
    if shape.uniform and sum(shares[0].peers > 1 for shares in shape.by_level) > 1:
        lines.append(_hierarchical(_Links(cluster, "hierarchical"), shape, passes))
    if kind == "all_reduce" and _sums_in_switches(cluster, shape):
        lines.append(_nvls(_Links(cluster, "nvls"), shape))
    return lines


@dataclass(frozen=True, slots=True)
class _Links:
    """The links of a cluster at the pace of one algorithm."""

    cluster: Cluster
    algorithm: str
    pair: bool = False
    """Only two peers speak at a time, which on a mesh is one link."""
    exchange: bool = False
    """Every rank sends to every other."""

    def latency(self, share: LevelShare) -> int:
        """Nanoseconds of one step."""
        level = self.cluster.link(share.level, share.group)
        return level.latency_ns + level.pace(self.algorithm).latency_ns

    def around(self, shape: GroupShape) -> int:
        """Latency of a whole ring."""
        return sum(share.hops * self.latency(share) for share in shape.shares)

    def bottleneck(self, shape: GroupShape) -> Fraction:
        """Nanoseconds per byte of the slowest level, with all groups speaking."""
        return max(share.sharing * self.ns_per_byte(share) for share in shape.shares if share.is_used)

    def ns_per_byte(self, share: LevelShare) -> Fraction:
        """Nanoseconds per byte that leaves one child."""
        level = self.cluster.link(share.level, share.group)
        bandwidth = level.device_bandwidth(2 if self.pair else share.peers, exchange=self.exchange)
        ns_per_byte = Fraction(_NS_PER_S * level.oversubscription_permille, 1000 * level.nics * bandwidth)
        if level.kind == "mesh" and share.level == 0 and share.peers > 1 and not level.group_bandwidths:
            ns_per_byte *= Fraction(level.size - 1, 1 if self.pair else share.peers - 1)
        if share.level == 0 and level.host_bandwidth_bytes_per_s is not None:
            ns_per_byte = max(ns_per_byte, Fraction(_NS_PER_S * level.size, level.host_bandwidth_bytes_per_s))
        return ns_per_byte * Fraction(1000, level.pace(self.algorithm).efficiency_permille)


def _ring(links: _Links, shape: GroupShape, passes: int) -> _Line:
    share_sent = Fraction(shape.num_ranks - 1, shape.num_ranks)
    return "ring", passes * links.around(shape), passes * share_sent * links.bottleneck(shape)


def _tree(links: _Links, shape: GroupShape) -> _Line:
    depth_latency = sum(
        max((share.peers - 1).bit_length() * links.latency(share) for share in shares) for shares in shape.by_level
    )
    touched, rate = 1, Fraction(0)
    for shares in reversed(shape.by_level):
        touched *= max(share.peers for share in shares)
        rate = max(rate, *(_tree_share(share, touched) * share.sharing * links.ns_per_byte(share) for share in shares))
    return "tree", 2 * depth_latency, rate


def _tree_share(share: LevelShare, touched: int) -> Fraction:
    """What leaves a child in a double binary tree, of the payload.

    Args:
        share: the level.
        touched: children of the level that a group touches, those in other domains too: a node is one of all nodes,
            whatever racks they are in.
    """
    if share.level == 0:
        return Fraction(2 if share.peers > 2 else 1)
    return Fraction(2 * (touched - 1), touched)


def _binomial_tree(links: _Links, shape: GroupShape) -> _Line:
    """Rounds one after the other, each as long as its busiest links take; on unlike nodes those of a level, in which
    every rank of the root's child sends through its links."""
    alpha, rate = 0, Fraction(0)
    levels = shape.by_level
    if not links.cluster.node_groups:
        for number in range((shape.num_ranks - 1).bit_length()):
            busy = [share for (share,) in levels if share.rounds[number]]
            alpha += links.latency(busy[-1])
            rate += max(share.rounds[number] * links.ns_per_byte(share) for share in busy)
        return "tree", alpha, rate
    for index, shares in enumerate(levels):
        rounds = max((share.peers - 1).bit_length() for share in shares)
        senders = _members_of_child(levels, index)
        alpha += rounds * max(links.latency(share) for share in shares)
        rate += rounds * senders * max(share.sharing * links.ns_per_byte(share) for share in shares)
    return "tree", alpha, rate


def _hierarchical(links: _Links, shape: GroupShape, passes: int) -> _Line:
    """One phase per level; a phase between outer domains also passes the links of the levels in between."""
    alpha, rate = 0, Fraction(0)
    levels = shape.by_level
    for index, shares in enumerate(levels):
        peers = shares[0].peers
        lanes = _members_of_child(levels, index)
        passed = [index, *(below for below in range(index) if levels[below][0].level > 0)]
        slowest = max(
            Fraction(_members_of_child(levels, below), lanes) * share.sharing * links.ns_per_byte(share)
            for below in passed
            for share in levels[below]
        )
        alpha += passes * (peers - 1) * max(links.latency(share) for share in shares)
        rate += passes * Fraction(peers - 1, peers) * slowest
    return "hierarchical", alpha, rate


def _members_of_child(levels: Sequence[Sequence[LevelShare]], index: int) -> int:
    return levels[index - 1][0].members if index else 1


def _sums_in_switches(cluster: Cluster, shape: GroupShape) -> bool:
    """Whether the groups hold several devices of nodes whose switches sum, and lie evenly on them."""
    inside = [share for share in shape.shares if share.level == 0]
    return (
        shape.uniform
        and len(shape.by_level) <= 2
        and bool(inside)
        and all(share.peers > 1 and cluster.link(0, share.group).reduces for share in inside)
    )


def _nvls(links: _Links, shape: GroupShape) -> _Line:
    """Inside a node the switch sums; the sums of nodes go through trees of nodes meanwhile."""
    devices = [share for share in shape.shares if share.level == 0]
    nodes = [share for share in shape.shares if share.level > 0]
    alpha = 2 * max(links.latency(share) for share in devices)
    inside = max(links.ns_per_byte(share) for share in devices)
    if not nodes:
        return "nvls", alpha, inside
    alpha += 2 * (nodes[0].peers - 1).bit_length() * max(links.latency(share) for share in nodes)
    between = max(_tree_share(share, share.peers) * share.sharing * links.ns_per_byte(share) for share in nodes)
    return "nvls", alpha, max(inside, between)


def _pairwise(links: _Links, shape: GroupShape) -> _Line:
    alpha, rate = 0, Fraction(0)
    for shares in shape.by_node_group:
        latency, inner_members = 0, 1
        for share in shares:
            latency += (share.members - inner_members) * links.latency(share)
            inner_members = share.members
            rate = max(rate, Fraction(share.pairs, shape.num_ranks) * links.ns_per_byte(share))
        alpha = max(alpha, latency)
    return "pairwise", alpha, rate
