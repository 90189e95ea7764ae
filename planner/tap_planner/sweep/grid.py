"""What a sweep varies: ``pp,dp,tp=2|4,zero`` -> dimensions with their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tap_planner.errors import UsageError
from tap_planner.plan import DEFAULT_SCHEDULE, OPTIMIZER_STATES, RECOMPUTES, PlanOptions
from tap_planner.schedule import SCHEDULES
from tap_planner.yaml_entries import near_miss

__all__ = ["STAGES", "Dimension", "Grid", "Value", "default_grid", "parse_grid"]

Value = int | str
STAGES = "pp"
"""The dimension of pipeline stages, which is no axis."""
_SAME = {"microbatch": "microbatches", "optimizer_states": "optimizer-states"}
"""Other words for a dimension."""
_USUAL_AXES = ("dp", "tp", "fsdp", "sp", "cp", "ep")
_AXIS = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_NUMBER = re.compile(r"[1-9][0-9]{0,8}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Kind:
    """A dimension that stands for an option."""

    option: str
    given: Callable[[PlanOptions], bool]
    """Whether the option has fixed it already."""
    words: tuple[Value, ...] = ()
    """What there is to choose from; empty: any number from 1."""
    in_inference: bool = False


_KINDS: Mapping[str, _Kind] = {
    "batch": _Kind(option="--batch", given=lambda options: options.batch is not None, in_inference=True),
    "microbatches": _Kind(option="--microbatches", given=lambda options: options.microbatches != "auto"),
    "schedule": _Kind(
        option="--schedule", given=lambda options: options.schedule != DEFAULT_SCHEDULE, words=("auto", *SCHEDULES)
    ),
    "chunks": _Kind(option="--chunks", given=lambda options: options.chunks is not None),
    "zero": _Kind(option="--zero", given=lambda options: options.zero != "auto", words=("auto", 0, 1, 2, 3)),
    "recompute": _Kind(
        option="--recompute", given=lambda options: options.recompute != "auto", words=("auto", *RECOMPUTES)
    ),
    "optimizer-states": _Kind(
        option="--optimizer-states",
        given=lambda options: options.optimizer_states != "fp32",
        words=("auto", *OPTIMIZER_STATES),
    ),
}
_OTHER_OPTIONS = frozenset(PlanOptions.__dataclass_fields__) | {"cluster", "gap", "max_memory", "model"}
"""Names that nobody means an axis by."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dimension:
    """One thing that a sweep varies."""

    name: str
    values: tuple[Value, ...] | None = None
    """None: all that are sensible where the others are chosen."""

    @property
    def is_axis(self) -> bool:
        """Whether it is an axis of the mesh."""
        return self.name != STAGES and self.name not in _KINDS

    @property
    def is_of_mesh(self) -> bool:
        """Whether it is an axis or the number of stages."""
        return self.is_axis or self.name == STAGES

    @property
    def shown(self) -> str:
        """As it is written."""
        return self.name if self.values is None else f"{self.name}={'|'.join(map(str, self.values))}"

    @property
    def sensible(self) -> tuple[Value, ...]:
        """The values that were given, or those that are always the same."""
        if self.values is not None or self.is_of_mesh:
            return self.values or ()
        return tuple(word for word in _KINDS[self.name].words if word != "auto")


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Dimensions in the order in which they were named; the mesh has its axes in that order, outermost first."""

    dimensions: tuple[Dimension, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the dimensions."""
        return tuple(dimension.name for dimension in self.dimensions)

    @property
    def of_mesh(self) -> tuple[Dimension, ...]:
        """Axes and stages."""
        return tuple(dimension for dimension in self.dimensions if dimension.is_of_mesh)

    @property
    def shown(self) -> str:
        """As it is written."""
        return ",".join(dimension.shown for dimension in self.dimensions)

    def find(self, name: str) -> Dimension | None:
        """A dimension by its name."""
        return next((dimension for dimension in self.dimensions if dimension.name == name), None)


def parse_grid(texts: Sequence[str], options: PlanOptions) -> Grid:
    """Read what ``--grid`` was given.

    Args:
        texts: each with entries ``NAME`` or ``NAME=VALUE|VALUE``, separated by commas.
        options: what is the same in all combinations.

    Raises:
        UsageError: a name or a value is wrong, or an option has fixed it already.
    """
    dimensions: list[Dimension] = []
    for entry in (entry.strip() for text in texts for entry in text.split(",")):
        dimension = _dimension(entry)
        if any(dimension.name == other.name for other in dimensions):
            raise UsageError(
                f"--grid: {dimension.name} is named twice",
                hint=f"Give all of its values at once, as {dimension.name}=2|4.",
            )
        dimensions.append(dimension)
    grid = Grid(dimensions=tuple(dimensions))
    _check(grid, options)
    return grid


def default_grid(options: PlanOptions, *, unlike_nodes: bool) -> Grid:
    """What ``--sweep`` varies: stages, two axes and microbatches, as far as the options leave them open.

    Raises:
        UsageError: they leave nothing open.
    """
    training = options.mode == "train"
    staged = training and options.objective == "time" and not options.allow_idle and not unlike_nodes
    names = [] if options.mesh is not None or options.stages != 1 else ["dp", "tp"]
    if names and staged and options.target is None:
        names.insert(0, STAGES)
    if training and options.microbatches == "auto":
        names.append("microbatches")
    if not names:
        raise UsageError("--sweep: the options leave no mesh and no microbatches open", hint="Name dimensions: --grid.")
    grid = Grid(dimensions=tuple(Dimension(name=name) for name in names))
    _check(grid, options)
    return grid


def _dimension(entry: str) -> Dimension:
    name, equals, text = (part.strip() for part in entry.partition("="))
    name = _SAME.get(name, name)
    known = (STAGES, *_KINDS)
    if name not in known:
        near = "" if name in _USUAL_AXES else near_miss(name, known)
        if near or _AXIS.fullmatch(name) is None or name.replace("-", "_") in _OTHER_OPTIONS:
            raise UsageError(
                f"--grid: {name!r} is no dimension{near}",
                hint=f"Name {', '.join(known)}, or axes of the mesh such as dp and tp.",
            )
    if not equals:
        if name == "batch":
            raise UsageError("--grid batch needs its values", hint="As batch=64|128|256.")
        return Dimension(name=name)
    words = [word.strip() for word in text.split("|")]
    return Dimension(name=name, values=tuple(dict.fromkeys(_value(name, word) for word in words)))


def _value(name: str, word: str) -> Value:
    choices = _KINDS[name].words if name in _KINDS else ()
    if choices:
        found = {str(choice): choice for choice in choices}
        if word not in found:
            raise UsageError(
                f"--grid {name}: {word!r} found, expected {', '.join(found)}{near_miss(word, found)}",
                hint=f"Several are written as {name}={'|'.join(list(found)[-2:])}.",
            )
        return found[word]
    if _NUMBER.fullmatch(word) is None:
        raise UsageError(
            f"--grid {name}: {word!r} found, expected a number from 1 up",
            hint=f"Several are written as {name}=2|4; quote them for the shell.",
        )
    return int(word)


def _check(grid: Grid, options: PlanOptions) -> None:
    """Refuse what an option has fixed already, or what there is not."""
    of_mesh = grid.of_mesh
    if of_mesh and options.mesh is not None:
        raise UsageError(
            f"--grid {of_mesh[0].name} varies the mesh, --mesh {options.mesh} fixes it", hint="Leave one of them out."
        )
    if of_mesh and options.stages != 1:
        raise UsageError(
            f"--grid {of_mesh[0].name} varies the mesh, --stages {options.stages} says how many stages it has",
            hint=f"Name {STAGES} in the grid instead.",
        )
    for dimension in grid.dimensions:
        kind = _KINDS.get(dimension.name)
        if options.mode != "train" and (dimension.name == STAGES or (kind is not None and not kind.in_inference)):
            raise UsageError(f"--grid {dimension.name}: inference has no such choice", hint="Leave it out.")
        if kind is not None and kind.given(options):
            raise UsageError(
                f"--grid {dimension.name} varies what {kind.option} fixes",
                hint=f"Leave {kind.option} out, or {dimension.name} out of the grid.",
            )
    staged = grid.find(STAGES) is not None or options.stages != 1
    staged = staged or (options.mesh is not None and f"{STAGES}=" in options.mesh)
    for name in ("schedule", "chunks"):
        if grid.find(name) is not None and not staged:
            raise UsageError(
                f"--grid {name}: there is one stage", hint=f"Name stages too, as --grid {STAGES},dp,tp,{name}."
            )
