"""tap-plan --grid: every combination planned, and what is said of that."""

from __future__ import annotations

import contextlib
import shlex
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from tap_planner.errors import InfeasibleError, LimitReachedError, TapError, UsageError
from tap_planner.plan import PlanOptions, write_text
from tap_planner.processes import usable_cores
from tap_planner_cli.console import make_console
from tap_planner_cli.errors import EXIT_BUG, printable, report
from tap_planner_cli.parameters import check_writable
from tap_planner_cli.summary import print_facts
from tap_planner_cli.sweep_tables import FORMATS, print_table, render
from tap_planner_cli.units import format_bytes, format_count, format_ns

if TYPE_CHECKING:
    from tap_planner.sweep import RankedRow, Sweep, SweepProgress

__all__ = ["SweepCommand", "refuse_sweeping", "run_sweep"]

SHOWN = 10
"""Rows that are shown beside a file with all of them."""
_SUFFIXES = {f".{name}": name for name in FORMATS if name != "text"} | {".txt": "text"}
_ARGUMENTS = "tap_planner_cli.sweep.arguments"
_WITHOUT = {"--check", "--alternatives", "--stay-near", "--max-regret", "--verify-certificate", "--replay", "--report"}
"""Options about one plan."""
_ONLY = {"--format", "--top", "--resume"}
"""Options about a sweep."""
_OF_SWEEP = {"grid", "sweep", "table_format", "top", "resume"}
_NOT_OF_PLAN = _OF_SWEEP | {"output", "processes", "quiet", "verbose", "color"}
"""Parameters that the command of a single plan does not need."""


class SweepCommand(click.Command):
    """A command that remembers its arguments as they were given, to give them again."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As ``click.Command`` does."""
        ctx.meta[_ARGUMENTS] = list(args)
        return super().parse_args(ctx, args)


def refuse_sweeping(context: click.Context) -> None:
    """Without a grid, options about one say nothing.

    Raises:
        UsageError: one is given.
    """
    for option in _given(context) & _ONLY:
        raise UsageError(f"{option} is for a sweep", hint="Name what to vary: --grid pp,dp,tp, or --sweep.")


def run_sweep(context: click.Context, model: Path, cluster: str, options: PlanOptions, values: dict[str, Any]) -> int:
    """Plan all combinations, write or print them as a table, and say which is best.

    Returns:
        The exit code.

    Raises:
        TapError: options, model or cluster are wrong, or no combination has a plan.
    """
    for option in sorted(_given(context) & _WITHOUT):
        raise UsageError(f"{option} is about one plan, --grid makes many", hint="Leave one of them out.")
    output, kind = values["output"], _format(values)
    check_writable(output, "grid.csv")
    state = _state(values)
    from tap_planner import api
    from tap_planner.cluster import load_cluster
    from tap_planner.sweep import SweepRequest, default_grid, parse_grid

    if values["sweep"] and values["grid"]:
        raise UsageError("--sweep stands for a grid, --grid names one", hint="Leave one of them out.")
    if values["sweep"]:
        grid = default_grid(options, unlike_nodes=bool(load_cluster(cluster).node_groups))
    else:
        grid = parse_grid(values["grid"], options)
    processes = values["processes"] or usable_cores()
    sweep = api.prepare_sweep(
        SweepRequest(model=model, cluster=cluster, options=options, grid=grid, state=state, processes=processes)
    )
    console = make_console(values["color"], stderr=True)
    try:
        with _progress(console, shown=not values["quiet"] and sys.stderr.isatty()) as on_progress:
            sweep.run(on_progress)
    except BaseException as error:
        if not isinstance(error, Exception):
            _say_how_far(sweep, kind, values)
        raise
    _show(sweep, kind, values)
    if output is not None and state is not None and values["resume"] is None and not _failed(sweep):
        state.unlink(missing_ok=True)  # all of it is in the table
    if not values["quiet"]:
        if output is not None:
            print_table(console, sweep, SHOWN if values["top"] is None else values["top"])
        _print_summary(console, context, sweep, output)
    return _exit_code(sweep)


def _given(context: click.Context) -> set[str]:
    """Options that were given, by their long names."""
    return {
        param.opts[-1]
        for param in context.command.params
        if param.name and context.get_parameter_source(param.name) is not ParameterSource.DEFAULT
    }


def _format(values: dict[str, Any]) -> str:
    output: Path | None = values["output"]
    if values["table_format"] is not None:
        return values["table_format"]
    if output is None:
        return "text"
    if output.suffix not in _SUFFIXES:
        raise UsageError(
            f"-o {output}: of a sweep the file is a table, and its name ends in {', '.join(_SUFFIXES)}",
            hint=f"Name it so, or add --format {'|'.join(FORMATS)}.",
        )
    return _SUFFIXES[output.suffix]


def _state(values: dict[str, Any]) -> Path | None:
    """Where outcomes are kept: where the user says, else beside the table until that is written."""
    check_writable(values["resume"], "grid.partial")
    if values["resume"] is not None or values["output"] is None:
        return values["resume"]
    output: Path = values["output"]
    return output.with_name(f"{output.name}.partial")


# -- while it runs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _progress(console: Console, *, shown: bool) -> Iterator[Callable[[SweepProgress], None]]:
    """A bar on a terminal; it has no thread of its own, as what forks must have none."""
    if not shown:
        yield lambda progress: None
        return
    columns = (
        TextColumn("planning"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[best]}"),
    )
    with Bar(*columns, console=console, transient=True, auto_refresh=False) as bar:
        task = bar.add_task("", total=None, rate="", best="")
        started, known = time.perf_counter(), -1

        def on_progress(progress: SweepProgress) -> None:
            nonlocal known
            known = progress.done if known < 0 else known
            rate = (progress.done - known) / max(time.perf_counter() - started, 1e-9)
            best = progress.best
            shown_best = "" if best is None else f"best {format_ns(best.step_ns or 0)}"
            bar.update(task, total=progress.total, completed=progress.done, rate=f"{rate:.2g}/s", best=shown_best)
            bar.refresh()

        yield on_progress


def _say_how_far(sweep: Sweep, kind: str, values: dict[str, Any]) -> None:
    """Of a sweep that is interrupted nothing is lost: outcomes are in a file, or are printed."""
    done, total = len(sweep.outcomes), len(sweep.combinations)
    if sweep.request.state is not None:
        hint = f"kept in {sweep.request.state}; the same command goes on from there"
    else:
        hint = "shown; with -o or --resume they are kept, and the same command goes on"
        if done:
            click.echo(render(sweep, kind, values["top"]), nl=False)
    if not values["quiet"]:
        click.echo(f"note: {done} of {total} combinations are {hint}", err=True)


# -- what it gave ------------------------------------------------------------------------------------------------


def _show(sweep: Sweep, kind: str, values: dict[str, Any]) -> None:
    output: Path | None = values["output"]
    if output is not None:
        write_text(output, render(sweep, kind, None))
    elif kind == "text":
        print_table(make_console(values["color"]), sweep, values["top"])
    else:
        click.echo(render(sweep, kind, None), nl=False)


def _print_summary(console: Console, context: click.Context, sweep: Sweep, output: Path | None) -> None:
    """How many there are, the best one, and how it is planned."""
    rows = [("sweep", _counts(sweep))]
    best = next((row for row in sweep.rows if row.rank == 1), None)
    if best is not None:
        step, size = format_ns(best.outcome.step_ns or 0), format_bytes(best.outcome.memory_bytes or 0)
        rows.append(("best", f"{best.combination.shown}: {step} a step, {size} per device"))
    if output is not None:
        rows.append(("table", str(output)))
    print_facts(console, rows)
    if best is not None:
        console.print(printable(command_line(context, best)), soft_wrap=True)


def _counts(sweep: Sweep) -> str:
    """``120 combinations: 96 planned, 24 do not fit``."""
    from tap_planner.sweep import Status

    words = {
        Status.PLANNED: "planned",
        Status.INFEASIBLE: "do not fit",
        Status.NOT_FOUND: "without a plan that was found",
        Status.IMPOSSIBLE: "impossible",
        Status.FAILED: "failed",
    }
    counts = Counter(outcome.status for outcome in sweep.outcomes.values())
    parts = [f"{format_count(counts[status])} {word}" for status, word in words.items() if counts[status]]
    kept = f"; {format_count(sweep.num_kept)} of them known from before" if sweep.num_kept else ""
    number = len(sweep.combinations)
    return f"{format_count(number)} combination{'s' if number != 1 else ''}: {', '.join(parts)}{kept}"


def command_line(context: click.Context, row: RankedRow) -> str:
    """The command that plans a row: the arguments of this one, with the row's in place of the grid."""
    parser = context.command.make_parser(context)
    given, _, order = parser.parse_args(args=list(context.meta[_ARGUMENTS]))
    unused = _NOT_OF_PLAN if row.combination.staged else _NOT_OF_PLAN | {"schedule", "chunks"}
    words: list[str] = []
    for param in dict.fromkeys(order):
        name = param.name or ""
        if name in unused or name not in given or given[name] is None:
            continue
        if isinstance(param, click.Argument):
            words.insert(0, str(given[name]))
        elif isinstance(param, click.Option) and param.is_flag:
            words.append(param.opts[-1])
        else:
            for value in given[name] if param.multiple else [given[name]]:
                words += [param.opts[-1], str(value)]
    return shlex.join(["tap-plan", *words, *row.combination.arguments, "-o", "plan.json"])


def _failed(sweep: Sweep) -> int:
    from tap_planner.sweep import Status

    return sum(outcome.status is Status.FAILED for outcome in sweep.outcomes.values())


def _exit_code(sweep: Sweep) -> int:
    """0 where there is a plan, else as one combination would end.

    Raises:
        TapError: says why there is none.
    """
    from tap_planner.sweep import Status

    rows = sweep.rows
    found = {row.outcome.status: row for row in reversed(rows)}
    failed = found.get(Status.FAILED)
    if failed is not None:
        report(
            f"{_failed(sweep)} of {len(rows)} combinations failed, the first ({failed.combination.shown}) with: "
            f"{failed.outcome.reason}",
            "Run the same command again: they are planned again. If they fail again, report it: a bug of tap-planner.",
        )
    if Status.PLANNED in found:
        return 0
    if failed is not None:
        return EXIT_BUG
    raise _no_plan(found)


def _no_plan(found: dict[Any, RankedRow]) -> TapError:
    from tap_planner.sweep import Status

    if Status.NOT_FOUND in found:
        row = found[Status.NOT_FOUND]
        return LimitReachedError(
            f"no plan was found for any combination; {row.combination.shown}: {row.outcome.reason}"
        )
    if Status.INFEASIBLE in found:
        row = found[Status.INFEASIBLE]
        outcome = row.outcome
        return InfeasibleError(
            f"no combination fits; {row.combination.shown} needs the least: {outcome.reason}",
            hint="Add devices, or leave more open: what the grid and the options do not name is chosen.",
            least_memory_bytes=outcome.least_memory_bytes or 0,
            limit_bytes=outcome.limit_bytes or 0,
        )
    row = found[Status.IMPOSSIBLE]
    return UsageError(f"no combination is possible; {row.combination.shown}: {row.outcome.reason}")
