"""The cases under ``tests/data/cases``: a folder each, with the right behaviour in its README.md.

Commands run in this process, as the installed ones do (``tap_planner_cli.errors.invoke``).
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import numpy as np

from tap_planner.apply import ApplyJob, apply_job
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.plan import Decisions, OperatorDecision, PlanDocument, expand, read_plan
from tap_planner_cli import apply, diff, plan, show
from tap_planner_cli.errors import invoke
from tests.apply.random_plans import RandomPlan

CASES = Path(__file__).parents[1] / "data" / "cases"
_COMMANDS: Mapping[str, click.Command] = {
    "tap-plan": plan.command,
    "tap-show": show.command,
    "tap-diff": diff.command,
    "tap-apply": apply.command,
}
_BIND = re.compile(r"^Bind: (\{.*\})$", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A command that ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The line that says what went wrong."""
        lines = [line for line in self.err.splitlines() if line.startswith(("error:", "internal error:"))]
        assert len(lines) == 1, self.err
        return lines[0]

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings and notes."""
        return tuple(line for line in self.err.splitlines() if line.startswith(("warning:", "note:")))

    def refused(self, code: int, *words: str) -> None:
        """Assert a refusal: this exit code, one line that holds the words, no traceback."""
        assert self.code == code, f"exit {self.code}: {self.err}"
        assert "Traceback" not in self.err and self.error.startswith("error:"), self.err
        for word in words:
            assert word in self.err, f"{word!r} is not in: {self.err}"


def run(command: str, *arguments: str | Path) -> Done:
    """Run a command in this process; what it does to logging is undone."""
    out, err = io.StringIO(), io.StringIO()
    logger = logging.getLogger("tap_planner")
    before = (logger.handlers, logger.propagate, logger.level)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = invoke(_COMMANDS[command], command, [str(argument) for argument in arguments])
    finally:
        logger.handlers, logger.propagate = before[0], before[1]
        logger.setLevel(before[2])
    return Done(code=code, out=out.getvalue(), err=err.getvalue())


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A plan that tap-plan wrote."""

    model: Path
    path: Path
    done: Done
    document: PlanDocument

    @property
    def decisions(self) -> Decisions:
        """The decisions with all names written out."""
        return expand(self.document)

    @property
    def operators(self) -> tuple[OperatorDecision, ...]:
        """The operators of the model, without the ends that inference adds."""
        return tuple(operator for operator in self.decisions.operators if operator.type != "Output")

    @property
    def json(self) -> dict[str, object]:
        """The plan file."""
        loaded: dict[str, object] = json.loads(self.path.read_text(encoding="utf-8"))
        return loaded

    @property
    def mesh(self) -> dict[str, int]:
        """Axis name to size."""
        return {axis.name: axis.size for axis in self.document.mesh.axes}

    def tables(self) -> str:
        """What tap-show prints."""
        done = run("tap-show", self.path)
        assert done.code == 0, done.err
        return done.out

    def apply(self, *arguments: str | Path) -> Done:
        """Run tap-apply on the plan."""
        return run("tap-apply", self.path, "--model", self.model, *arguments)

    def job(self) -> ApplyJob:
        """The plan as tap-apply reads it."""
        options = self.document.options
        return ApplyJob(
            model=self.model,
            options=BindOptions(
                batch=options.batch,
                dims=dict(options.dims),
                shapes=dict(options.shapes),
                values=dict(options.values),
                ends=options.mode == "infer",
            ),
            decisions=self.decisions,
            graph_digest=self.document.model.graph_digest,
        )


class Case:
    """One folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.folder = CASES / name

    @property
    def cluster(self) -> Path:
        """Its cluster.yaml."""
        return self.folder / "cluster.yaml"

    def model(self, stem: str = "model") -> Path:
        """One of its models."""
        return self.folder / f"{stem}.onnx"

    @property
    def bound(self) -> dict[str, int]:
        """Dims that its README binds."""
        found = _BIND.search((self.folder / "README.md").read_text(encoding="utf-8"))
        return json.loads(found[1]) if found else {}

    def options(self) -> list[str]:
        """The README's dims as options of tap-plan."""
        options: list[str] = []
        for name, size in self.bound.items():
            options += ["--batch", str(size)] if name == "batch" else ["--dim", f"{name}={size}"]
        return options

    def attempt(
        self, folder: Path, *options: str | Path, stem: str = "model", mode: str = "infer", bind: bool = True
    ) -> Done:
        """Run tap-plan, writing ``plan.json`` in ``folder``; a refusal must leave nothing there.

        Args:
            folder: where to write.
            options: of tap-plan; ``--cluster`` replaces the case's own.
            stem: which model.
            mode: ``infer`` or ``train``.
            bind: whether to bind what the README says.
        """
        cluster: list[str | Path] = [] if "--cluster" in options else ["--cluster", self.cluster]
        given = self.options() if bind else []
        path = folder / "plan.json"
        path.unlink(missing_ok=True)
        done = run("tap-plan", self.model(stem), *cluster, *given, "--mode", mode, *options, "-o", path)
        assert path.exists() == (done.code == 0), f"exit {done.code}, plan written: {path.exists()}: {done.err}"
        return done

    def plan(
        self, folder: Path, *options: str | Path, stem: str = "model", mode: str = "infer", bind: bool = True
    ) -> Planned:
        """As ``attempt``, for models that must have a plan."""
        done = self.attempt(folder, *options, stem=stem, mode=mode, bind=bind)
        assert done.code == 0, done.err
        path = folder / "plan.json"
        return Planned(model=self.model(stem), path=path, done=done, document=read_plan(path))

    def inputs(self, folder: Path, stem: str = "model") -> Path:
        """The inputs of ``STEM.io.npz`` as tap-apply reads them."""
        with np.load(self.folder / f"{stem}.io.npz", allow_pickle=False) as stored:
            values = {name[3:]: stored[name] for name in stored.files if name.startswith("in:")}
        path = folder / "inputs.npz"
        np.savez(path, **values)  # pyright: ignore[reportArgumentType]
        return path

    def outputs(self, stem: str = "model") -> dict[str, np.ndarray]:
        """The outputs that another runtime computed."""
        with np.load(self.folder / f"{stem}.io.npz", allow_pickle=False) as stored:
            return {name[4:]: stored[name] for name in stored.files if name.startswith("out:")}


def execute(job: ApplyJob, inputs: Path) -> dict[str, np.ndarray]:
    """Run a plan's ranks in lockstep and bring its outputs together."""
    result = apply_job(replace(job, inputs=inputs, keep_outputs=True))
    assert result is not None
    return dict(result.outputs)


def assert_equal_outputs(
    found: Mapping[str, np.ndarray], expected: Mapping[str, np.ndarray], tolerance: float = 2e-5
) -> None:
    """Assert that outputs have the same names, shapes and values."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].shape == value.shape, (name, found[name].shape, value.shape)
        scale = float(np.abs(value.astype(np.float64)).max()) if value.size else 0.0
        np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance * scale, err_msg=name)


def assert_runs_as_elsewhere(
    case: Case, folder: Path, *options: str, stem: str = "model", tolerance: float = 2e-5
) -> Planned:
    """Assert that the plan that tap-plan finds computes the outputs of ``STEM.io.npz``, and verifies in float64."""
    planned = case.plan(folder, "--precision", "fp32", *options, stem=stem)
    inputs = case.inputs(folder, stem)
    assert_equal_outputs(execute(planned.job(), inputs), case.outputs(stem), tolerance)
    verified = planned.apply("--verify", "--inputs", inputs)
    assert verified.code == 0, verified.out + verified.err
    return planned


def random_plans(planned: Planned, meshes: Sequence[tuple[int, ...]], seeds: int) -> Iterator[ApplyJob]:
    """Jobs with random strategies of every operator of a plan's model, on meshes of all sizes."""
    job = planned.job()
    graph = bound_graph(job)
    for mesh in meshes:
        for seed in range(seeds):
            decisions = RandomPlan(graph, mesh, seed).build()
            yield replace(job, decisions=replace(decisions, precision=planned.document.options.precision))


def bound_graph(job: ApplyJob) -> Graph:
    """The graph that a job runs."""
    return bind(load_model(job.model), job.options)


def assert_any_plan_runs_as_elsewhere(
    case: Case,
    planned: Planned,
    folder: Path,
    *,
    stem: str = "model",
    meshes: Sequence[tuple[int, ...]] = ((2, 2), (3,)),
    seeds: int = 4,
    tolerance: float = 2e-5,
) -> None:
    """Assert that random strategies of every operator give the same outputs, uneven and empty parts among them."""
    inputs, expected = case.inputs(folder, stem), case.outputs(stem)
    for job in random_plans(planned, meshes, seeds):
        assert_equal_outputs(execute(job, inputs), expected, tolerance)
