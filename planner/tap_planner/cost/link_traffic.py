"""The bytes that leave each node: what a switch or a bill counts, by the algorithms that the library runs.

A collective is written as the messages that it sends, each from one position of the group to another with a share of
the payload; a message counts where the two positions lie on different nodes. With n ranks in a group:

    ring           every position sends (n-1)/n of the payload to the next, the last to the first; twice where the
                   library passes twice (all_reduce, reduce_scatter of gloo); broadcast: all of it along a chain
    tree           broadcast: binomial, in round i position v < 2^i sends all to v + 2^i
                   all_reduce: two trees of half of the payload each, up and down; of k nodes each sends 2 (k-1)/k of
                   the payload on average, which is said of each
    nvls           the same between nodes
    hierarchical   in the phase of a level with r peers and m ranks in each of them every position sends (r-1)/r/m to
                   its counterpart in the next peer, all_reduce twice
    pairwise       every position sends 1/n to each other one
    direct         ring_exchange: everything to the next, the last to the first; send_recv: without the last;
                   halo_exchange: half of the rows each way between neighbours. A group of two has one neighbour each:
                   all of the rows each way, too much where the two directions are unlike

Left out are headers, those of the network's packets and the library's own (gloo: 48 bytes a message), and what is sent
to agree on a connection. Sources: those of ``cost/collectives.py``; gloo's were counted on a link, docs/cost-model.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction

import numpy as np

from tap_planner.cost.collectives import CollectiveModel, num_passes
from tap_planner.cost.groups import members_in_turn
from tap_planner.plan import CollectiveEntry

_Messages = tuple[Fraction, np.ndarray, np.ndarray]
"""Share of the payload in each message; [num_messages] positions that send, positions that receive."""


def leaving_bytes(model: CollectiveModel, kind: str, axes: tuple[int, ...], num_bytes: int) -> tuple[int, ...]:
    """Bytes that leave each node in one call, those of all groups of the mesh together.

    Args:
        model: the topology, and the algorithm that the library takes there.
        kind: one of ``COLLECTIVE_KINDS``.
        axes: indices of the mesh axes that make up a group.
        num_bytes: logical payload, as ``CollectiveModel`` takes it.

    Returns:
        One figure per node that the mesh uses, rounded up.
    """
    nodes = model.cluster.node_of_ranks()
    num_nodes = int(nodes[-1]) + 1
    turns = members_in_turn(model.mesh, axes, by_rank=model.goes_by_rank(kind))
    placed = nodes[turns]  # [num_groups, num_ranks] node of each position
    shares = [Fraction(0)] * num_nodes
    for share, senders in _senders(model, kind, axes, num_bytes, placed):
        for node, count in enumerate(np.bincount(senders, minlength=num_nodes).tolist()):
            shares[node] += share * count
    return tuple(-(-num_bytes * share.numerator // share.denominator) for share in shares)


def leaving_bytes_of_step(model: CollectiveModel, entries: Iterable[CollectiveEntry]) -> tuple[int, ...]:
    """Bytes that leave each node in one step of a plan.

    Args:
        model: the topology, with the mesh of the plan.
        entries: the plan's list of collectives. It is that of the rank at coordinate 0: others that hold less of an
            uneven split are taken to send as much.
    """
    total = np.zeros(int(model.cluster.node_of_ranks()[-1]) + 1, dtype=np.int64)
    for entry in entries:
        axes = tuple(model.mesh.axis_index(axis) for axis in entry.axes)
        total += entry.count * np.array(leaving_bytes(model, entry.kind, axes, entry.bytes), dtype=np.int64)
    return tuple(total.tolist())


def _senders(
    model: CollectiveModel, kind: str, axes: tuple[int, ...], num_bytes: int, placed: np.ndarray
) -> Iterator[tuple[Fraction, np.ndarray]]:
    """Shares of the payload that cross from node to node, each with the nodes that send one, once per message."""
    algorithm = model.cost(kind, axes, num_bytes).algorithm
    trees = algorithm == "tree" and kind == "all_reduce"
    if trees or algorithm == "nvls" or (algorithm == "hierarchical" and model.cluster.node_groups):
        yield from _between_nodes(placed, num_passes(model.cluster.library, kind))
        return
    for share, sources, targets in _messages(model, kind, axes, algorithm):
        sending, receiving = placed[:, sources], placed[:, targets]
        yield share, sending[sending != receiving]


def _messages(model: CollectiveModel, kind: str, axes: tuple[int, ...], algorithm: str) -> Iterator[_Messages]:
    shape = model.shapes(axes, by_rank=model.goes_by_rank(kind))[0]
    num_ranks, passes = shape.num_ranks, num_passes(model.cluster.library, kind)
    positions = np.arange(num_ranks)
    following = (positions + 1) % num_ranks
    match algorithm:
        case "ring" if kind != "broadcast":
            yield passes * Fraction(num_ranks - 1, num_ranks), positions, following
        case "ring":
            yield Fraction(1), positions[:-1], positions[1:]
        case "tree":
            for distance in (1 << round_ for round_ in range((num_ranks - 1).bit_length())):
                senders = positions[: min(distance, num_ranks - distance)]
                yield Fraction(1), senders, senders + distance
        case "hierarchical":
            members = 1
            for peers in (shares[0].peers for shares in shape.by_level):
                domain = positions // (members * peers) * (members * peers)
                counterpart = domain + (positions + members) % (members * peers)
                yield passes * Fraction(peers - 1, peers * members), positions, counterpart
                members *= peers
        case "pairwise":
            for distance in range(1, num_ranks):
                yield Fraction(1, num_ranks), positions, (positions + distance) % num_ranks
        case "direct":
            yield from _direct(kind, positions, following)
        case _:
            return


def _direct(kind: str, positions: np.ndarray, following: np.ndarray) -> Iterator[_Messages]:
    if kind == "ring_exchange":
        yield Fraction(1), positions, following
    elif kind == "send_recv":
        yield Fraction(1), positions[:-1], positions[1:]
    else:
        rows = Fraction(1, 2 if len(positions) > 2 else 1)
        yield rows, positions[:-1], positions[1:]
        yield rows, positions[1:], positions[:-1]


def _between_nodes(placed: np.ndarray, passes: int) -> Iterator[tuple[Fraction, np.ndarray]]:
    """Per number k of nodes that a group touches: (k-1)/k so many times, and those nodes."""
    first = np.ones(placed.shape, dtype=bool)
    first[:, 1:] = placed[:, 1:] != placed[:, :-1]
    touched = first.sum(axis=1)
    for count in np.unique(touched).tolist():
        rows = touched == count
        yield passes * Fraction(count - 1, count), placed[rows][first[rows]]
