"""From model file to verified execution: the optimum with the mesh fixed, in lockstep and on processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.operators import rule_of
from tap_planner.plan import ApplyRequest, Constraint, PlanOptions, PlanRequest, write_plan
from tap_planner.sharding import block_hints, enumerate_strategies
from tests.apply.random_plans import RandomPlan
from tests.apply.test_verify import Case

DATA = Path(__file__).parent / "data"
DIMS = {
    "gpt2_tiny": {"seq": 16},
    "llama_tiny": {"seq": 16},
    "resnet_small": {},
    "t5_tiny": {"seq": 16, "dec_seq": 8},
    "gshard_moe_tiny": {},
}
"""The models of the end-to-end checks, with the dims that they leave open."""


def planned(model: str, mesh: str, folder: Path, **options: object) -> Path:
    """Write the optimal plan of a model on CPU cores with a fixed mesh."""
    devices = 1
    for axis in mesh.split(","):
        devices *= int(axis.partition("=")[2])
    request = PlanRequest(
        model=DATA / f"{model}.onnx",
        cluster=f"1x{devices}:cpu-core",
        options=PlanOptions(batch=8, dims=DIMS[model], precision="fp32", mesh=mesh, **options),  # type: ignore[arg-type]
    )
    path = folder / "plan.json"
    write_plan(path, api.make_plan(request))
    return path


def verified(model: str, plan: Path, processes: int | None = None) -> api.ApplyOutcome:
    """Apply a plan with random weights and compare with a single process."""
    request = ApplyRequest(
        plan=plan, model=DATA / f"{model}.onnx", nproc=processes, init_random=True, verify=True, seed=3
    )
    return api.apply_plan(request)


NO_BATCH_ON_TP = (Constraint(kind="batch", axis="tp", forbid=True),)


@pytest.mark.full
@pytest.mark.parametrize("constraints", [(), NO_BATCH_ON_TP], ids=["free", "batch!=tp"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=2", "dp=2,tp=4", "dp=1,tp=8"])
@pytest.mark.parametrize("model", list(DIMS))
def test_optimum_in_lockstep(model: str, mesh: str, constraints: tuple[Constraint, ...], tmp_path: Path) -> None:
    """The optimal plan runs: outputs, loss, gradients, updated parameters and collectives are as they should be."""
    outcome = verified(model, planned(model, mesh, tmp_path, constraints=constraints))
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.parametrize("model", ["gpt2_tiny", "resnet_small"])
def test_optimum_in_lockstep_quickly(model: str, tmp_path: Path) -> None:
    """The same for two models on 2x2, in the quick tests."""
    outcome = verified(model, planned(model, "dp=2,tp=2", tmp_path, constraints=NO_BATCH_ON_TP))
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.full
@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("model", list(DIMS))
def test_optimum_on_four_processes(model: str, zero: int, tmp_path: Path) -> None:
    """The optimal plan with tensor parallelism runs on four gloo processes, plain and with ZeRO 3."""
    plan = planned(model, "dp=2,tp=2", tmp_path, constraints=NO_BATCH_ON_TP, zero=zero)
    outcome = verified(model, plan, processes=4)
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.full
@pytest.mark.parametrize(
    "settings", [{"zero": 2, "microbatches": 2}, {"recompute": "full", "microbatches": 4}], ids=str
)
@pytest.mark.parametrize("model", list(DIMS))
def test_optimum_with_settings(model: str, settings: dict[str, object], tmp_path: Path) -> None:
    """Microbatches with ZeRO 2 and with recomputation run where the model allows them."""
    plan = planned(model, "dp=2,tp=2", tmp_path, constraints=NO_BATCH_ON_TP, **settings)
    outcome = verified(model, plan)
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.full
@pytest.mark.parametrize("model", list(DIMS))
def test_random_points_meet_every_kind_of_strategy(model: str) -> None:
    """The twenty random points per mesh that are executed (tests/apply/test_verify.py) hold every factor, ``none`` and
    every linear way of each operator type that the model's space has on these meshes."""
    case = Case(model=model, batch=4, dims=dict.fromkeys(DIMS[model], 8))
    graph = case.graph(case.batch)
    hints = block_hints(graph)
    wanted: set[tuple[str, str]] = set()
    met: set[tuple[str, str]] = set()
    for mesh_shape in ((2, 2), (2, 4), (1, 8)):
        for operator in graph.operators:
            rule = rule_of(operator.signature)
            partial = [name is not None and graph.tensors[name].read is None for name in operator.inputs]
            for strategy in enumerate_strategies(operator.signature, rule, mesh_shape, hints[operator.id], partial):
                wanted.update((operator.type, name.partition("[")[0]) for name in strategy.names(rule))
        for seed in range(2, 22):
            for operator in RandomPlan(graph, mesh_shape, seed).build().operators:
                met.update((operator.type, name.partition("[")[0]) for name in operator.strategy)
    assert wanted <= met, sorted(wanted - met)
