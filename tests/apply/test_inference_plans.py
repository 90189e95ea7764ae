"""Plans for inference run: outputs and caches are those of a single process, wherever they lie between steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tap_planner import api
from tap_planner.apply import LockstepCommunicator, RandomWeights, synthetic_inputs, verify_program
from tap_planner.graph import BindOptions, Graph, bind
from tap_planner.plan import ApplyRequest, Constraint, PlanOptions, PlanRequest, Verdict, read_plan, to_text, write_plan
from tap_planner.program import Redistribute, collectives, lower
from tests.apply.random_plans import RandomPlan
from tests.graph.decoders import decoder_step
from tests.graph.models import DATA, data_model, saved

SMALL: dict[str, Any] = {"layers": 2, "d": 64, "heads": 8, "kv_heads": 4, "ff": 96, "vocabulary": 48}
DECODE = DATA / "llama_decode_tiny.onnx"


def decoder(folder: Path, name: str) -> Graph:
    """A decoder bound for inference."""
    if name == "llama_decode_tiny":
        return bind(data_model(name), BindOptions(batch=4, dims={"past": 7}, ends=True))
    file = saved(folder, decoder_step(**SMALL, caches=name))
    return bind(file, BindOptions(batch=4, dims={"past": 7}, ends=True))


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(2, 12))])
@pytest.mark.parametrize("mesh_shape", [(2, 2), (4,)], ids=str)
@pytest.mark.parametrize("name", ["llama_decode_tiny", "attention", "concat"])
def test_random_plans(name: str, mesh_shape: tuple[int, ...], seed: int, tmp_path: Path) -> None:
    """Any strategies, any storage of the caches: outputs and collectives are as they should be."""
    graph = decoder(tmp_path, name)
    decisions = RandomPlan(graph, mesh_shape, seed).build()
    program = lower(graph, decisions)
    report = verify_program(program, LockstepCommunicator(mesh_shape), RandomWeights(graph), synthetic_inputs(graph))
    assert report is not None and report.passed, "\n".join(report.lines() if report else ())
    assert len(report.comparisons) == 5


def test_caches_are_moved_where_they_are_read(tmp_path: Path) -> None:
    """Some random plan stores a cache in another placement than it is read in: the Program brings it there."""
    graph = decoder(tmp_path, "concat")
    for seed in range(20):
        program = lower(graph, RandomPlan(graph, (2, 2), seed).build())
        moved = [
            program.decisions.redistributions[instruction.redistribution].tensor
            for instruction in program.microbatch
            if isinstance(instruction, Redistribute)
        ]
        if any(name in graph.caches for name in moved) and collectives(program):
            return
    pytest.fail("no plan moves a cache")


def planned(folder: Path, cluster: str, mesh: str, *constraints: str, batch: int = 4) -> Path:
    """Write the optimal plan of a decoder's step."""
    options = PlanOptions(
        mode="infer",
        batch=batch,
        dims={"past": 7},
        mesh=mesh,
        constraints=tuple(Constraint(kind="batch", axis=axis, forbid=True) for axis in constraints),
    )
    path = folder / "plan.json"
    write_plan(path, api.make_plan(PlanRequest(model=DECODE, cluster=cluster, options=options)))
    return path


def verified(plan: Path, processes: int | None = None) -> api.ApplyOutcome:
    """Apply a plan with random weights and compare with a single process."""
    return api.apply_plan(ApplyRequest(plan=plan, model=DECODE, nproc=processes, init_random=True, verify=True))


@pytest.mark.parametrize(
    ("cluster", "mesh", "constraints"),
    [
        ("2x2:cpu-core", "dp=2,tp=2", ("tp",)),
        pytest.param("1x4:cpu-core", "tp=4", ("tp",), marks=pytest.mark.full),
        pytest.param("1x4:cpu-core", "tp=4", (), marks=pytest.mark.full),
    ],
)
def test_optimum_in_lockstep(cluster: str, mesh: str, constraints: tuple[str, ...], tmp_path: Path) -> None:
    """The optimal plan of a real export is read back as it was written, and runs."""
    path = planned(tmp_path, cluster, mesh, *constraints)
    assert to_text(read_plan(path)) == path.read_text()
    outcome = verified(path)
    assert outcome.passed, "\n".join(outcome.lines())
    assert outcome.lines()[0].startswith("output: 5 of 5 equal")


@pytest.mark.full
@pytest.mark.parametrize("constraints", [(), ("tp",)], ids=["free", "batch!=tp"])
def test_optimum_on_four_processes(constraints: tuple[str, ...], tmp_path: Path) -> None:
    """The same on four gloo processes."""
    outcome = verified(planned(tmp_path, "2x2:cpu-core", "dp=2,tp=2", *constraints), processes=4)
    assert outcome.passed, "\n".join(outcome.lines())


def test_planned_again_nothing_changes(tmp_path: Path) -> None:
    """A plan for inference is what its own options give again."""
    path = planned(tmp_path, "1x4:h100-sxm5-80gb", "dp=2,tp=2")
    assert api.check_plan(read_plan(path), DECODE, "1x4:h100-sxm5-80gb").verdict is Verdict.IDENTICAL


def test_what_the_plan_says_of_caches() -> None:
    """At real sizes each of eight devices holds the keys and values of one key head: 131072 positions of width 128, in
    eight layers, two bytes each."""
    options = PlanOptions(mode="infer", batch=1, dims={"past": 131071}, mesh="tp=8")
    model = DATA / "hm_llama3_8b_decode_8l.onnx"
    predicted = api.make_plan(PlanRequest(model=model, cluster="1x8:h100-sxm5-80gb", options=options)).predicted
    assert predicted.tokens == 1
    assert list(predicted.memory_bytes) == ["parameters", "caches", "inputs", "outputs", "workspace"]
    assert predicted.memory_bytes["caches"] == 2 * 8 * 131072 * 128 * 2
