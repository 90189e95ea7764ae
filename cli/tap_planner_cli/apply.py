"""tap-apply: run a plan, and verify it."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import click

from tap_planner_cli.console import show_warnings
from tap_planner_cli.errors import EXIT_NEGATIVE, printable, run
from tap_planner_cli.locate import locate_model
from tap_planner_cli.parameters import common_options, settings


class Outcome(Protocol):
    """What applying a plan gives back."""

    @property
    def passed(self) -> bool:
        """Whether nothing differs from what the plan says."""
        ...

    def lines(self) -> tuple[str, ...]:
        """A summary for people."""
        ...


@click.command(context_settings=settings("tap-apply"))
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--model", type=click.Path(path_type=Path), help="The ONNX file; default: beside the plan, or here.")
@click.option(
    "--nproc",
    type=click.IntRange(min=1),
    help="Local processes to start; default: join a launcher's, else emulate all ranks in one process.",
)
@click.option("--inputs", type=click.Path(path_type=Path), help="Inputs as .npz; default: synthetic ones by --seed.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of all random numbers.")
@click.option("--steps", type=click.IntRange(min=1), default=1, show_default=True, help="Steps to run.")
@click.option("--init", type=click.Choice(["random"]), help="Make random weights instead of reading the model's.")
@click.option("--verify", is_flag=True, help="Compare with a single process, and the collectives with the plan's.")
@click.option(
    "--custom-ops",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE.py",
    allow_from_autoenv=False,
    help="RUNS THE CODE of a Python file that defines operators, see docs/custom-rules.md (repeatable).",
)
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), help="Communication library; default: by device.")
@common_options
def command(
    plan: Path,
    model: Path | None,
    nproc: int | None,
    inputs: Path | None,
    seed: int,
    steps: int,
    init: str | None,
    verify: bool,
    custom_ops: tuple[Path, ...],
    backend: str | None,
    quiet: bool,
    verbose: bool,
    color: str,
) -> int:
    """Run PLAN."""
    from tap_planner.plan import ApplyRequest, read_plan

    show_warnings(quiet=quiet, verbose=verbose)
    request = ApplyRequest(
        plan=plan,
        model=locate_model(model, plan, read_plan(plan).model.name),
        nproc=nproc,
        inputs=inputs,
        seed=seed,
        steps=steps,
        init_random=init == "random",
        verify=verify,
        backend=backend,
        custom_ops=custom_ops,
    )
    from tap_planner import api

    outcome: Outcome = api.apply_plan(request)
    for line in outcome.lines():
        click.echo(printable(line))
    return 0 if outcome.passed else EXIT_NEGATIVE


def main() -> None:
    """Entry point."""
    run(command, "tap-apply")
