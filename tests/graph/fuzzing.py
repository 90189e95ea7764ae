"""Runs damaged models through the importer in a child process with limits, and says what came of each.

Right is: an accepted graph that is what it claims to be, or a ``TapError`` of one printable line. Anything else is a
fault: another exception, a warning, more than the time, more than the memory, a dead process.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tap_planner.graph import BindOptions, Graph, ModelFile

ROOT = Path(__file__).parents[2]
ADDRESS_LIMIT_BYTES = 2 << 30
RESIDENT_LIMIT_BYTES = 1 << 30
"""An input after which the process has needed more than this is a memory blow-up."""


def _slowness() -> float:
    """How many times longer than on the machine that limits were set on a fixed piece of work takes, at least 1."""
    taken: list[float] = []
    for _ in range(3):
        started = time.process_time()
        sum(range(2_000_000))
        total = 0
        for number in range(1_000_000):
            total += number
        taken.append(time.process_time() - started)
    return max(1.0, min(taken) / USUAL_S)


USUAL_S = 0.05
"""What that takes there."""
CPU_LIMIT_S = round(8.0 * _slowness(), 1)
"""For importing an input; for planning it the same again. The largest unfolding that is let through takes half."""
WALL_LIMIT_S = max(30.0, 2 * CPU_LIMIT_S)
"""The child is killed after this: it hangs where no Python signal handler runs (or sleeps)."""
MAX_MESSAGE = 2000
MAX_PLANNED_OPERATORS = 150
"""Larger graphs are not planned: their search may rightly take longer than the limit."""
INTERNAL_EXIT = 70

# -- in the child ------------------------------------------------------------------------------------------------


class _OutOfTimeError(BaseException):
    """The CPU limit was reached."""


@dataclass(slots=True)
class _Trail:
    """How far the current input has come."""

    stage: str = "load"
    reached: bool = False
    """Whether the binder, which infers shapes node by node, was entered."""
    nodes: int = 0
    """Nodes that the binder visited."""


def _watch(trail: _Trail) -> None:
    """Note when the binder is entered (from outside: the product knows nothing of this)."""
    from tap_planner.graph.binding import Binder

    run, visit = Binder.run, Binder._visit

    def watched_run(self: Binder, *arguments: Any, **named: Any) -> object:
        trail.reached = True
        return run(self, *arguments, **named)

    def watched_visit(self: Binder, *arguments: Any, **named: Any) -> object:
        trail.nodes += 1
        return visit(self, *arguments, **named)

    Binder.run, Binder._visit = watched_run, watched_visit  # type: ignore[method-assign,assignment]


def _options(model: ModelFile, *, training: bool) -> BindOptions:
    """Small numbers for the symbolic dims that the file declares."""
    from tap_planner.graph import BindOptions, LossOptions

    stored = {tensor.name for tensor in model.proto.graph.initializer}
    sizes: dict[str, int] = {}
    for value in model.proto.graph.input:
        if value.name in stored or not value.type.HasField("tensor_type"):
            continue
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            if not (dim.HasField("dim_value") and dim.dim_value > 0):
                named = dim.dim_param and dim.dim_param != "?"
                sizes.setdefault(dim.dim_param if named else f"{value.name}.{index}", 2 + len(sizes) % 3 * 2)
    loss = LossOptions(kind="mean") if training else LossOptions()
    return BindOptions(dims=sizes, training=training, loss=loss)


def _check_graph(graph: Graph) -> None:
    """An accepted graph has true types everywhere."""
    for tensor in graph.tensors.values():
        for size in tensor.type.shape:
            if type(size) is not int or size < 0:
                raise AssertionError(f"accepted with dims {tensor.type.shape!r:.200}")
    made = [name for operator in graph.operators for name in operator.outputs]
    if len(set(made)) != len(made):
        raise AssertionError("accepted with a tensor that is made twice")
    for operator in graph.operators:
        for name, type_ in zip(operator.outputs, operator.signature.outputs, strict=True):
            if graph.tensors[name].type != type_:
                raise AssertionError("accepted with two types for one tensor")


def _import(path: Path, trail: _Trail, plan: bool) -> str:
    """Everything that is run on one input; the name of the outcome."""
    from tap_planner.errors import TapError
    from tap_planner.folding import fold
    from tap_planner.graph import bind, load_model

    trail.stage = "load"
    model = load_model(path)
    options = {training: _options(model, training=training) for training in (False, True)}
    refused: TapError | None = None
    for training in (False, True):
        trail.stage = "bind for training" if training else "bind for inference"
        try:
            graph = bind(model, options[training])
        except TapError as error:
            _check_error(error)
            refused = refused or error
            continue
        _check_graph(graph)
        trail.stage = "fold"
        fold(graph)
        if plan and len(graph.operators) <= MAX_PLANNED_OPERATORS:
            trail.stage = "plan"
            _plan(path, options[training])
    if refused is not None:
        raise refused
    return "planned" if plan else "accepted"


def _plan(path: Path, options: BindOptions) -> None:
    """Plan on two devices; a plan that cannot be is no fault."""
    from tap_planner.api import make_plan
    from tap_planner.errors import TapError
    from tap_planner.plan import PlanOptions, PlanRequest

    wanted = PlanOptions(
        mode="train" if options.training else "infer",
        dims=options.dims,
        precision="fp32",
        loss="mean" if options.training else None,
        zero=0,
        microbatches=1,
        recompute="none",
        max_axes=1,
        gap_basis_points=10_000,
    )
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
    try:
        make_plan(PlanRequest(model=path, cluster="1x2:cpu-core", options=wanted))
    except TapError as error:
        _check_error(error)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)


def _check_error(error: BaseException) -> None:
    """A refusal is one printable line, and no allocation failed on the way to it."""
    from tap_planner.errors import TapError

    assert isinstance(error, TapError)
    for text in (error.message, error.hint):
        if not text.isprintable():
            raise AssertionError(f"a message that is not one printable line: {text!r:.300}")
        if len(text) > MAX_MESSAGE:
            raise AssertionError(f"a message of {len(text)} characters: {text[:200]!r}")
    if not error.message:
        raise AssertionError("an empty message")
    if error.exit_code == INTERNAL_EXIT:
        raise AssertionError("exit code 70")
    pending: list[BaseException | None] = [error]
    seen: set[int] = set()
    while pending:
        cause = pending.pop()
        if cause is None or id(cause) in seen:
            continue
        seen.add(id(cause))
        if isinstance(cause, MemoryError):
            raise AssertionError(f"memory was asked for before sizes were checked: {error.message:.200}")
        pending.extend((cause.__cause__, cause.__context__))


def _guarded(error: BaseException) -> str:
    """Where another exception came from that a general guard turned into a refusal; empty for a check of its own."""
    from tap_planner.errors import TapError

    cause: BaseException = error
    while isinstance(cause, TapError) and cause.__cause__ is not None and cause.__cause__ is not error:
        cause = cause.__cause__
    if isinstance(cause, TapError) or "not a valid" not in str(error):
        return ""
    return f"{type(cause).__name__} at {_innermost(cause.__traceback__)}"


def _innermost(trace: TracebackType | None) -> str:
    """The innermost line of the product on a traceback."""
    lines = [frame for frame in traceback.extract_tb(trace) if "tap_planner" in frame.filename]
    if not lines:
        return "outside"
    return f"{Path(lines[-1].filename).name}:{lines[-1].lineno} {lines[-1].name}"


def _handle(job: Mapping[str, object], trail: _Trail) -> dict[str, object]:
    from tap_planner.errors import TapError

    trail.stage, trail.reached, trail.nodes = "load", False, 0
    started = _cpu_s()
    fault = message = guarded = ""
    try:
        signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT_S)
        try:
            outcome = _import(Path(str(job["path"])), trail, bool(job["plan"]))
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
    except TapError as error:
        outcome, message = f"refused: {trail.stage}, {type(error).__name__}", error.message
        guarded = _guarded(error)
        try:
            _check_error(error)
        except AssertionError as wrong:
            fault = str(wrong)
    except _OutOfTimeError as error:
        outcome, fault = "hang", f"more than {CPU_LIMIT_S} s in {trail.stage} at {_innermost(error.__traceback__)}"
    except BaseException as error:
        outcome = "traceback"
        fault = f"{type(error).__name__} in {trail.stage} at {_innermost(error.__traceback__)}: {str(error)[:300]!r}"
    spent = _cpu_s() - started
    if spent > CPU_LIMIT_S and not fault and not job["plan"]:
        outcome, fault = "hang", f"{spent:.1f} s of processor time, children included"
    return {
        "outcome": outcome,
        "fault": fault,
        "message": message,
        "guarded": guarded,
        "reached": trail.reached,
        "nodes": trail.nodes,
        "cpu_s": round(spent, 4),
        "peak_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    """The most that this process has held; ``ru_maxrss`` counts that of the process that has started it, too."""
    with open("/proc/self/status", encoding="ascii") as file:
        line = next(line for line in file if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


def _cpu_s() -> float:
    """Processor time of this process and of the children that it waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _ring(number: int, frame: FrameType | None) -> None:
    raise _OutOfTimeError


def _serve() -> None:
    """Answer one line of JSON for each line of JSON; everything else that is printed is thrown away."""
    answers = os.fdopen(os.dup(1), "w")
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)
    import tap_planner.api
    import tap_planner.search  # noqa: F401  (its libraries are loaded before the limit holds)

    trail = _Trail()
    _watch(trail)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_LIMIT_BYTES, ADDRESS_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, _ring)
    warnings.simplefilter("error")
    for line in sys.stdin:
        print(json.dumps(_handle(json.loads(line), trail)), file=answers, flush=True)


# -- in the parent -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of one input."""

    outcome: str
    """``accepted``, ``planned``, ``refused: stage, class of error``, or the kind of fault."""
    fault: str
    """Empty where everything is right."""
    reached: bool
    """Whether it came through parsing, dims and sorting into binding, where shapes are inferred."""
    message: str = ""
    """Of a refusal."""
    guarded: str = ""
    """Where a general guard, not a check of its own, caught what was wrong."""
    nodes: int = 0
    """Nodes that were bound."""
    cpu_s: float = 0.0
    peak_bytes: int = 0
    """Most resident memory of the child so far."""


@dataclass(slots=True)
class Importer:
    """A child process that imports models, started anew when one kills it."""

    folder: Path
    starts: int = 0
    _child: subprocess.Popen[str] | None = None
    _peak: int = field(default=0)

    def run(self, data: bytes, *, plan: bool = False) -> Outcome:
        """Import a model.

        Args:
            data: content of the file.
            plan: also plan it on two devices.
        """
        path = self.folder / "model.onnx"
        path.write_bytes(data)
        child = self._running()
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(json.dumps({"path": str(path), "plan": plan}) + "\n")
        child.stdin.flush()
        ready, _, _ = select.select([child.stdout], [], [], WALL_LIMIT_S)
        line = child.stdout.readline() if ready else ""
        if not line:
            return self._lost(hangs=not ready)
        outcome = Outcome(**json.loads(line))
        return self._with_memory(outcome)

    def _with_memory(self, outcome: Outcome) -> Outcome:
        before, self._peak = self._peak, max(self._peak, outcome.peak_bytes)
        if self._peak > RESIDENT_LIMIT_BYTES:
            self.close()
            mebibytes = outcome.peak_bytes >> 20
            text = outcome.fault or f"{mebibytes} MiB of memory, {before >> 20} before"
            return replace(outcome, outcome="memory", fault=text)
        return outcome

    def _lost(self, *, hangs: bool) -> Outcome:
        child = self._child
        assert child is not None
        if hangs:
            child.kill()
        code = self.close()
        if hangs:
            return Outcome(outcome="hang", fault=f"no answer in {WALL_LIMIT_S} s", reached=False, cpu_s=WALL_LIMIT_S)
        return Outcome(outcome="crash", fault=f"the process died with code {code}", reached=False)

    def _running(self) -> subprocess.Popen[str]:
        if self._child is None:
            self._peak = 0
            self.starts += 1
            paths = os.pathsep.join(str(ROOT / part) for part in (".", "planner", "cli"))
            self._child = subprocess.Popen(
                [sys.executable, "-m", "tests.graph.fuzzing"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
        return self._child

    def close(self) -> int:
        """End the child; its exit code."""
        child, self._child = self._child, None
        if child is None:
            return 0
        assert child.stdin is not None and child.stdout is not None
        with contextlib.suppress(OSError):
            child.stdin.close()
        code = child.wait()
        child.stdout.close()
        return code


@contextlib.contextmanager
def importer() -> Iterator[Importer]:
    """A child process, ended on the way out."""
    with tempfile.TemporaryDirectory() as folder:
        made = Importer(folder=Path(folder))
        try:
            yield made
        finally:
            made.close()


if __name__ == "__main__":
    _serve()
