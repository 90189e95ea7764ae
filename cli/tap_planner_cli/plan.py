"""tap-plan: find and write the plan, or check one."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from tap_planner.errors import TapError, UsageError
from tap_planner.operators import load_custom_rules
from tap_planner.plan import (
    AS_LIBRARY,
    COSTS,
    DEFAULT_SCHEDULE,
    LOSSES,
    METHODS,
    MODES,
    OBJECTIVES,
    OPTIMIZER_STATES,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    TARGETS,
    TRAVERSAL_ORDERS,
    Auto,
    Constraint,
    Overlap,
    PlanOptions,
    PlanRequest,
    Verdict,
    check_digests,
    load_constraints,
    parse_constraint,
    parse_place_rule,
    parse_rule,
    read_plan,
    replicate_rule,
    to_text,
    write_plan,
)
from tap_planner.processes import usable_cores, use_processes
from tap_planner.schedule import SCHEDULES, read_order
from tap_planner.schedule import to_text as order_text
from tap_planner.yaml_entries import near_miss
from tap_planner_cli.console import make_console, show_warnings
from tap_planner_cli.errors import EXIT_NEGATIVE, printable, run
from tap_planner_cli.parameters import PERCENT, SIZE, Assignment, NumberOrAuto, check_writable, common_options, settings
from tap_planner_cli.summary import print_alternatives, print_summary, write_report
from tap_planner_cli.sweep import SweepCommand, refuse_sweeping, run_sweep
from tap_planner_cli.sweep_tables import FORMATS

_POSITIVE = click.IntRange(min=1)
DEFAULT_REGRET_BASIS_POINTS = 100
"""How much slower than the best a plan near to an old one may be, where --max-regret is not given."""
_NOT_PLANNING = {
    "model",
    "cluster",
    "output",
    "alternatives",
    "check",
    "report",
    "quiet",
    "verbose",
    "color",
    "model_file",
    "verify_certificate",
    "replay",
    "processes",
}
"""Parameters that a --check may be given with; all others are in the plan."""


@click.command(cls=SweepCommand, context_settings=settings("tap-plan"))
@click.argument("model", type=click.Path(path_type=Path), required=False)
@click.option("--model", "model_file", type=click.Path(path_type=Path), help="The same as MODEL.")
@click.option("--cluster", metavar="FILE|NxM:DEVICE", help="cluster.yaml, or as 4x8:h100-sxm5-80gb.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Plan file (with --grid: table); default: stdout."
)
@click.option("--batch", type=_POSITIVE, help="Global batch of one step.")
@click.option("--dim", type=Assignment(), multiple=True, help="Value of a symbolic dim (repeatable).")
@click.option("--shape", type=Assignment(several=True), multiple=True, help="Shape of an input, as x=4,8.")
@click.option(
    "--value",
    type=Assignment(values=True),
    multiple=True,
    help="Value of an integer or boolean input; as s=8,3 of one with several elements.",
)
@click.option("--batch-dim", metavar="NAME", help="Symbolic dim that carries the batch.")
@click.option("--mode", type=click.Choice(MODES), default="train", show_default=True)
@click.option("--optimizer", type=click.Choice(OPTIMIZERS), default="adamw", show_default=True)
@click.option(
    "--optimizer-states",
    type=click.Choice([*OPTIMIZER_STATES, "auto"]),
    default="fp32",
    show_default=True,
    help="Element type of AdamW's moments; auto: bf16 where fp32 is over 2% slower or does not fit.",
)
@click.option("--precision", type=click.Choice(PRECISIONS), default="bf16", show_default=True)
@click.option(
    "--objective",
    type=click.Choice(OBJECTIVES),
    default="time",
    show_default=True,
    help="What is to be least: the step's time, memory per device, or bytes that a device sends.",
)
@click.option(
    "--cost",
    type=click.Choice(COSTS),
    default="topology",
    show_default=True,
    help="How communication is priced: on the links it uses, or (to compare) by its volume alone.",
)
@click.option(
    "--overlap",
    type=click.Choice([AS_LIBRARY, *(overlap.value for overlap in Overlap)]),
    default=AS_LIBRARY,
    show_default=True,
    help="What the runtime hides behind computation: nothing, data (gradients, ZeRO, transfers), or tensor-parallel "
    "communication as well; auto: none over gloo, else data.",
)
@click.option(
    "--method",
    type=click.Choice(METHODS),
    default="sharding",
    show_default=True,
    help="Split operators, put whole ones on devices, or whichever is faster.",
)
@click.option(
    "--order",
    default="auto",
    show_default=True,
    metavar="|".join(["auto", *TRAVERSAL_ORDERS, "random:SEED"]),
    help="In which order device placement takes operators; auto: all, keep the best.",
)
@click.option(
    "--place",
    multiple=True,
    metavar="RULE",
    help="Where whole operators may lie, as 'encoder.*: 0-1', 'embed*: cpu' or 'layer1.*: together' (repeatable).",
)
@click.option("--loss", type=click.Choice([*LOSSES, "none"]), help="Default: the mean of the first float output.")
@click.option("--loss-output", metavar="NAME", help="Output that the loss reads.")
@click.option("--freeze", multiple=True, metavar="PATTERN", help="Parameters not to train (repeatable).")
@click.option("--train", multiple=True, metavar="PATTERN", help="Parameters to train all the same (repeatable).")
@click.option(
    "--mesh",
    metavar="dp=2,tp=2",
    help="Axes, outermost first, and pipeline stages as pp=4; dp=2,tp=8/tp,dp splits by tp first; "
    "default: the search chooses.",
)
@click.option(
    "--stages",
    type=NumberOrAuto(1),
    default=1,
    show_default=True,
    help="Pipeline stages of the mesh to choose; auto: the search chooses.",
)
@click.option(
    "--schedule",
    default=DEFAULT_SCHEDULE,
    show_default=True,
    metavar="|".join([*SCHEDULES, "auto", "FILE"]),
    help="Of a pipeline: one of these, auto to choose, or a file with an order of your own.",
)
@click.option("--chunks", type=_POSITIVE, metavar="V", help="Parts of the model on each pipeline stage.")
@click.option("--max-axes", type=click.IntRange(1, 4), default=2, show_default=True, help="Most axes to choose.")
@click.option("--allow-idle", is_flag=True, help="Let the mesh leave devices out where that is faster.")
@click.option("--gap", type=PERCENT, default="0.1%", show_default=True, help="End when proven this near the optimum.")
@click.option("--stay-near", type=click.Path(path_type=Path), metavar="PLAN", help="Change little of this old plan.")
@click.option("--max-regret", type=PERCENT, help="How much slower that may make it; default: 1%.")
@click.option("--zero", type=NumberOrAuto(0, 3), default="auto", show_default=True, help="ZeRO level.")
@click.option("--no-zero", is_flag=True, help="The same as --zero 0.")
@click.option("--microbatches", type=NumberOrAuto(1), default="auto", show_default=True)
@click.option("--recompute", type=click.Choice(["auto", *RECOMPUTES]), default="auto", show_default=True)
@click.option("--max-memory", type=SIZE, default="device", show_default=True, help="Per device, as 60GiB; or none.")
@click.option(
    "--fix", multiple=True, metavar="RULE", help="What must be split how, as 'layers.*.mlp.*: tp' (repeatable)."
)
@click.option("--forbid", multiple=True, metavar="RULE", help="What must not, as 'lm_head: tp' (repeatable).")
@click.option("--replicate", multiple=True, metavar="PATTERN", help="Parameters to be whole everywhere (repeatable).")
@click.option("--constraint", multiple=True, metavar="RULE", help="Either: PATTERN: AXIS=VALUE or != (repeatable).")
@click.option(
    "--constraints",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML file of such rules, see docs/constraints.md (repeatable).",
)
@click.option("--target", type=click.Choice(TARGETS), help="Only plans that this framework can express.")
@click.option(
    "--custom-rule",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="YAML rules of operators that are not known, see docs/custom-rules.md (repeatable).",
)
@click.option(
    "--alternatives", type=_POSITIVE, metavar="K", help="Also show the K best plans on other meshes, with their costs."
)
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME[=V|V],...",
    help="Plan every combination of mesh axes, pp, microbatches, chunks, schedule, zero, recompute, "
    "optimizer-states, batch; see docs/sweep.md (repeatable).",
)
@click.option("--sweep", is_flag=True, help="The same as --grid pp,dp,tp,microbatches, as far as they are open.")
@click.option("--format", "table_format", type=click.Choice(FORMATS), help="Of a grid's table; default: by -o's name.")
@click.option("--top", type=_POSITIVE, metavar="N", help="Rows of a grid's table that are shown; default: all.")
@click.option("--resume", type=click.Path(path_type=Path), metavar="FILE", help="Keep a grid's outcomes, and go on.")
@click.option("--check", type=click.Path(path_type=Path), help="Re-plan with this plan's options and compare.")
@click.option(
    "--verify-certificate",
    type=click.Path(path_type=Path),
    metavar="PLAN",
    help="Check what this plan claims of itself; needs MODEL only, see docs/certificate.md.",
)
@click.option("--replay", is_flag=True, help="With --verify-certificate: prove the solver's bounds again, too.")
@click.option("--report", type=click.Path(path_type=Path), help="Write times and diagnosis as JSON.")
@click.option("--processes", type=_POSITIVE, help="Processes that search; default: one per core (one plan: at most 2).")
@common_options
@click.pass_context
def command(
    context: click.Context,
    model: Path | None,
    model_file: Path | None,
    cluster: str | None,
    check: Path | None,
    **values: Any,
) -> int:
    """Find the best plan for MODEL on a cluster, the fastest unless told otherwise, and prove how good it is."""
    show_warnings(quiet=values["quiet"], verbose=values["verbose"])
    started = time.perf_counter()
    path = _model(context, model, model_file)
    with use_processes(values["processes"] or usable_cores()), _failures_reported(values["report"], started):
        if values["grid"] or values["sweep"]:
            if cluster is None:
                raise _missing(context, "cluster")
            return run_sweep(context, path, cluster, make_options(values), values)
        refuse_sweeping(context)
        if values["verify_certificate"] is not None:
            return _verify(context, path, values)
        if values["replay"]:
            raise UsageError("--replay belongs to --verify-certificate", hint="Add --verify-certificate PLAN.")
        if cluster is None:
            raise _missing(context, "cluster")
        if check is not None:
            return _check(context, path, cluster, check, values)
        return _plan(PlanRequest(model=path, cluster=cluster, options=make_options(values)), values, started)


@contextlib.contextmanager
def _failures_reported(report: Path | None, started: float) -> Iterator[None]:
    """Write errors into the report as well, where one is asked for."""
    try:
        yield
    except TapError as error:
        if report is not None:
            write_report(report, started, error=error)
        raise


def _model(context: click.Context, model: Path | None, given: Path | None) -> Path:
    """The model, as an argument or as an option."""
    if model is not None and given is not None:
        raise UsageError("MODEL and --model are both given", hint="Leave one of them out.")
    path = given if model is None else model
    if path is None:
        raise _missing(context, "model")
    return path


def _missing(context: click.Context, name: str) -> click.MissingParameter:
    param = next(param for param in context.command.params if param.name == name)
    return click.MissingParameter(ctx=context, param=param, param_hint="'MODEL'" if name == "model" else None)


def make_options(values: dict[str, Any]) -> PlanOptions:
    """Typed options from click's values.

    Raises:
        UsageError: options that do not fit together.
    """
    training = values["mode"] == "train"
    loss = values["loss"]
    if training and loss == "none":
        raise UsageError("--loss none in mode train: training needs a loss", hint="Use --mode infer.")
    if not training and (loss not in (None, "none") or values["loss_output"]):
        raise UsageError("--loss is for training, the mode is infer", hint="Leave --loss and --loss-output out.")
    return PlanOptions(
        mode=values["mode"],
        batch=values["batch"],
        precision=values["precision"],
        optimizer=values["optimizer"],
        objective=_objective(values),
        cost=values["cost"],
        overlap=values["overlap"],
        method=values["method"],
        traversal_order=_traversal_order(values["order"]),
        places=tuple(dict.fromkeys(parse_place_rule(text) for text in values["place"])),
        optimizer_states=values["optimizer_states"],
        loss=loss if training else None,
        loss_output=values["loss_output"],
        zero=_zero(values),
        microbatches=values["microbatches"],
        recompute=values["recompute"],
        mesh=values["mesh"],
        stages=_stages(values),
        **_schedule(values["schedule"]),
        chunks=values["chunks"],
        max_axes=values["max_axes"],
        allow_idle=values["allow_idle"],
        gap_basis_points=values["gap"],
        max_regret_basis_points=_max_regret(values),
        max_memory_bytes=values["max_memory"],
        constraints=make_constraints(values),
        target=values["target"],
        dims=_unique("--dim", values["dim"]),
        shapes=_unique("--shape", values["shape"]),
        values=_unique("--value", values["value"]),
        batch_dim=values["batch_dim"],
        freeze=values["freeze"],
        train=values["train"],
        custom_rules=load_custom_rules(values["custom_rule"]),
    )


def _traversal_order(given: str) -> str:
    """A name that there is; its seed is a number.

    Raises:
        UsageError: there is none such.
    """
    known = ("auto", *TRAVERSAL_ORDERS)
    if given not in known and not re.fullmatch(r"random:[0-9]{1,9}", given):
        raise UsageError(
            f"--order {given!r}, expected one of {', '.join(known)} or random:SEED{near_miss(given, known)}",
            hint="Leave --order out to try them all.",
        )
    return given


def _stages(values: dict[str, Any]) -> int | Auto:
    if values["mesh"] is not None and values["stages"] != 1:
        raise UsageError(
            f"--stages {values['stages']}: --mesh {values['mesh']} says how many stages there are",
            hint="Name them in --mesh, as pp=4,dp=2,tp=2, or leave --mesh to the search.",
        )
    return values["stages"]


def _schedule(given: str) -> dict[str, Any]:
    """The schedule of a name, or the order of a file, which is called as it says, or as the file."""
    known = (*SCHEDULES, "auto")
    if given in known:
        return {"schedule": given}
    path = Path(given)
    if not path.is_file():
        raise UsageError(
            f"--schedule {given!r}: no such file, and not one of {', '.join(known)}{near_miss(given, known)}",
            hint="Choose one of these, or give the path of a file with an order.",
        )
    order = read_order(path)
    named = replace(order, name=path.stem) if order.name == given else order
    return {"schedule": named.name, "order": tuple(order_text(named).splitlines())}


def _objective(values: dict[str, Any]) -> str:
    if values["objective"] != "time" and values["stay_near"] is not None:
        raise UsageError(
            f"--stay-near allows a regret of time, the objective is {values['objective']}",
            hint="Leave --stay-near or --objective out.",
        )
    return values["objective"]


def _max_regret(values: dict[str, Any]) -> int | None:
    if values["stay_near"] is None and values["max_regret"] is not None:
        raise UsageError("--max-regret is for --stay-near", hint="Give the old plan with --stay-near PLAN.")
    if values["stay_near"] is None:
        return None
    return DEFAULT_REGRET_BASIS_POINTS if values["max_regret"] is None else values["max_regret"]


def _zero(values: dict[str, Any]) -> int | Auto:
    if values["no_zero"] and values["zero"] not in ("auto", 0):
        raise UsageError(f"--no-zero and --zero {values['zero']} exclude each other", hint="Leave one of them out.")
    return 0 if values["no_zero"] else values["zero"]


def make_constraints(values: dict[str, Any]) -> tuple[Constraint, ...]:
    """The rules of all options, those of files last; one that is given twice counts once.

    Raises:
        UsageError: a rule or a file of rules cannot be understood.
    """
    rules = [
        *(parse_rule(text, origin="--fix") for text in values["fix"]),
        *(parse_rule(text, forbid=True, origin="--forbid") for text in values["forbid"]),
        *(replicate_rule(text, origin="--replicate") for text in values["replicate"]),
        *(parse_constraint(text) for text in values["constraint"]),
        *load_constraints(values["constraints"]),
    ]
    return tuple(dict.fromkeys(rules))


def _unique(option: str, pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        double = next(name for name in names if names.count(name) > 1)
        raise UsageError(f"{option} {double} is given twice", hint="Give each name once.")
    return result


def _plan(request: PlanRequest, values: dict[str, Any], started: float) -> int:
    output: Path | None = values["output"]
    if values["alternatives"] and values["mesh"] is not None:
        raise UsageError(
            f"--alternatives shows plans on other meshes, --mesh {values['mesh']} allows one",
            hint="Leave one of them out.",
        )
    if values["alternatives"] and values["method"] != "sharding":
        raise UsageError(
            f"--alternatives shows plans of split operators on other meshes, the method is {values['method']}",
            hint="Leave --alternatives or --method out.",
        )
    if values["alternatives"] and values["stages"] != 1:
        raise UsageError(
            "--alternatives shows plans without pipeline on other meshes",
            hint="Leave --alternatives or --stages out.",
        )
    check_writable(output, "plan.json")
    old = None if values["stay_near"] is None else read_plan(values["stay_near"])
    if old is not None:
        check_digests(old)
    from tap_planner import api

    document = api.make_plan(request, old)
    if output is None:
        click.echo(to_text(document), nl=False)
    else:
        write_plan(output, document)
    if not values["quiet"]:
        print_summary(make_console(values["color"], stderr=True), document, output)
    others = api.alternatives(request, document, values["alternatives"]) if values["alternatives"] else ()
    if others and not values["quiet"]:
        print_alternatives(make_console(values["color"], stderr=True), document, others)
    if values["report"] is not None:
        write_report(values["report"], started, document=document, others=others)
    return 0


def _check(context: click.Context, model: Path, cluster: str, plan: Path, values: dict[str, Any]) -> int:
    _refuse_planning(context, "--check", _NOT_PLANNING)
    old = read_plan(plan)
    check_digests(old)
    from tap_planner import api
    from tap_planner_cli.diff_text import print_diff

    difference = api.check_plan(old, model, cluster)
    print_diff(make_console(values["color"]), difference)
    return EXIT_NEGATIVE if difference.verdict is Verdict.DECISIONS_CHANGED else 0


def _verify(context: click.Context, model: Path, values: dict[str, Any]) -> int:
    others = _NOT_PLANNING - {"cluster", "output", "alternatives", "check", "report"}
    _refuse_planning(context, "--verify-certificate", others | {"stay_near"})
    document = read_plan(values["verify_certificate"])
    old = None if values["stay_near"] is None else read_plan(values["stay_near"])
    from tap_planner import api

    report = api.verify_certificate(document, model, replay=values["replay"], old=old)
    if not values["quiet"]:
        for line in report.lines():
            click.echo(printable(line))
    return 0 if report.passed else EXIT_NEGATIVE


def _refuse_planning(context: click.Context, mode: str, allowed: set[str]) -> None:
    """Options that the plan holds cannot be given again.

    Raises:
        UsageError: one is given.
    """
    given = [
        name
        for name in context.params
        if name not in allowed and context.get_parameter_source(name) is not ParameterSource.DEFAULT
    ]
    if given:
        option = "--" + given[0].replace("_", "-")
        raise UsageError(
            f"{option} cannot be given with {mode}, which takes the options of the plan",
            hint=f"Leave {option} out, or write a new plan with it and use tap-diff.",
        )


def main() -> None:
    """Entry point."""
    run(command, "tap-plan")
