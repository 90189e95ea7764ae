"""A sweep: the model read once, each combination planned by itself, on as many processes as there are cores."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tap_planner.errors import TapError
from tap_planner.plan import PlanDocument, PlanOptions, options_to_json
from tap_planner.requests import PreparedSearch, lay_out, read_model
from tap_planner.sweep.combinations import Combination, combinations
from tap_planner.sweep.grid import Grid
from tap_planner.sweep.rows import (
    Outcome,
    RankedRow,
    better_of,
    failed_outcome,
    outcome_of_error,
    outcome_of_plan,
    rank,
)
from tap_planner.sweep.state import Inputs, StateFile, opened
from tap_planner.sweep.workers import Lost, how_ended, work_through

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster

__all__ = ["Sweep", "SweepProgress", "SweepRequest", "prepare_sweep"]

MODELS = 8
"""Models (of a mesh and a microbatch count) that a process keeps for the next combination."""
_log = logging.getLogger("tap_planner")


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRequest:
    """A question for many plans."""

    model: Path
    """ONNX file."""
    cluster: str
    """Path or shorthand."""
    options: PlanOptions
    """What is the same in all combinations."""
    grid: Grid
    """What is varied."""
    state: Path | None = None
    """File in which outcomes are kept, and looked for; None: none."""
    processes: int = 1
    """Most processes; their number does not change an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepProgress:
    """How far a sweep is."""

    done: int
    total: int
    best: Outcome | None
    """So far."""


@dataclass(kw_only=True)
class Sweep:
    """A sweep that can be run, and asked at any time what it has found."""

    request: SweepRequest
    cluster: Cluster
    reads: Mapping[int | None, PreparedSearch | TapError]
    """By batch (None: that of the options), the model, or why it cannot be bound so."""
    combinations: tuple[Combination, ...]
    plan: Callable[[PreparedSearch], PlanDocument]
    """Plans one combination."""
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    """By number of the combination, what is known."""
    num_kept: int = 0
    """How many were known from an earlier run."""
    best: Outcome | None = None
    """Of those that are known."""

    @property
    def rows(self) -> tuple[RankedRow, ...]:
        """What is known so far, the best first."""
        return rank(self.combinations, self.outcomes, self.request.options.objective)

    def run(self, on_progress: Callable[[SweepProgress], None] = lambda progress: None) -> None:
        """Plan what is not known yet.

        Args:
            on_progress: called at the start, with every outcome, and now and then between them.

        Raises:
            UsageError: the state file is in use, or of another sweep.
        """
        with opened(self.request.state, self._inputs()) as state:
            self._take_known(state)
            on_progress(self._progress())
            left = [number for number in range(len(self.combinations)) if number not in self.outcomes]
            with _models_kept():
                self._bind(left)
                for answer in work_through(
                    left, self._outcome, self.request.processes, lambda: on_progress(self._progress())
                ):
                    outcome = _lost(answer) if isinstance(answer, Lost) else answer.answer
                    self._take(answer.task, outcome)
                    if state is not None:
                        state.add(self._key(answer.task), outcome)
                    on_progress(self._progress())

    def _take_known(self, state: StateFile | None) -> None:
        known = {} if state is None else state.outcomes
        for number in range(len(self.combinations)):
            outcome = known.get(self._key(number))
            if outcome is not None and number not in self.outcomes:
                self._take(number, outcome)
                self.num_kept += 1

    def _take(self, number: int, outcome: Outcome) -> None:
        self.outcomes[number] = outcome
        self.best = better_of(self.best, outcome, self.request.options.objective)

    def _progress(self) -> SweepProgress:
        return SweepProgress(done=len(self.outcomes), total=len(self.combinations), best=self.best)

    # -- one combination ---------------------------------------------------------------------------------------

    def _read(self, combination: Combination) -> PreparedSearch | TapError:
        batch = dict(combination.values).get("batch")
        return self.reads[None if batch is None else int(batch)]

    def _outcome(self, number: int) -> Outcome:
        """Plan a combination, whatever happens."""
        combination, started = self.combinations[number], time.perf_counter()
        read = self._read(combination)
        try:
            if isinstance(read, TapError):
                return outcome_of_error(read, 0.0)
            with _silent():
                options = replace(combination.options, custom_rules=read.options.custom_rules, batch=read.options.batch)
                document = self.plan(lay_out(read, options))
            return outcome_of_plan(document, _seconds(started))
        except TapError as error:
            return outcome_of_error(error, _seconds(started))
        except Exception as error:
            return failed_outcome(f"{type(error).__name__}: {' '.join(str(error).split())}", _seconds(started))

    def _bind(self, left: list[int]) -> None:
        """What several processes would do alike is done before there are several: graphs of the microbatch counts."""
        for number in left:
            combination = self.combinations[number]
            read, count = self._read(combination), combination.options.microbatches
            if isinstance(read, TapError) or combination.options.target is not None:
                continue
            with contextlib.suppress(TapError), _silent():
                counts = (1,) if count == "auto" else (1, count)
                if read.graph.batch % counts[-1] == 0:
                    _look_at(read, combination.options, counts)

    # -- what outcomes are kept by -----------------------------------------------------------------------------

    def _key(self, number: int) -> str:
        return _digest(_stored(self.combinations[number].options))

    def _inputs(self) -> Inputs:
        from importlib.metadata import version

        from tap_planner.cluster import cluster_to_json

        return Inputs(
            version=f"{version('tap-planner')}, ortools {version('ortools')}",
            model=self._file_digest,
            cluster=_digest(cluster_to_json(self.cluster)),
            options=_stored(self.request.options),
        )

    @property
    def _file_digest(self) -> str:
        return next(read.graph.file_sha256 for read in self.reads.values() if isinstance(read, PreparedSearch))


def _stored(options: PlanOptions) -> dict[str, object]:
    """Options as a plan stores them, and what they say of a loss that is not bound yet."""
    return {**options_to_json(options), "loss": options.loss, "loss_output": options.loss_output}


def _look_at(read: PreparedSearch, options: PlanOptions, counts: tuple[int, ...]) -> None:
    graphs = read.graphs.space(options.constraints).graphs
    for count in counts:
        graphs.index(count)
        graphs.hints(count)
        graphs.batch(count)


def _lost(answer: Lost) -> Outcome:
    return failed_outcome(f"two processes that planned it were lost ({how_ended(answer.exit_code)})")


def _seconds(started: float) -> float:
    return round(time.perf_counter() - started, 3)


def _digest(found: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(found, sort_keys=True).encode("ascii")).hexdigest()[:24]


def _models_kept() -> contextlib.AbstractContextManager[None]:
    from tap_planner.search import models_kept

    return models_kept(MODELS)


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What there is to note of one combination is said where it is planned by itself."""
    before, _log.disabled = _log.disabled, True
    try:
        yield
    finally:
        _log.disabled = before


def prepare_sweep(request: SweepRequest, cluster: Cluster, plan: Callable[[PreparedSearch], PlanDocument]) -> Sweep:
    """Read the model, once for each batch, and list the combinations.

    Args:
        request: what is asked.
        cluster: the devices.
        plan: plans one combination.

    Raises:
        TapError: model, cluster or options are wrong.
    """
    batches = request.grid.find("batch")
    reads: dict[int | None, PreparedSearch | TapError] = {}
    if batches is None:
        reads[None] = read_model(request.model, cluster, request.options)
    else:
        for batch in batches.sensible:
            options = replace(request.options, batch=int(batch))
            try:
                with _silent() if reads else contextlib.nullcontext():
                    reads[int(batch)] = read_model(request.model, cluster, options)
            except TapError as error:
                reads[int(batch)] = error
        failures = [error for error in reads.values() if isinstance(error, TapError)]
        if len(failures) == len(reads):
            raise failures[0]
    graphs = {
        batch: read if isinstance(read, TapError) else read.graphs.space().graphs for batch, read in reads.items()
    }
    found = combinations(request.grid, request.options, cluster.num_devices, graphs)
    return Sweep(request=request, cluster=cluster, reads=reads, combinations=found, plan=plan)
