"""How the groups of a collective lie on the topology."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tap_planner.cluster import Cluster, Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelShare:
    """What the groups ask of the links of one level; a *child* is a device or a domain of the level below."""

    level: int
    members: int
    """Most ranks of one group inside one domain of this level."""
    peers: int
    """Most children of one domain that one group touches."""
    hops: int
    """Steps of a ring through one group that cross from child to child at this level."""
    sharing: int
    """Most groups that share the links of one child (c in design terms); 1 at level 0."""
    pairs: int
    """Most pairs (rank inside, rank outside) over all groups whose traffic leaves one child by its links."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The groups of some axes on the topology; all of them communicate at the same time."""

    num_ranks: int
    shares: tuple[LevelShare, ...]
    """Levels whose links the groups use, inner to outer."""
    uniform: bool
    """Whether each domain that a group touches holds equally many of its ranks, at every level."""


def group_shape(cluster: Cluster, mesh: Mesh, axes: Sequence[int]) -> GroupShape:
    """Place the groups of ``axes`` on the topology.

    Ranks are row-major over (outermost level, ..., device), so the domain of level l that holds a rank is
    ``rank // (size_0 x ... x size_l)``. Works for any subset of axes and any number of levels, also where an axis
    does not divide evenly over the nodes.
    """
    groups = mesh.groups(axes)
    num_ranks = groups.shape[1]
    if num_ranks == 1:
        return GroupShape(num_ranks=1, shares=(), uniform=True)
    shares: list[LevelShare] = []
    uniform = True
    stride = 1
    for index, level in enumerate(cluster.levels):
        child = groups // stride
        stride *= level.size
        domain = groups // stride
        share, even = _share(index, child, domain)
        uniform = uniform and even
        if share is not None:
            shares.append(share)
    return GroupShape(num_ranks=num_ranks, shares=tuple(shares), uniform=uniform)


def _run_starts(ids: np.ndarray) -> np.ndarray:
    """Where a new value begins in each ascending row: bool array of the same shape."""
    starts = np.ones(ids.shape, dtype=bool)
    starts[:, 1:] = ids[:, 1:] != ids[:, :-1]
    return starts


def _share(index: int, child: np.ndarray, domain: np.ndarray) -> tuple[LevelShare | None, bool]:
    """The share of one level (None if no link of it is used), and whether the groups lie evenly on its domains.

    Args:
        index: the level.
        child: [num_groups, num_ranks] id of the child that holds each rank.
        domain: [num_groups, num_ranks] id of the level's domain that holds each rank.
    """
    num_ranks = child.shape[1]
    child_starts, domain_starts = _run_starts(child), _run_starts(domain)
    domain_key = np.cumsum(domain_starts.ravel()) - 1
    members = np.bincount(domain_key)
    peers = np.bincount(domain_key, weights=child_starts.ravel()).astype(np.int64)
    even = int(members.min()) == int(members.max()) and int(peers.min()) == int(peers.max())
    hops = int((child_starts.sum(axis=1) - domain_starts.sum(axis=1)).max())
    leaves_child = child[:, 0] != child[:, -1]
    if index == 0:
        if hops == 0:
            return None, even
        most = int(members.max())
        return LevelShare(level=0, members=most, peers=int(peers.max()), hops=hops, sharing=1, pairs=most - 1), even
    if not leaves_child.any():
        return None, even
    crossing = child[leaves_child]
    sharing = np.bincount(crossing[child_starts[leaves_child]]).max()
    return LevelShare(
        level=index,
        members=int(members.max()),
        peers=int(peers.max()),
        hops=hops,
        sharing=int(sharing),
        pairs=_pairs_leaving(crossing, num_ranks),
    ), even


def _pairs_leaving(child: np.ndarray, num_ranks: int) -> int:
    """Most pairs (rank inside a child, rank of its group outside), summed over the groups."""
    run_key = np.cumsum(_run_starts(child).ravel()) - 1
    inside = np.bincount(run_key)
    child_of_run = child.ravel()[_run_starts(child).ravel()]
    return int(np.bincount(child_of_run, weights=inside * (num_ranks - inside)).max())
