"""Random points of the space on real models: execution equals the single process, collectives equal the plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import pytest

from tap_planner.apply import (
    LockstepCommunicator,
    RandomWeights,
    VerificationReport,
    synthetic_inputs,
    verify_program,
)
from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.plan import Decisions
from tap_planner.program import lower
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the settings of its plan."""

    model: str
    batch: int = 4
    dims: Mapping[str, int] = field(default_factory=dict)
    loss: str = "mean"
    microbatches: int = 1
    zero: int | None = 0
    """None: another level and other axes for each region."""
    recompute: str = "none"
    optimizer: str = "adamw"
    training: bool = True

    def graph(self, batch: int) -> Graph:
        """The model bound with a batch."""
        options = BindOptions(
            batch=batch,
            dims=self.dims,
            training=self.training,
            loss=LossOptions(kind=self.loss),  # type: ignore[arg-type]
        )
        return bind(data_model(self.model), options)

    def decisions(self, mesh_shape: tuple[int, ...], seed: int) -> Decisions:
        """A random plan."""
        return RandomPlan(
            self.graph(self.batch // self.microbatches),
            mesh_shape,
            seed,
            zero=self.zero,
            recompute=self.recompute,
            microbatches=self.microbatches,
            optimizer=self.optimizer,
            loss_kind=self.loss,
        ).build()

    def verify(self, decisions: Decisions) -> VerificationReport:
        """Verify a plan in lockstep."""
        whole = self.graph(self.batch)
        program = lower(self.graph(self.batch // self.microbatches), decisions)
        report = verify_program(
            program,
            LockstepCommunicator(decisions.mesh_shape),
            RandomWeights(whole),
            synthetic_inputs(whole),
            reference_graph=whole,
        )
        assert report is not None
        return report


_SEQ = {"seq": 8}
_UNEVEN = {"seq": 7}
_GPT2 = Case(model="gpt2_tiny", dims=_SEQ, loss="cross-entropy")
_MODELS = (
    _GPT2,
    Case(model="gpt2_tiny", batch=5, dims=_UNEVEN),
    Case(model="bert_tiny", dims=_SEQ),
    Case(model="llama_tiny", dims=_SEQ),
    Case(model="t5_tiny", dims={"seq": 8, "dec_seq": 6}),
    Case(model="vit_tiny"),
    Case(model="resnet_small"),
    Case(model="gshard_moe_tiny"),
    Case(model="hm_mixtral_tiny", dims=_SEQ),
)
_MESHES = ((2, 2), (2, 4), (1, 8))


def _id(case: Case) -> str:
    parts = [case.model, case.loss, f"b{case.batch}", f"m{case.microbatches}", f"z{case.zero}", case.recompute]
    return "-".join(parts)


def _assert_passed(report: VerificationReport) -> None:
    assert report.passed, "\n".join(report.lines())


@pytest.mark.parametrize("mesh_shape", _MESHES, ids=str)
@pytest.mark.parametrize("case", _MODELS, ids=_id)
def test_random_points(case: Case, mesh_shape: tuple[int, ...]) -> None:
    """Random points of the space verify."""
    for seed in range(2):
        _assert_passed(case.verify(case.decisions(mesh_shape, seed)))


@pytest.mark.full
@pytest.mark.parametrize("mesh_shape", _MESHES, ids=str)
@pytest.mark.parametrize("case", _MODELS, ids=_id)
def test_twenty_random_points(case: Case, mesh_shape: tuple[int, ...]) -> None:
    """Twenty random points of the space verify."""
    for seed in range(2, 22):
        _assert_passed(case.verify(case.decisions(mesh_shape, seed)))


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_settings(zero: int, microbatches: int, recompute: str) -> None:
    """Every ZeRO level verifies with microbatches and recompute."""
    case = replace(_GPT2, zero=zero, microbatches=microbatches, recompute=recompute)
    for seed in range(2):
        _assert_passed(case.verify(case.decisions((2, 2), seed)))


@pytest.mark.parametrize("loss", ["mean", "sum", "cross-entropy"])
def test_losses(loss: str) -> None:
    """Each kind of loss keeps its global meaning under microbatches and uneven shards, with plain SGD."""
    case = replace(_GPT2, batch=6, dims=_UNEVEN, loss=loss, microbatches=2, optimizer="sgd")
    for seed in range(3):
        _assert_passed(case.verify(case.decisions((2, 2), seed)))


def test_inference() -> None:
    """A plan for inference verifies its outputs and has no gradients."""
    case = replace(_GPT2, training=False, loss="mean")
    report = case.verify(case.decisions((2, 4), 0))
    _assert_passed(report)
    assert {row.what.split()[0] for row in report.comparisons} == {"output"}


def test_report_counts_what_it_compared() -> None:
    """The report holds a comparison for every parameter, and its summary says how many agree."""
    report = _GPT2.verify(_GPT2.decisions((2, 2), 0))
    kinds = [row.what.split()[0] for row in report.comparisons]
    assert (kinds.count("gradient"), kinds.count("parameter"), kinds.count("loss")) == (28, 28, 1)
    assert report.lines()[2].startswith("gradient: 28 of 28 equal")
    assert report.num_collectives > 0 and report.largest_gradient > 1e-6


# Faults that verification must find -----------------------------------------------------------------------------


def _gradient_reduction(decisions: Decisions) -> Decisions:
    """The gradient of one redistribution stays partial: its all-reduce is left out."""
    index = next(
        i
        for i, r in enumerate(decisions.redistributions)
        if any(step.kind == "all_reduce" for step in r.backward) and r.forward == ()
    )
    changed = list(decisions.redistributions)
    steps = tuple(step for step in changed[index].backward if step.kind != "all_reduce")
    changed[index] = replace(changed[index], backward=steps)
    return replace(decisions, redistributions=tuple(changed))


def _bucket_size(decisions: Decisions) -> Decisions:
    """The plan states another size of a bucket than its parameters have."""
    first = decisions.buckets[0]
    changed = replace(first, elements=first.elements + 1)
    return replace(decisions, buckets=(changed, *decisions.buckets[1:]))


def _unreduced_parameter(decisions: Decisions) -> Decisions:
    """A parameter's gradient is partial but in no bucket."""
    first = decisions.buckets[0]
    if len(first.parameters) < 2:
        raise StopIteration
    name = first.parameters[0]
    parameters = tuple(replace(p, bucket=None) if p.name == name else p for p in decisions.parameters)
    return replace(
        decisions,
        parameters=parameters,
        buckets=(replace(first, parameters=first.parameters[1:]), *decisions.buckets[1:]),
    )


@pytest.mark.parametrize(
    ("fault", "expected"),
    [
        (_gradient_reduction, "gradient "),
        (_bucket_size, "collective all_reduce"),
        (_unreduced_parameter, "gradient "),
    ],
)
def test_faults_are_found(fault, expected: str) -> None:  # type: ignore[no-untyped-def]
    """A plan whose execution differs does not verify, and the finding names what differs."""
    for seed in range(10):
        decisions = _GPT2.decisions((2, 2), seed)
        try:
            faulty = fault(decisions)
        except (StopIteration, IndexError):
            continue
        report = _GPT2.verify(faulty)
        assert not report.passed
        assert any(finding.startswith(expected) for finding in report.findings), report.findings
        return
    pytest.fail("no random plan allows this fault")


def test_microbatches_need_the_whole_graph() -> None:
    """Without the graph of the global batch a plan with microbatches is refused."""
    case = replace(_GPT2, microbatches=2)
    program = lower(case.graph(2), case.decisions((2, 2), 0))
    whole = case.graph(4)
    with pytest.raises(ApplyError, match="global batch"):
        verify_program(program, LockstepCommunicator((2, 2)), RandomWeights(whole), synthetic_inputs(whole))
