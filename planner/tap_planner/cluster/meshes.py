"""Meshes: the devices of a cluster, or some of them, as an N-D grid.

Devices are numbered over (outermost level, ..., device). A mesh lists its axes in the order in which they split what is
split over several of them; ranks are row-major over that. On the devices they lie in the same order, outermost first,
or in one of their own. ``dp=2,tp=8/tp,dp`` lists them as they lie, and after the slash as they split.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from tap_planner.cluster.subsets import Box, device_parts, first_part, restricted, unused_boxes
from tap_planner.cluster.types import Cluster
from tap_planner.errors import ClusterError, UsageError

_DEFAULT_NAMES = {1: ("dp",), 2: ("dp", "tp"), 3: ("dp", "fsdp", "tp")}
_STAGES = "pp"
_AXIS = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,8})")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh."""

    name: str
    size: int


PIPELINE = -1
"""Where an axis is asked for: from stage to stage, at the same coordinates."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """An N-D grid of devices; rank order is row-major over the axes.

    With pipeline stages every stage has a grid of this shape: ranks count stage by stage.
    """

    axes: tuple[MeshAxis, ...]
    order: tuple[int, ...] = ()
    """Indices of the axes as they lie on the devices, outermost first; empty: as listed."""
    devices: tuple[int, ...] = ()
    """Rank in the cluster of each rank of the mesh, ascending; empty where the mesh uses all devices."""
    num_stages: int = 1
    """Pipeline stages."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Axis sizes."""
        return tuple(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names."""
        return tuple(axis.name for axis in self.axes)

    @property
    def num_devices(self) -> int:
        """Devices of all stages."""
        return self.num_stages * self.stage_devices

    @property
    def stage_devices(self) -> int:
        """Devices of one stage: product of the axis sizes."""
        return math.prod(axis.size for axis in self.axes)

    def axis_index(self, name: str) -> int:
        """Index of the axis called ``name``.

        Raises:
            UsageError: if there is none.
        """
        for index, axis in enumerate(self.axes):
            if axis.name == name:
                return index
        raise UsageError(f"the mesh has no axis {name!r}, its axes are {', '.join(self.names)}")

    def positions(self) -> np.ndarray:
        """[num_devices] where each rank lies: its number among the devices of the mesh."""
        return rank_positions(self.shape, self.order, self.num_stages)

    def groups(self, axes: Sequence[int]) -> np.ndarray:
        """Where the groups lie, of all stages, that differ in the coordinates of ``axes`` only.

        Args:
            axes: axis indices in any order; ``PIPELINE`` stands for the stages.

        Returns:
            int64 array [num_groups, group_size] of numbers among the devices of the mesh; members by coordinates,
            row-major, so ascending unless the axes lie otherwise than listed.
        """
        sizes = (self.num_stages, *self.shape)
        chosen = sorted({axis - PIPELINE for axis in axes})
        others = [index for index in range(len(sizes)) if index not in chosen]
        positions = self.positions().reshape(sizes)
        return positions.transpose([*others, *chosen]).reshape(-1, math.prod(sizes[index] for index in chosen))

    def __str__(self) -> str:
        """See ``mesh_text``."""
        return mesh_text(self.axes, self.order, self.num_stages)


def rank_positions(sizes: Sequence[int], order: Sequence[int], num_stages: int = 1) -> np.ndarray:
    """Where each rank of a mesh lies, stage by stage.

    Args:
        sizes: of the axes.
        order: of the axes on the devices, outermost first; empty: as listed.
        num_stages: pipeline stages.

    Returns:
        int64 array [num_stages x product of the sizes].
    """
    positions = np.arange(num_stages * math.prod(sizes), dtype=np.int64)
    if not order:
        return positions
    laid = positions.reshape(num_stages, *(sizes[axis] for axis in order))
    return laid.transpose(0, *(1 + order.index(axis) for axis in range(len(sizes)))).ravel()


class _Axis(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def size(self) -> int: ...


def mesh_text(axes: Sequence[_Axis], order: Sequence[int] = (), num_stages: int = 1) -> str:
    """``dp=128,tp=8``, ``pp=4,dp=32,tp=8``, ``dp=2,tp=4/tp,dp`` where tp splits before dp: as ``--mesh`` takes it.

    Args:
        axes: in the order in which they split.
        order: of the axes on the devices, outermost first; empty: the same.
        num_stages: pipeline stages.
    """
    lying = [axes[axis] for axis in order] if order else axes
    stages = [f"{_STAGES}={num_stages}"] if num_stages > 1 else []
    splitting = "/" + ",".join(axis.name for axis in axes) if order else ""
    return ",".join([*stages, *(f"{axis.name}={axis.size}" for axis in lying)]) + splitting


def _divisors(number: int) -> list[int]:
    small = [divisor for divisor in range(2, number + 1) if divisor * divisor <= number and number % divisor == 0]
    return sorted({*small, *(number // divisor for divisor in small)})


def _factorisations(number: int, num_axes: int) -> list[tuple[int, ...]]:
    """Ordered products of ``num_axes`` factors >= 2, ascending."""
    partial: list[tuple[tuple[int, ...], int]] = [((), number)]
    for _ in range(num_axes - 1):
        partial = [
            ((*sizes, divisor), rest // divisor)
            for sizes, rest in partial
            for divisor in _divisors(rest)
            if divisor < rest
        ]
    return [(*sizes, rest) for sizes, rest in partial if rest >= 2]


def enumerate_meshes(
    cluster: Cluster, max_axes: int = 2, *, allow_idle: bool = False, num_stages: int = 1
) -> tuple[Mesh, ...]:
    """All ordered factorisations of the device count into 1 to ``max_axes`` axes of size >= 2.

    A single device has one mesh with one axis of size 1. Axes are called ``dp``; ``dp, tp``; ``dp, fsdp, tp``;
    beyond that ``a0, a1, ...``.

    Args:
        cluster: the topology.
        max_axes: most axes.
        allow_idle: also the meshes on parts of the cluster (``device_parts``), after those of the whole.
        num_stages: pipeline stages, a divisor of the device count; the axes are those of each of them.
    """
    shapes = _shapes(cluster.num_devices // num_stages, max_axes)
    whole = tuple(replace(mesh_on(sizes), num_stages=num_stages) for sizes in shapes)
    if not allow_idle:
        return whole
    return (*whole, *(mesh_on(s, part) for part in device_parts(cluster) for s in _shapes(len(part), max_axes)))


def _shapes(number: int, max_axes: int) -> list[tuple[int, ...]]:
    if number == 1:
        return [(1,)]
    return [sizes for count in range(1, max_axes + 1) for sizes in _factorisations(number, count)]


def mesh_on(sizes: tuple[int, ...], devices: tuple[int, ...] = ()) -> Mesh:
    """A mesh with the usual names on some devices (none listed: on all)."""
    names = _DEFAULT_NAMES.get(len(sizes)) or tuple(f"a{index}" for index in range(len(sizes)))
    axes = tuple(MeshAxis(name=name, size=size) for name, size in zip(names, sizes, strict=True))
    return Mesh(axes=axes, devices=devices)


def parse_mesh(text: str, cluster: Cluster, *, allow_idle: bool = False) -> Mesh:
    """Read ``dp=128,tp=8``, outermost axis first; ``pp=4`` among them stands for so many pipeline stages. After a slash
    the order in which axes split a dim that is split by several, where it is another: ``dp=2,tp=8/tp,dp``.

    Args:
        text: the axes.
        cluster: the topology.
        allow_idle: whether the product may be less than the number of devices; then the mesh lies on as few nodes as
            can hold it evenly, of unlike ones the fastest.

    Raises:
        UsageError: for a wrong syntax, doubled names, or a product that is not the number of devices.
    """
    sizes, slash, splitting = text.partition("/")
    axes: list[MeshAxis] = []
    for part in sizes.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None:
            raise UsageError(f"--mesh {text!r}: {part.strip()!r} found, expected NAME=SIZE", hint="As dp=128,tp=8.")
        axes.append(MeshAxis(name=match[1], size=int(match[2])))
    mesh = Mesh(axes=tuple(axes))
    doubled = sorted({name for name in mesh.names if mesh.names.count(name) > 1})
    if doubled:
        raise UsageError(f"--mesh {text!r}: the axis name {doubled[0]!r} occurs twice, expected unique names")
    mesh = _with_stages(mesh)
    if slash:
        mesh = _split_by(text, mesh, [name.strip() for name in splitting.split(",")], cluster)
    if mesh.num_devices == cluster.num_devices:
        return mesh
    fewer = mesh.num_devices < cluster.num_devices
    if not (fewer and allow_idle):
        raise UsageError(
            f"--mesh {text!r} has {mesh.num_devices} devices, but the cluster {cluster.name} has {cluster.num_devices}",
            hint=f"The sizes must multiply to {cluster.num_devices}" + ("; or add --allow-idle." if fewer else "."),
        )
    devices = first_part(cluster, mesh.num_devices)
    if devices is None:
        raise UsageError(
            f"--mesh {text!r}: {mesh.num_devices} devices cannot lie evenly on the nodes of {cluster.name}",
            hint="Choose a product of a number of nodes and a number of devices of each.",
        )
    return replace(mesh, devices=devices)


def _with_stages(mesh: Mesh) -> Mesh:
    """What is called ``pp`` is no axis."""
    stages = next((axis.size for axis in mesh.axes if axis.name == _STAGES), 1)
    axes = tuple(axis for axis in mesh.axes if axis.name != _STAGES)
    return Mesh(axes=axes or mesh_on((1,)).axes, num_stages=stages)


def _split_by(text: str, mesh: Mesh, names: Sequence[str], cluster: Cluster) -> Mesh:
    """The mesh, which lies as listed, with its axes in the order in which they split."""
    if sorted(names) != sorted(mesh.names):
        raise UsageError(
            f"--mesh {text!r}: {','.join(names)!r} after the slash, expected each of the axes "
            f"{', '.join(mesh.names)} once",
            hint="As dp=2,tp=8/tp,dp: what splits a dim first is first.",
        )
    if cluster.node_groups:
        raise UsageError(
            f"--mesh {text!r}: on unlike nodes axes split in the order in which they lie",
            hint="Leave out the slash and what follows.",
        )
    axes = tuple(mesh.axes[mesh.axis_index(name)] for name in names)
    return mesh if axes == mesh.axes else replace(mesh, axes=axes, order=tuple(map(axes.index, mesh.axes)))


def laid_otherwise(cluster: Cluster, meshes: Iterable[Mesh]) -> tuple[Mesh, ...]:
    """The meshes of two axes once more, splitting by the axis that lies inside first.

    That is another plan wherever one tensor is split over both axes and one of them is exchanged, which has to be the
    one that splits last. Only where it can make a difference and the prices hold: on equal nodes, more than one
    of them, whose library lays its rings itself (a ring of gloo goes by rank).

    Args:
        cluster: the topology.
        meshes: of the whole cluster; others, and those with stages, are left as they are.
    """
    if cluster.node_groups or not lays_rings(cluster) or sum(level.size > 1 for level in cluster.levels) < 2:
        return ()
    return tuple(
        replace(mesh, axes=mesh.axes[::-1], order=(1, 0))
        for mesh in meshes
        if len(mesh.axes) == 2 and mesh.num_stages == 1 and not mesh.devices
    )


def lays_rings(cluster: Cluster) -> bool:
    """Whether the library puts the ranks of a group in an order of its own that suits the links."""
    return cluster.library != "gloo"


def part_of(cluster: Cluster, mesh: Mesh) -> Cluster:
    """The cluster of the devices that a mesh uses: the cluster itself where none is idle (or where it is that part).

    Raises:
        ClusterError: if mesh and cluster do not fit.
    """
    if mesh.num_devices == cluster.num_devices:
        return cluster
    if not mesh.devices:
        raise ClusterError(f"the mesh {mesh} has {mesh.num_devices} devices, the cluster {cluster.num_devices}")
    if len(mesh.devices) != mesh.num_devices:
        raise ClusterError(f"the mesh {mesh} has {mesh.num_devices} devices, {len(mesh.devices)} are listed")
    return restricted(cluster, mesh.devices)


def stage_kinds(cluster: Cluster, num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Per stage of a pipeline over all devices the kinds of its devices, index into ``Cluster.devices``.

    Stages lie one after the other: the first ranks are the first stage, in the order of the node groups.
    """
    kinds = cluster.kind_of_ranks().reshape(num_stages, -1)
    return tuple(tuple(sorted({int(kind) for kind in of_stage})) for of_stage in kinds)


def alike_stages(cluster: Cluster, num_stages: int) -> tuple[int, ...]:
    """Per stage of a pipeline over all devices the first stage that is like it: with the same kinds of devices, at the
    same places of their nodes. On equal nodes all count as alike."""
    if not cluster.node_groups:
        return (0,) * num_stages
    nodes, kinds = cluster.node_of_ranks(), cluster.kind_of_ranks()
    in_node = np.arange(len(nodes)) - np.searchsorted(nodes, nodes)
    known: dict[tuple[int, ...], int] = {}
    rows = np.concatenate([a.reshape(num_stages, -1) for a in (kinds, in_node)], axis=1).tolist()
    return tuple(known.setdefault(tuple(row), stage) for stage, row in enumerate(rows))


def mesh_places(cluster: Cluster, mesh: Mesh) -> tuple[tuple[int, ...], ...]:
    """Where each rank of a mesh lies in the whole cluster, outermost level first."""
    places = cluster.places()
    if mesh.devices:
        places = tuple(places[device] for device in mesh.devices)
    return tuple(places[position] for position in mesh.positions().tolist()) if mesh.order else places


def idle_boxes(cluster: Cluster, mesh: Mesh) -> tuple[Box, ...]:
    """The places that a mesh leaves idle, as boxes (first and last place, both included)."""
    return unused_boxes(cluster, mesh.devices) if mesh.devices else ()


def axis_levels(mesh: Mesh, cluster: Cluster, axis: int) -> tuple[str, ...]:
    """Names of the levels that the axis spans, inner to outer: those whose child differs along the axis.

    Raises:
        ClusterError: if mesh and cluster have unlike numbers of devices.
    """
    cluster = part_of(cluster, mesh)
    groups = mesh.groups((axis,))
    if cluster.node_groups:
        return _unlike_levels(cluster, cluster.node_of_ranks()[groups])
    spanned: list[str] = []
    stride = 1
    for level in cluster.levels:
        digits = groups // stride % level.size
        if bool((digits != digits[:, :1]).any()):
            spanned.append(level.name)
        stride *= level.size
    return tuple(spanned)


def _unlike_levels(cluster: Cluster, node: np.ndarray) -> tuple[str, ...]:
    """Levels that groups span, from the node of each member ([num_groups, group_size], ascending)."""
    if node.shape[1] == 1:
        return ()
    inside = bool((node[:, 1:] == node[:, :-1]).any())
    outside = bool((node[:, 1:] != node[:, :-1]).any())
    return tuple(level.name for level, used in zip(cluster.levels, (inside, outside), strict=True) if used)
