"""How the groups of a collective lie on the topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from tap_planner.cluster import PIPELINE, Cluster, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShare:
    """What the groups ask of the links of one level; a *child* is a device or a domain of the level below."""

    level: int
    group: int = 0
    """Node group of the domains (level 0) or children (level 1); 0 where all nodes are alike."""
    members: int
    """Most ranks of one group inside one domain of this level."""
    peers: int
    """Most children of one domain that one group touches."""
    hops: int
    """Steps of a ring through one group that cross from child to child at this level."""
    sharing: int
    """Most groups that share the links of one child (c in design terms), each as often as its ring leaves the child; 1
    at level 0."""
    pairs: int
    """Most pairs (rank inside, rank outside) over all groups whose traffic leaves one child by its links."""
    rounds: tuple[int, ...] = ()
    """Most messages that leave one child in each round of binomial trees from the first rank of every group; on equal
    nodes, of groups by rank."""

    @property
    def is_used(self) -> bool:
        """Whether links of the level are used or passed; False inside nodes that hold a single rank of a group."""
        return self.level > 0 or self.peers > 1


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The groups of some axes on the topology; all of them communicate at the same time."""

    num_ranks: int
    shares: tuple[LevelShare, ...]
    """Levels whose links the groups use, inner to outer; on unlike nodes one per level and node group."""
    uniform: bool
    """Whether each domain that a group touches holds equally many of its ranks, at every level."""

    @property
    def by_level(self) -> tuple[tuple[LevelShare, ...], ...]:
        """Shares of the levels that are used, inner to outer."""
        used = [share for share in self.shares if share.is_used]
        levels = dict.fromkeys(share.level for share in used)
        return tuple(tuple(share for share in used if share.level == level) for level in levels)

    @property
    def by_node_group(self) -> tuple[tuple[LevelShare, ...], ...]:
        """Per node group its shares, inner to outer."""
        groups = dict.fromkeys(share.group for share in self.shares)
        return tuple(tuple(share for share in self.shares if share.group == group) for group in groups)


def group_shapes(
    cluster: Cluster, mesh: Mesh, axes: Sequence[int], stage: int | None = None, *, by_rank: bool = False
) -> tuple[GroupShape, ...]:
    """How the groups of ``axes`` lie on the topology, one shape per kind of group.

    On equal nodes one shape stands for all groups; on unlike nodes groups differ by the nodes that they touch.

    Args:
        cluster: the topology.
        mesh: on all of its devices.
        axes: of the mesh.
        stage: only the groups of this pipeline stage, while those of all stages communicate; None: all of them.
        by_rank: see ``members_in_turn``.
    """
    if not cluster.node_groups:
        return (group_shape(cluster, mesh, axes, by_rank=by_rank),)
    groups = mesh.groups(axes)
    return _unlike_shapes(cluster, groups, None if stage is None else groups[:, 0] // mesh.stage_devices == stage)


def stage_shapes(cluster: Cluster, mesh: Mesh, stages: tuple[int, ...]) -> tuple[GroupShape, ...]:
    """The same of groups of one rank of each of some pipeline stages, at the same coordinates; no others communicate.

    Args:
        cluster: the topology.
        mesh: on all of its devices.
        stages: ascending.
    """
    if cluster.node_groups:
        return _unlike_shapes(cluster, mesh.groups((PIPELINE,))[:, stages])
    return (_stage_shape(tuple(level.size for level in cluster.levels), mesh.stage_devices, stages),)


@lru_cache(maxsize=4096)
def _stage_shape(sizes: tuple[int, ...], stage_devices: int, stages: tuple[int, ...]) -> GroupShape:
    """On equal nodes, where it takes no more than how large levels and stages are."""
    ranks = np.arange(stage_devices, dtype=np.int64)[:, None]
    return _even_shape(sizes, ranks + stage_devices * np.array(stages, dtype=np.int64))


def group_shape(cluster: Cluster, mesh: Mesh, axes: Sequence[int], *, by_rank: bool = False) -> GroupShape:
    """Place the groups of ``axes`` on the topology.

    Devices are row-major over (outermost level, ..., device), so the domain of level l that holds a rank is
    ``rank // (size_0 x ... x size_l)``. Works for any subset of axes and any number of levels, also where an axis
    does not divide evenly over the nodes.
    """
    sizes = [level.size for level in cluster.levels]
    return _even_shape(sizes, members_in_turn(mesh, axes, by_rank=by_rank), with_rounds=by_rank)


def members_in_turn(mesh: Mesh, axes: Sequence[int], *, by_rank: bool) -> np.ndarray:
    """[num_groups, group_size] where the members of each group lie, in the order in which they speak to each other.

    Args:
        mesh: the mesh.
        axes: of the mesh.
        by_rank: as they are numbered; else as they lie, device by device and node by node.
    """
    groups = mesh.groups(axes)
    return groups if by_rank or not mesh.order else np.sort(groups, axis=1)


def _even_shape(sizes: Sequence[int], groups: np.ndarray, *, with_rounds: bool = False) -> GroupShape:
    num_ranks = groups.shape[1]
    if num_ranks == 1:
        return GroupShape(num_ranks=1, shares=(), uniform=True)
    lying = np.sort(groups, axis=1)
    shares: list[LevelShare] = []
    uniform = True
    stride = 1
    for index, size in enumerate(sizes):
        inner, stride = stride, stride * size
        share, even = _share(index, lying // inner, lying // stride, groups // inner, groups // stride)
        uniform = uniform and even
        if share is not None:
            shares.append(replace(share, rounds=_rounds(groups // inner)) if with_rounds else share)
    return GroupShape(num_ranks=num_ranks, shares=tuple(shares), uniform=uniform)


def _run_starts(ids: np.ndarray) -> np.ndarray:
    """Where a new value begins in each row: bool array of the same shape."""
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts


def _share(
    index: int, child: np.ndarray, domain: np.ndarray, turn_child: np.ndarray, turn_domain: np.ndarray
) -> tuple[LevelShare | None, bool]:
    """The share of one level (None if no link of it is used), and whether the groups lie evenly on its domains.

    Args:
        index: the level.
        child: [num_groups, num_ranks] id of the child that holds each rank, ascending.
        domain: [num_groups, num_ranks] id of the level's domain that holds each rank, ascending.
        turn_child: the children in the order in which the ranks speak to each other.
        turn_domain: the domains in that order.
    """
    num_ranks = child.shape[1]
    child_starts, domain_starts = _run_starts(child), _run_starts(domain)
    domain_key = np.cumsum(domain_starts.ravel()) - 1
    members = np.bincount(domain_key)
    peers = np.bincount(domain_key, weights=child_starts.ravel()).astype(np.int64)
    even = int(members.min()) == int(members.max()) and int(peers.min()) == int(peers.max())
    hops = int((_run_starts(turn_child).sum(axis=1) - _run_starts(turn_domain).sum(axis=1)).max())
    leaves_child = child[:, 0] != child[:, -1]
    if index == 0:
        if int(peers.max()) == 1:
            return None, even
        most = int(members.max())
        return LevelShare(level=0, members=most, peers=int(peers.max()), hops=hops, sharing=1, pairs=most - 1), even
    if not leaves_child.any():
        return None, even
    crossing = child[leaves_child]
    sharing = np.bincount(turn_child[turn_child != np.roll(turn_child, -1, axis=1)]).max()
    return LevelShare(
        level=index,
        members=int(members.max()),
        peers=int(peers.max()),
        hops=hops,
        sharing=int(sharing),
        pairs=_pairs_leaving(crossing, num_ranks),
    ), even


def _rounds(child: np.ndarray) -> tuple[int, ...]:
    """Most messages that leave one child in each round: in round i the first 2^i ranks send to the next 2^i."""
    num_ranks = child.shape[1]
    found: list[int] = []
    for distance in (1 << number for number in range((num_ranks - 1).bit_length())):
        senders = min(distance, num_ranks - distance)
        source, target = child[:, :senders], child[:, distance : distance + senders]
        found.append(int(np.bincount(source[source != target], minlength=1).max()))
    return tuple(found)


def _pairs_leaving(child: np.ndarray, num_ranks: int) -> int:
    """Most pairs (rank inside a child, rank of its group outside), summed over the groups."""
    run_key = np.cumsum(_run_starts(child).ravel()) - 1
    inside = np.bincount(run_key)
    child_of_run = child.ravel()[_run_starts(child).ravel()]
    return int(np.bincount(child_of_run, weights=inside * (num_ranks - inside)).max())


def _unlike_shapes(cluster: Cluster, groups: np.ndarray, chosen: np.ndarray | None = None) -> tuple[GroupShape, ...]:
    """The kinds of groups ([num_groups, num_ranks] ranks, ascending) on unlike nodes.

    A run is what one group has on one node. Links of a node are shared by all groups that leave it.

    Args:
        cluster: the topology.
        groups: all that communicate.
        chosen: [num_groups] which of them are asked about; None: all.
    """
    num_groups, num_ranks = groups.shape
    if num_ranks == 1:
        return (GroupShape(num_ranks=1, shares=(), uniform=True),)
    nodes = cluster.node_of_ranks()[groups]
    kind_of_node = np.repeat(np.arange(len(cluster.node_groups)), [group.nodes for group in cluster.node_groups])
    starts = _run_starts(nodes)
    owner = np.nonzero(starts)[0]  # [num_runs] group of each run
    node = nodes[starts]  # [num_runs]
    members = np.bincount(np.cumsum(starts.ravel()) - 1)  # [num_runs]
    leaves = (nodes[:, 0] != nodes[:, -1])[owner]
    sharing = np.bincount(node, weights=leaves, minlength=len(kind_of_node))[node].astype(np.int64)
    pairs = np.bincount(node, weights=leaves * members * (num_ranks - members), minlength=len(kind_of_node))[node]
    slot = owner * len(cluster.node_groups) + kind_of_node[node]  # (group, node group), flattened
    num_slots = num_groups * len(cluster.node_groups)

    def most(values: np.ndarray) -> np.ndarray:
        found = np.zeros(num_slots, dtype=np.int64)
        np.maximum.at(found, slot, values.astype(np.int64))
        return found

    last_kind = kind_of_node[nodes[:, -1]]
    last = (last_kind[:, None] == np.arange(len(cluster.node_groups))).ravel()
    columns = np.stack(
        [
            most(members),
            np.bincount(slot, weights=members - 1, minlength=num_slots).astype(np.int64),
            np.bincount(slot, minlength=num_slots),
            last.astype(np.int64),
            most(sharing),
            most(pairs),
            -most(num_ranks - members),
        ],
        axis=1,
    ).reshape(num_groups, -1)
    kinds = np.unique(columns if chosen is None else columns[chosen], axis=0).reshape(-1, len(cluster.node_groups), 7)
    return tuple(_unlike_shape(num_ranks, kind.tolist()) for kind in kinds)


def _unlike_shape(num_ranks: int, rows: list[list[int]]) -> GroupShape:
    """One kind of group.

    Args:
        num_ranks: ranks of the group.
        rows: per node group the most members on one node, ring steps inside nodes, nodes touched, whether the group's
            last node is of this kind, most groups and most pairs that share the links of a node, and minus the number
            of ranks elsewhere where a node holds fewest.
    """
    touched = [(number, row) for number, row in enumerate(rows) if row[2]]
    num_nodes = sum(row[2] for _, row in touched)
    shares = [
        LevelShare(level=0, group=number, members=most, peers=most, hops=hops, sharing=1, pairs=most - 1)
        for number, (most, hops, *_) in touched
    ]
    if num_nodes > 1:
        shares.extend(
            LevelShare(
                level=1,
                group=number,
                members=num_ranks,
                peers=num_nodes,
                hops=count - last,
                sharing=sharing,
                pairs=pairs,
            )
            for number, (_, _, count, last, sharing, pairs, _) in touched
        )
    sizes = {most for _, (most, *_) in touched} | {num_ranks + row[6] for _, row in touched}
    return GroupShape(num_ranks=num_ranks, shares=tuple(shares), uniform=len(sizes) == 1)
