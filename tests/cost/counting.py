"""Where ranks lie, counted digit by digit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import strategies as st

from tap_planner.cluster import Mesh


def counted_groups(mesh: Mesh, axes: Sequence[int]) -> list[list[int]]:
    """Where the members of each group of some axes lie, in the order of their coordinates."""
    found: dict[tuple[int, ...], list[int]] = {}
    for coordinates in itertools.product(*map(range, mesh.shape)):
        lies = 0
        for axis in mesh.order or range(len(mesh.axes)):
            lies = lies * mesh.shape[axis] + coordinates[axis]
        found.setdefault(tuple(c for i, c in enumerate(coordinates) if i not in axes), []).append(lies)
    return list(found.values())


@st.composite
def laid(draw: st.DrawFn, mesh: Mesh) -> Mesh:
    """The mesh with its axes in any order on the devices."""
    order = tuple(draw(st.permutations(range(len(mesh.axes)))))
    return mesh if order == tuple(range(len(order))) else replace(mesh, order=order)
