"""All combinations of a grid: what each asks of the planner, or why it cannot be asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tap_planner.errors import TapError, UsageError
from tap_planner.plan import DEFAULT_SCHEDULE, Auto, PlanOptions
from tap_planner.stages import LEAST_CHUNKS, counts_in_stages
from tap_planner.sweep.grid import STAGES, Dimension, Grid, Value

if TYPE_CHECKING:
    from tap_planner.search import MicrobatchGraphs

__all__ = ["MAX_COMBINATIONS", "Combination", "combinations", "mesh_sizes"]

MAX_COMBINATIONS = 100_000
"""More are refused."""
MOST_CHUNKS = 4
"""Most parts of the model on a stage that are tried by themselves, where a schedule leaves their number open."""
_SETTINGS = ("zero", "recompute", "optimizer-states")


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """One value of each dimension."""

    values: tuple[tuple[str, Value | None], ...]
    """By dimension, as named; None where there is no such choice: with one stage there is no schedule."""
    options: PlanOptions
    arguments: tuple[str, ...]
    """These values as options of ``tap-plan``."""
    staged: bool
    """Whether there are pipeline stages: without, ``--schedule`` and ``--chunks`` say nothing."""
    obstacle: str = ""
    """Why there is no such plan, where that is known beforehand."""

    @property
    def shown(self) -> str:
        """``pp=4, dp=2, tp=4``."""
        return ", ".join(f"{name}={value}" for name, value in self.values if value is not None)


def combinations(
    grid: Grid, options: PlanOptions, num_devices: int, graphs: Mapping[int | None, MicrobatchGraphs | TapError]
) -> tuple[Combination, ...]:
    """All combinations, in the order of the grid: meshes first, then microbatches, then the rest.

    Args:
        grid: what is varied.
        options: what is the same in all.
        num_devices: of the cluster.
        graphs: by batch (None: that of the options), the graphs bound with it, or why the model cannot be bound so.

    Raises:
        UsageError: no mesh has the devices, or there are too many combinations.
    """
    found: list[Combination] = []
    for combination in _all(_Base(grid, options, num_devices, graphs)):
        found.append(combination)
        if len(found) > MAX_COMBINATIONS:
            raise UsageError(
                f"the grid of {', '.join(grid.names)} has more than {MAX_COMBINATIONS:,} combinations",
                hint="Give fewer values, as tp=2|4|8.",
            )
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Base:
    grid: Grid
    options: PlanOptions
    num_devices: int
    graphs: Mapping[int | None, MicrobatchGraphs | TapError]


def _all(base: _Base) -> Iterator[Combination]:
    for batch in _given(base.grid, "batch") or (None,):
        for mesh, sizes in _meshes(base):
            stages = _stages(base, sizes)
            for chosen in _choices(base, batch, stages):
                yield _combination(base, mesh, {**sizes, **chosen}, stages)


def _given(grid: Grid, name: str) -> tuple[Value, ...]:
    dimension = grid.find(name)
    return () if dimension is None else dimension.sensible


def _stages(base: _Base, sizes: Mapping[str, Value]) -> int | Auto:
    """Pipeline stages: of the grid, of ``--mesh``, or those that are asked for."""
    if base.grid.of_mesh:
        return int(sizes.get(STAGES, 1))
    return base.options.stages if base.options.mesh is None else _stages_of(base.options.mesh)


def _stages_of(mesh: str) -> int:
    """The stages of ``--mesh``."""
    for part in mesh.split(","):
        name, _, size = part.strip().partition("=")
        if name == STAGES and size.isdigit():
            return int(size)
    return 1


# -- meshes ------------------------------------------------------------------------------------------------------


def _meshes(base: _Base) -> Iterator[tuple[str | None, dict[str, Value]]]:
    """``--mesh`` and its sizes; that of the options where the grid names none."""
    dimensions = base.grid.of_mesh
    if not dimensions:
        yield base.options.mesh, {}
        return
    _check_sizes(dimensions, base)
    if not any(dimension.is_axis for dimension in dimensions):  # the mesh of a stage is the search's choice
        (stages,) = dimensions
        for size in stages.values or _divisors(base.num_devices):
            yield None, {STAGES: int(size)}
        return
    ruled = {rule.axis for rule in base.options.constraints if rule.kind != "replicate"}
    found = False
    for sizes in mesh_sizes(dimensions, base.num_devices, allow_idle=base.options.allow_idle):
        found = True
        named = dict(zip((dimension.name for dimension in dimensions), sizes, strict=True))
        yield _mesh_text(named, ruled), dict(named)
    if not found:
        raise UsageError(
            f"--grid {','.join(dimension.shown for dimension in dimensions)}: no mesh has {base.num_devices} devices",
            hint="Leave the values of one of them out.",
        )


def _check_sizes(dimensions: Sequence[Dimension], base: _Base) -> None:
    for dimension in dimensions:
        for size in dimension.values or ():
            wrong = int(size) > base.num_devices or base.num_devices % int(size)
            if wrong and not base.options.allow_idle:
                raise UsageError(
                    f"--grid {dimension.name}={size} does not divide the {base.num_devices} devices",
                    hint="Sizes of axes and stages multiply to the number of devices.",
                )


def mesh_sizes(
    dimensions: Sequence[Dimension], num_devices: int, *, allow_idle: bool = False
) -> Iterator[tuple[int, ...]]:
    """Sizes of axes and stages whose product is the number of devices, or, with idle devices, less.

    Args:
        dimensions: where no values are given, all divisors are.
        num_devices: of the cluster.
        allow_idle: whether devices may be left out.
    """
    divisors = _divisors(num_devices)

    def further(sizes: tuple[int, ...], product: int) -> Iterator[tuple[int, ...]]:
        if len(sizes) == len(dimensions):
            if product == num_devices or allow_idle:
                yield sizes
            return
        for size in dimensions[len(sizes)].values or divisors:
            made = product * int(size)
            if made <= num_devices and (allow_idle or num_devices % made == 0):
                yield from further((*sizes, int(size)), made)

    yield from further((), 1)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _mesh_text(sizes: Mapping[str, int], ruled: set[str]) -> str:
    """As ``--mesh`` is written; an axis of one device is left out, unless a rule names it."""
    stages = [f"{STAGES}={sizes[STAGES]}"] if sizes.get(STAGES, 1) > 1 else []
    axes = {name: size for name, size in sizes.items() if name != STAGES}
    kept = [f"{name}={size}" for name, size in axes.items() if size > 1 or name in ruled]
    if not kept and not stages:
        kept = [f"{next(iter(axes))}=1"]
    return ",".join([*stages, *kept])


# -- the rest ----------------------------------------------------------------------------------------------------


def _choices(base: _Base, batch: Value | None, stages: int | Auto) -> Iterator[dict[str, Value | None]]:
    """One value of each dimension that is not of the mesh; ``obstacle`` says why there is none."""
    grid = base.grid
    fixed: dict[str, Value | None] = {} if batch is None else {"batch": batch}
    settings: list[dict[str, Value | None]] = [{}]
    for name in _SETTINGS:
        if grid.find(name) is not None:
            settings = [{**before, name: value} for before in settings for value in _given(grid, name)]
    for schedule in _schedules(base, stages):
        for chunks in _chunks(base, schedule, stages):
            for microbatches in _microbatches(base, batch, schedule, stages):
                staged = {"schedule": schedule, "chunks": chunks, "microbatches": microbatches}
                for setting in settings:
                    yield {**fixed, **{name: staged[name] for name in staged if grid.find(name)}, **setting}


def _schedules(base: _Base, stages: int | Auto) -> tuple[Value | None, ...]:
    return _given(base.grid, "schedule") if stages != 1 and base.grid.find("schedule") else (None,)


def _chunks(base: _Base, schedule: Value | None, stages: int | Auto) -> tuple[Value | None, ...]:
    dimension = base.grid.find("chunks")
    if dimension is None or stages == 1:
        return (None,)
    if dimension.values is not None:
        return dimension.values
    if (schedule or base.options.schedule) != "interleaved":
        return (None,)
    return tuple(range(LEAST_CHUNKS["interleaved"], MOST_CHUNKS + 1))


def _microbatches(
    base: _Base, batch: Value | None, schedule: Value | None, stages: int | Auto
) -> tuple[Value | None, ...]:
    """The counts that were given, or those that ``tap-plan`` would look at; None: there is none."""
    from tap_planner.search import counts_to_try

    dimension, graphs = base.grid.find("microbatches"), base.graphs[None if batch is None else int(batch)]
    if dimension is None or isinstance(graphs, TapError):
        return (None,)
    if dimension.values is not None:
        return dimension.values
    name = str(schedule or base.options.schedule)
    if stages in (1, "auto") or name == "auto":
        return counts_to_try(graphs, training=base.options.mode == "train")[0]
    if base.options.order:
        return (None,)  # it has its own
    try:
        return tuple(sorted(counts_in_stages(graphs, name, stages)))
    except UsageError:
        return (None,)  # left open, the planner says why


_FIELDS = {
    "batch": "batch",
    "microbatches": "microbatches",
    "schedule": "schedule",
    "chunks": "chunks",
    "zero": "zero",
    "recompute": "recompute",
    "optimizer-states": "optimizer_states",
}
"""By dimension, the field of the options."""


def _combination(base: _Base, mesh: str | None, values: Mapping[str, Value | None], stages: int | Auto) -> Combination:
    given = {name: value for name, value in values.items() if name in _FIELDS and value is not None}
    changes: dict[str, Any] = {_FIELDS[name]: value for name, value in given.items()}
    if stages == 1:
        changes |= {"schedule": DEFAULT_SCHEDULE, "order": (), "chunks": None}
    arguments: list[str] = []
    if base.grid.of_mesh and mesh is not None:
        arguments = ["--mesh", mesh]
    elif base.grid.of_mesh and stages != 1:
        changes["stages"] = stages
        arguments = ["--stages", str(stages)]
    for name, value in given.items():
        arguments += [f"--{name}", str(value)]
    batch = values.get("batch")
    graphs = base.graphs[None if batch is None else int(batch)]
    return Combination(
        values=tuple((name, values.get(name)) for name in base.grid.names),
        options=replace(base.options, mesh=mesh, **changes),
        arguments=tuple(arguments),
        staged=stages != 1,
        obstacle=graphs.message if isinstance(graphs, TapError) else "",
    )
