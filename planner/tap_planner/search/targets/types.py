"""What a framework can express, as values. Each framework is one module that fills them in and cites its sources."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from tap_planner.cluster import Mesh
from tap_planner.errors import UsageError
from tap_planner.yaml_entries import near_miss

__all__ = ["AxisRole", "SequenceParallel", "Target", "Variant"]


class AxisRole(Enum):
    """What a framework uses a mesh axis for."""

    DATA = "data"
    """Every device has its own samples; parameters are whole, or sharded by ZeRO or FSDP."""
    CONTEXT = "context"
    """Every device has its own part of each sequence; keys and values are gathered or go round."""
    ULYSSES = "ulysses"
    """As context, but attention is split by heads, with all-to-all before and after."""
    TENSOR = "tensor"
    """Weights are split."""


_NAMES = {
    AxisRole.DATA: ("dp", "fsdp", "ddp", "dp_replicate", "dp_shard"),
    AxisRole.CONTEXT: ("cp",),
    AxisRole.ULYSSES: ("sp",),
    AxisRole.TENSOR: ("tp",),
}
"""Names of axes that a user may give; meshes of our own take the first ones."""


class SequenceParallel(Enum):
    """Whether what lies between split weights is split along the sequence."""

    NEVER = "never"
    SWITCH = "switch"
    """For the whole model or not at all."""
    MODULES = "modules"
    """Each module by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A part of what a framework can express, in which nothing couples distant operators any more."""

    tensor: bool | None
    """Only meshes with, only those without a tensor axis; None: all."""
    sequence_parallel: bool
    zero_levels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a framework can express."""

    name: str
    orders: tuple[tuple[AxisRole, ...], ...]
    """Meshes: the roles of their axes, outermost first."""
    embeddings: tuple[str, ...]
    """How the table of token embeddings may be split on the tensor axis, by role; ``none`` among them: or whole."""
    whole_weights: bool
    """Whether a weight may be whole on the tensor axis although it could be split (a plan per module)."""
    any_side: bool
    """Whether a weight may be split on the side of the residual stream too (its output is then gathered)."""
    whole_attention: bool
    """Whether attention may be whole on the tensor axis."""
    sequence_parallel: SequenceParallel
    split_loss: bool
    """Whether the loss may be computed on logits that are split by vocabulary."""
    expert_roles: tuple[AxisRole, ...]
    """Axes that experts may be spread over."""
    zero_levels: tuple[int, ...]
    zero_levels_with_tensor: tuple[int, ...]
    """On meshes with a tensor axis, in training."""
    zero_levels_with_bf16_states: tuple[int, ...]
    """Levels at which AdamW's moments may be bfloat16 beside float32 master values; empty: they may not."""
    recomputes: tuple[str, ...]
    uniform_settings: bool
    """Whether recompute and ZeRO are one setting for the whole model."""
    hybrid_zero: bool
    """Whether ZeRO may shard over some of the data axes only."""

    def variants(self) -> tuple[Variant, ...]:
        """The parts that a search looks at one by one."""
        switch = self.sequence_parallel is SequenceParallel.SWITCH
        levels = self.zero_levels_with_tensor
        if not switch and levels == self.zero_levels:
            return (Variant(tensor=None, sequence_parallel=False, zero_levels=levels),)
        plain = Variant(tensor=False, sequence_parallel=False, zero_levels=self.zero_levels)
        split = tuple(
            Variant(tensor=True, sequence_parallel=parallel, zero_levels=levels)
            for parallel in ((False, True) if switch else (False,))
        )
        return (plain, *split)

    # -- meshes ------------------------------------------------------------------------------------------------

    def roles_of(self, mesh: Mesh) -> tuple[AxisRole, ...]:
        """What the framework uses the axes of a mesh for, by their names.

        Raises:
            UsageError: an axis has another name, or the framework has no such mesh.
        """
        if mesh.order:
            raise UsageError(
                f"--target {self.name} splits by the axes of the mesh {mesh} in the order in which they lie",
                hint="Leave out the slash and what follows.",
            )
        known = {name: role for role, names in _NAMES.items() for name in names if self._has(role)}
        for axis in mesh.axes:
            if axis.name not in known:
                raise UsageError(
                    f"--target {self.name}: the mesh {mesh} has an axis {axis.name!r}{near_miss(axis.name, known)}",
                    hint=f"Name the axes {', '.join(known)} in --mesh.",
                )
        roles = tuple(known[axis.name] for axis in mesh.axes)
        if roles not in self.orders:
            raise UsageError(
                f"--target {self.name} has no mesh {mesh}",
                hint="It has " + "; ".join(",".join(_axis_names(order)) for order in self.orders) + ".",
            )
        return roles

    def _has(self, role: AxisRole) -> bool:
        return any(role in order for order in self.orders)

    def name_meshes(self, meshes: Sequence[Mesh]) -> tuple[Mesh, ...]:
        """Each mesh with every meaning that the framework can give to its axes."""
        found: dict[Mesh, None] = {}
        for mesh in meshes:
            for order in self.orders:
                if len(order) == len(mesh.axes):
                    names = _axis_names(order)
                    axes = tuple(replace(axis, name=name) for axis, name in zip(mesh.axes, names, strict=True))
                    found[replace(mesh, axes=axes)] = None
        return tuple(found)

    def axis_names(self) -> Iterator[tuple[str, AxisRole]]:
        """Every name that an axis may have, with its role."""
        for role, names in _NAMES.items():
            if self._has(role):
                yield from ((name, role) for name in names)


def _axis_names(order: tuple[AxisRole, ...]) -> tuple[str, ...]:
    used: dict[AxisRole, int] = {}
    names: list[str] = []
    for role in order:
        names.append(_NAMES[role][used.get(role, 0)])
        used[role] = used.get(role, 0) + 1
    return tuple(names)
