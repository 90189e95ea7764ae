"""tap-show: explain a plan, or a cluster."""

from __future__ import annotations

from pathlib import Path

import click

from tap_planner_cli.console import make_console, show_warnings
from tap_planner_cli.errors import EXIT_NEGATIVE, run
from tap_planner_cli.parameters import common_options, settings


@click.command(context_settings=settings("tap-show"))
@click.argument("plan", type=click.Path(path_type=Path), required=False)
@click.option("--program", is_flag=True, help="Print what each rank does, step by step (reads the model).")
@click.option("--model", type=click.Path(path_type=Path), help="The ONNX file; default: beside the plan, or here.")
@click.option("--cluster", metavar="FILE", help="Print how a cluster.yaml or NxM:DEVICE is understood, and lint it.")
@click.option("--strict", is_flag=True, help="Exit with 1 if the cluster has findings.")
@common_options
def command(
    plan: Path | None,
    program: bool,
    model: Path | None,
    cluster: str | None,
    strict: bool,
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Explain PLAN: mesh, time, memory, communication and every decision."""
    if plan is None and cluster is None:
        raise click.UsageError("give a PLAN or --cluster FILE")
    show_warnings(quiet=quiet, verbose=verbose)
    code = 0
    if cluster is not None:
        code = _show_cluster(cluster, color, strict=strict)
    if plan is not None:
        _show_plan(plan, model, color, program=program, quiet=quiet)
    return code


def _show_cluster(source: str, color: str, *, strict: bool) -> int:
    from tap_planner.cluster import lint, load_cluster
    from tap_planner_cli.show_cluster import print_cluster

    loaded = load_cluster(source)
    findings = lint(loaded)
    print_cluster(make_console(color), loaded, findings)
    return EXIT_NEGATIVE if findings and strict else 0


def _show_plan(path: Path, model: Path | None, color: str, *, program: bool, quiet: bool) -> None:
    from tap_planner.errors import PlanFormatError
    from tap_planner.plan import check_digests, read_plan
    from tap_planner_cli.show_text import print_plan

    document = read_plan(path)
    try:
        check_digests(document)
    except PlanFormatError as error:
        if not quiet:
            click.echo(f"warning: {error.message}", err=True)
    console = make_console(color)
    print_plan(console, document)
    if program:
        from tap_planner import api
        from tap_planner_cli.locate import locate_model
        from tap_planner_cli.show_program import print_program

        print_program(console, api.lower_plan(document, locate_model(model, path, document.model.name)))


def main() -> None:
    """Entry point."""
    run(command, "tap-show")
