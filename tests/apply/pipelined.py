"""Random plans with a pipeline: the model cut at random operators, a schedule by name, verified in lockstep."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from tap_planner.apply import (
    ApplyJob,
    LockstepCommunicator,
    RandomWeights,
    VerificationReport,
    synthetic_inputs,
    verify_program,
)
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.plan import Decisions
from tap_planner.program import Program, lower_plan
from tap_planner.schedule import PipelineSchedule, make_schedule
from tests.apply.random_plans import RandomPlan, cut_at_random
from tests.graph.models import DATA, data_model
from tests.schedule.pipelines import random_schedule


@dataclass(frozen=True, kw_only=True)
class Pipelined:
    """A model, its pipeline and the settings of its plan."""

    model: str = "gpt2_tiny"
    dims: Mapping[str, int] = field(default_factory=lambda: {"seq": 8})
    loss: str = "mean"
    schedule: str = "1f1b"
    stages: int = 2
    chunks: int | None = None
    """Of each stage."""
    microbatches: int = 4
    mesh: tuple[int, ...] = (2,)
    """Of each stage."""
    zero: int | None = 0
    recompute: str = "none"
    training: bool = True
    scatter: tuple[int, ...] = ()
    """Axes along which transfers are shared out."""
    seed_of_order: int | None = None
    """Of an order that is drawn (``random_schedule``), in place of a schedule by name; see ``drawn``."""

    def __str__(self) -> str:
        mesh = "x".join(map(str, self.mesh))
        stages = f"{self.stages}s" + ("" if self.chunks is None else f"{self.chunks}c")
        shared = "".join(f"-s{axis}" for axis in self.scatter)
        if self.seed_of_order is not None:
            return f"{self.model}-drawn{self.seed_of_order}-{mesh}-z{self.zero}-{self.recompute}"
        settings = f"z{self.zero}-{self.recompute}{shared}"
        return f"{self.model}-{self.schedule}-{stages}-m{self.microbatches}-{mesh}-{settings}"

    @property
    def order(self) -> PipelineSchedule:
        """The schedule."""
        if self.seed_of_order is not None:
            return random_schedule(self.seed_of_order, chain=True)
        return make_schedule(self.schedule, self.stages, self.microbatches, self.chunks)

    @property
    def options(self) -> BindOptions:
        """With the global batch: two samples a microbatch."""
        return BindOptions(
            batch=2 * self.microbatches,
            dims=self.dims,
            training=self.training,
            ends=not self.training,
            loss=LossOptions(kind=self.loss),  # type: ignore[arg-type]
        )

    def graph(self, microbatches: int = 1) -> Graph:
        """The model bound with a part of the global batch, not cut."""
        return _bound(
            self.model, tuple(self.dims.items()), self.loss, self.training, self.options.batch // microbatches
        )

    def decisions(self, seed: int) -> Decisions:
        """A random plan."""
        cut, pipeline = cut_at_random(self.graph(self.microbatches), self.order, seed)
        return RandomPlan(
            cut,
            self.mesh,
            seed,
            zero=self.zero,
            recompute=self.recompute,
            microbatches=self.microbatches,
            loss_kind=self.loss,
            pipeline=replace(pipeline, scatter_axes=self.scatter),
        ).build()

    def program(self, seed: int) -> Program:
        """A random plan, lowered."""
        return lower_plan(self.graph(self.microbatches), self.decisions(seed))

    def verify(self, program: Program) -> VerificationReport:
        """Verify a plan in lockstep."""
        whole = self.graph()
        report = verify_program(
            program,
            LockstepCommunicator(self.mesh, num_stages=self.stages),
            RandomWeights(whole),
            synthetic_inputs(whole),
            reference_graph=whole,
        )
        assert report is not None
        return report

    def job(self, seed: int) -> ApplyJob:
        """A job that verifies a random plan."""
        return ApplyJob(
            model=DATA / f"{self.model}.onnx",
            options=self.options,
            decisions=self.decisions(seed),
            graph_digest=self.graph().digest,
            random_weights=True,
            verify=True,
        )


def drawn(seed: int, case: Pipelined) -> Pipelined:
    """A case in an order that is drawn, with as many stages and microbatches as that has."""
    order = random_schedule(seed, chain=True)
    return replace(case, stages=order.num_stages, microbatches=order.num_microbatches, seed_of_order=seed)


@functools.cache
def _bound(model: str, dims: tuple[tuple[str, int], ...], loss: str, training: bool, batch: int) -> Graph:
    options = BindOptions(
        batch=batch,
        dims=dict(dims),
        training=training,
        ends=not training,
        loss=LossOptions(kind=loss),  # type: ignore[arg-type]
    )
    return bind(data_model(model), options)
