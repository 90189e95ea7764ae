"""Placements as pipelines: verified against a single process, free of deadlock, as long as they were played."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import onnx.parser
import pytest

from tap_planner.apply import (
    ApplyJob,
    LockstepCommunicator,
    RandomWeights,
    apply_job,
    synthetic_inputs,
    verify_program,
)
from tap_planner.cluster import Cluster, load_cluster, parse_cluster
from tap_planner.device_placement import Built, PlacedPlan, place, placed_plan, play, priority_of, problem_of
from tap_planner.errors import ApplyError, UsageError
from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind, reordered
from tap_planner.operators import TRANSFER
from tap_planner.program import Phase, Send, lower, lower_plan
from tap_planner.schedule import check
from tap_planner.simulate import simulate
from tests.bench.traversal_orders import UNLIKE
from tests.graph.models import DATA, add_weight, data_model, saved

CLUSTER = load_cluster("1x3:l4")
BOX = parse_cluster(UNLIKE, file="box")
"""An A100, an L4 and a CPU core."""
DIMS = {"t5_tiny": {"seq": 8, "dec_seq": 6}, "gpt2_tiny": {"seq": 8}}
INCEPTION = """
inception (float[4, 3, 8, 8] x) => (float[4, 5] y)
{
  s = Conv<pads = [1, 1, 1, 1]>(x, stem)
  s0 = Relu(s)
  a = Conv(s0, a1)
  b0 = Conv(s0, b1)
  b = Conv<pads = [1, 1, 1, 1]>(b0, b2)
  c0 = Conv(s0, c1)
  c = Conv<pads = [2, 2, 2, 2]>(c0, c2)
  p = MaxPool<kernel_shape = [3, 3], pads = [1, 1, 1, 1]>(s0)
  d = Conv(p, d1)
  m = Concat<axis = 1>(a, b, c, d)
  m0 = Relu(m)
  e = Conv(m0, e1)
  f = Conv<pads = [1, 1, 1, 1]>(m0, f1)
  n = Concat<axis = 1>(e, f)
  g = GlobalAveragePool(n)
  h = Flatten(g)
  y = MatMul(h, head)
}
"""
"""Four ways and two ways that come together again, as in Inception."""
WEIGHTS = {
    "stem": (8, 3, 3, 3),
    **dict.fromkeys(("a1", "b1", "c1", "d1"), (4, 8, 1, 1)),
    "b2": (6, 4, 3, 3),
    "c2": (6, 4, 5, 5),
    "e1": (8, 20, 1, 1),
    "f1": (8, 20, 3, 3),
    "head": (16, 5),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """A model, bound, with what is placed of it."""

    model: Path
    options: BindOptions
    graph: Graph
    built: Built

    def plan(self, placement: Sequence[int], priority: Sequence[int]) -> PlacedPlan:
        """A placement, played and written as a plan."""
        return placed_plan(self.graph, self.built, placement, priority, precision="fp32")

    def drawn(self, seed: int) -> PlacedPlan:
        """Any placement, played in any order."""
        draw, problem = random.Random(seed), self.built.problem
        placement = [draw.randrange(problem.num_devices) for _ in range(problem.num_groups)]
        return self.plan(placement, draw.sample(range(problem.num_tasks), k=problem.num_tasks))


def case_of(model: ModelFile, path: Path, *, training: bool, cluster: Cluster = CLUSTER, **options: object) -> Case:
    """Bind a model with the loss's mean."""
    bound = BindOptions(
        training=training,
        ends=not training,
        loss=LossOptions(kind="mean"),
        **options,  # type: ignore[arg-type]
    )
    graph = bind(model, bound)
    built = problem_of(graph, cluster, precision="fp32", training=training)
    return Case(model=path, options=bound, graph=graph, built=built)


@functools.cache
def known(name: str, training: bool, cluster: Cluster = CLUSTER) -> Case:
    """A model of tests/data."""
    path = DATA / f"{name}.onnx"
    return case_of(data_model(name), path, training=training, cluster=cluster, batch=2, dims=DIMS.get(name, {}))


@pytest.fixture(scope="module")
def inception(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Trained."""
    folder = tmp_path_factory.mktemp("inception")
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\n{INCEPTION}')
    for name, shape in WEIGHTS.items():
        add_weight(model, name, shape)
    return case_of(saved(folder, model), folder / "model.onnx", training=True)


def check_verifies(case: Case, found: PlacedPlan) -> None:
    """Outputs, gradients and updated parameters are those of a single process."""
    report = verify_program(
        lower(found.graph, found.decisions),
        LockstepCommunicator((), num_stages=len(found.devices)),
        RandomWeights(case.graph),
        synthetic_inputs(case.graph),
        reference_graph=case.graph,
    )
    assert report is not None
    assert report.passed, "\n".join(report.lines())


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["t5_tiny", "unet_tiny", "gpt2_tiny"])
def test_any_placement_verifies(name: str, training: bool) -> None:
    """Every operator somewhere: what is tied is summed, what is read far away is sent, forward and backward."""
    case = known(name, training)
    check_verifies(case, case.drawn(1))


@pytest.mark.full
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["t5_tiny", "unet_tiny", "gshard_moe_tiny", "dlrm_tiny", "resnet_small", "vit_tiny"])
@pytest.mark.parametrize("seed", range(2, 5))
def test_many_placements_verify(name: str, training: bool, seed: int) -> None:
    """The same of more models and placements."""
    case = known(name, training)
    check_verifies(case, case.drawn(seed))


@pytest.mark.parametrize("seed", range(4))
def test_branches_verify(seed: int, inception: Case) -> None:
    """A network of branches, each somewhere."""
    check_verifies(inception, inception.drawn(seed))


@pytest.mark.parametrize("name", ["inception", pytest.param("t5_tiny", marks=pytest.mark.full), "unet_tiny"])
def test_placed_models_verify_in_processes(name: str, request: pytest.FixtureRequest) -> None:
    """What ``place`` finds on three devices, on three gloo processes."""
    case = request.getfixturevalue("inception") if name == "inception" else known(name, True)
    placing = place(case.built.problem, evaluations=50)
    found = next(tried for tried in placing.tries if len(set(tried.placement)) == 3)
    plan = case.plan(found.placement, placing.priority)
    assert len(plan.devices) == 3 and any(
        isinstance(part, Send) and part.peer is not None for part in lower(plan.graph, plan.decisions).microbatch
    )
    job = ApplyJob(
        model=case.model,
        options=case.options,
        decisions=plan.decisions,
        graph_digest=case.graph.digest,
        random_weights=True,
        verify=True,
    )
    result = apply_job(job, num_processes=3)
    assert result is not None and result.report is not None
    assert result.report.passed, "\n".join(result.report.lines())


@pytest.mark.parametrize(
    ("cluster", "training", "share"),
    [(CLUSTER, False, 0.01), (BOX, False, 0.01), (CLUSTER, True, 0.02), (BOX, True, 0.25)],
    ids=["infer", "infer-unlike", "train", "train-unlike"],
)
@pytest.mark.parametrize("name", ["t5_tiny", "unet_tiny", "gpt2_tiny"])
def test_steps_take_what_was_played(name: str, training: bool, share: float, cluster: Cluster) -> None:
    """The simulator, which knows nothing of tasks, takes about as long for the program as was played; more or less in
    training, where gradients are summed before they are sent, and a program updates parameters at the end of its step,
    where a slow device was played to do so while it waited."""
    case = known(name, training, cluster)
    placing = place(case.built.problem, evaluations=50)
    found = next(tried for tried in placing.tries if len(set(tried.placement)) == 3)
    priority = priority_of(case.built.problem, found)
    played = play(case.built.problem, found.placement, priority).makespan_ns
    plan = case.plan(found.placement, priority)
    step = simulate(lower(plan.graph, plan.decisions), cluster, devices=plan.devices).step_ns
    assert step == pytest.approx(played, rel=share)


@pytest.mark.parametrize("seed", range(20))
def test_chunks_wait_at_their_ends_alone(seed: int, inception: Case) -> None:
    """Only the first operator of a chunk reads what other devices make, and only the last makes what they read; the
    schedule says so, and no device waits for ever."""
    found = inception.drawn(seed)
    pipeline = found.decisions.pipeline
    assert pipeline is not None
    check(pipeline.schedule)
    bounds = [*pipeline.chunks, len(found.graph.operators)]
    operators = [found.graph.operators[begin:end] for begin, end in pairwise(bounds)]
    chunk_of = {name: number for number, own in enumerate(operators) for each in own for name in each.outputs}
    for number, own in enumerate(operators):
        first = next(position for position, each in enumerate(own) if each.type != TRANSFER)
        wanted = {name for each in own[first + 1 :] for name in each.inputs} - {*own[first].inputs}
        for transfer in own[:first]:
            (name,) = transfer.inputs
            assert name is not None and chunk_of[name] in pipeline.schedule.reads[number]
            if pipeline.stage_of(chunk_of[name]) != pipeline.stage_of(number):
                assert not wanted & {*transfer.outputs}
                assert name in operators[chunk_of[name]][-1].outputs


@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", ["t5_tiny", "unet_tiny", "gpt2_tiny"])
@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_sent_twice_to_a_device(name: str, training: bool, seed: int) -> None:
    """However many chunks of it read a tensor; and its gradient comes back once, as a sum."""
    found = known(name, training).drawn(seed)
    program = lower(found.graph, found.decisions)
    makers = {output: each for each in found.graph.operators for output in each.outputs}
    sent = Counter[tuple[str, str | None, int]]()
    copies = Counter[tuple[str | None, int]]()
    for number, chunk in enumerate(program.chunks):
        for part in (*chunk.forward, *chunk.backward):
            if isinstance(part, Send) and part.peer is not None:
                (name_of,) = found.graph.operators[part.operator].inputs
                assert name_of is not None and makers[name_of].type != TRANSFER
                reader = program.stage_of(number) if part.phase is Phase.BACKWARD else part.peer
                sent[part.phase.value, name_of, reader] += 1
            elif isinstance(part, Send) and part.phase is Phase.FORWARD:
                copies[found.graph.operators[part.operator].inputs[0], program.stage_of(number)] += 1
    assert sent and set(sent.values()) == {1}
    assert copies, "no chunk takes what another one of its device has got or made: nothing is tested"


LATE = """
late (float[4, 8] x) => (float[4, 8] y, float[4, 8] z)
{
  y = MatMul(x, w0)
  a = MatMul(x, w1)
  b = MatMul(a, w2)
  z = MatMul(b, w3)
}
"""
"""The loss is of ``y``, and ``z`` is made long after it."""


def test_the_loss_is_last(tmp_path: Path) -> None:
    """Whatever is played after it, and on whatever device: readers of graphs know it by its place."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20]>\n{LATE}')
    for number in range(4):
        add_weight(model, f"w{number}", (8, 8))
    case = case_of(saved(tmp_path, model), tmp_path / "model.onnx", training=True)
    problem = case.built.problem
    for seed in range(8):
        found = case.drawn(seed)
        assert found.graph.operators[-1].type == "Loss"
        check_verifies(case, found)
    late = [int(case.graph.operators[members[0]].id in ("a", "b", "z")) for members in case.built.operators]
    found = case.plan(late, range(problem.num_tasks))
    assert found.graph.operators[-1].type == "Loss" and len(found.devices) == 2
    check_verifies(case, found)
    late_ids = [*(operator.id for operator in case.graph.operators if operator.id != "z"), "z"]
    with pytest.raises(UsageError, match="'z' comes after the loss"):
        reordered(case.graph, late_ids)


def test_one_device_is_no_pipeline(inception: Case) -> None:
    """All on one device: one stage, nothing sent."""
    problem = inception.built.problem
    found = inception.plan((2,) * problem.num_groups, range(problem.num_tasks))
    assert found.decisions.pipeline is None and found.devices == (2,)
    check_verifies(inception, found)


def test_plans_of_other_models_are_refused(inception: Case) -> None:
    """Operators that are not the graph's, or in an order in which they cannot run."""
    found = inception.drawn(0)
    with pytest.raises(ApplyError, match="made for another model"):
        lower_plan(known("gpt2_tiny", True).graph, found.decisions)
    ids = [operator.id for operator in inception.graph.operators]
    with pytest.raises(UsageError, match="comes before what makes"):
        reordered(inception.graph, ids[::-1])
    with pytest.raises(UsageError, match=f"expected all {len(ids)}"):
        reordered(inception.graph, ids[1:])
    assert reordered(inception.graph, ids) is inception.graph
