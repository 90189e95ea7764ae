"""tap-diff: what changed between two plans, and what it costs."""

from __future__ import annotations

from pathlib import Path

import click

from tap_planner.plan import Verdict, diff_plans, read_plan
from tap_planner_cli.console import make_console
from tap_planner_cli.errors import EXIT_NEGATIVE, run
from tap_planner_cli.limits import Limit, LimitType
from tap_planner_cli.parameters import common_options, settings


@click.command(context_settings=settings("tap-diff"))
@click.argument("old", type=click.Path(path_type=Path))
@click.argument("new", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "layout",
    type=click.Choice(["text", "json", "markdown"]),
    default="text",
    show_default=True,
    help="markdown is a comment for a pull request.",
)
@click.option("--exit-code", is_flag=True, help="Exit with 1 if the plans differ.")
@click.option(
    "--fail-on",
    type=LimitType(),
    multiple=True,
    metavar="LIMIT",
    help="Exit with 1 if a limit is passed: decisions, step_time>5%, memory>2%, ... (repeatable).",
)
@common_options
def command(
    old: Path,
    new: Path,
    layout: str,
    exit_code: bool,
    fail_on: tuple[Limit, ...],
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Compare the plans OLD and NEW: decisions, prediction, collectives."""
    difference = diff_plans(read_plan(old), read_plan(new))
    if layout == "json":
        from tap_planner_cli.diff_json import diff_to_json

        click.echo(diff_to_json(difference), nl=False)
    elif layout == "markdown":
        from tap_planner_cli.diff_markdown import diff_to_markdown

        click.echo(diff_to_markdown(difference), nl=False)
    else:
        from tap_planner_cli.diff_text import print_diff

        print_diff(make_console(color), difference)
    passed = [reason for limit in fail_on if (reason := limit.passed_by(difference))]
    if not quiet:
        for reason in passed:
            click.echo(f"failed: {reason}", err=True)
    differs = exit_code and difference.verdict is not Verdict.IDENTICAL
    return EXIT_NEGATIVE if passed or differs else 0


def main() -> None:
    """Entry point."""
    run(command, "tap-diff")
