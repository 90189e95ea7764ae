"""``--target``: only plans that a framework can express, checked by the names that its users know."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import UsageError
from tap_planner.folding import fold
from tap_planner.operators import rule_of
from tap_planner.plan import TARGETS as NAMES
from tap_planner.plan import PlanOptions, PlanRequest, parse_rule
from tap_planner.requests import PreparedSearch
from tap_planner.search import TARGETS, NoStrategyError, SearchResult, search, search_parts

DATA = Path(__file__).parents[1] / "data"
CLUSTER = "2x2:a100-sxm4-80gb"
COLUMN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "c_fc", "w1", "w3")
ROW = ("o_proj", "down_proj", "c_proj", "w2")


def prepared(target: str | None, model: str = "hm_llama_tiny", **options: object) -> PreparedSearch:
    """A search of a small model on four devices for a framework."""
    given = {"batch": 8, "dims": {"seq": 16}, "precision": "fp32", "loss": "cross-entropy", "max_memory_bytes": "none"}
    made = PlanOptions(target=target, **{**given, **options})  # pyright: ignore[reportArgumentType]
    return api.prepare_search(PlanRequest(model=DATA / f"{model}.onnx", cluster=CLUSTER, options=made))


def found(made: PreparedSearch) -> SearchResult:
    """The best plan of all parts of the space."""
    return search_parts(made.requests, search)


def stored(result: SearchResult, axis: str) -> dict[str, str]:
    """Per parameter its placement on an axis."""
    number = result.mesh.names.index(axis)
    return {parameter.name: str(parameter.placement[number]) for parameter in result.decisions.parameters}


def style(name: str) -> str:
    """What Megatron and torchtitan do to a weight that is stored [in, out] on tp."""
    part = name.removesuffix(".weight").rpartition(".")[2]
    if name.endswith("embed_tokens.weight") or part in ROW:
        return "S(0)"
    return "S(1)" if part in (*COLUMN, "lm_head") else "R"


def assert_expressible(result: SearchResult, axis_of_samples: str | None = "dp") -> None:
    """No sums are passed on, nothing is split unevenly, and every operator that has samples splits them along dp."""
    graph = result.folded.graph
    sizes = dict(zip(result.mesh.names, result.mesh.shape, strict=True))
    for operator, decided in zip(graph.operators, result.decisions.operators, strict=True):
        rule = rule_of(operator.signature)
        assert "partial" not in " ".join(decided.strategy), operator.id
        for factor in rule.factors:
            split = [axis for axis, choice in zip(sizes, decided.strategy, strict=True) if choice == factor.name]
            parts = 1
            for axis in split:
                parts *= sizes[axis]
            assert factor.size % parts == 0, operator.id
        if axis_of_samples is not None and operator.signature.outputs[0].shape[:1] == (graph.batch,):
            output = decided.outputs[0].placement[result.mesh.names.index(axis_of_samples)]
            assert str(output) == "S(0)", operator.id


def test_names_agree() -> None:
    """The option, the plan and the search know the same frameworks."""
    assert tuple(TARGETS) == NAMES


@pytest.mark.parametrize("target", NAMES)
@pytest.mark.parametrize("model", ["hm_llama_tiny", "gpt2_tiny"])
def test_a_plan_that_only_the_target_excludes(target: str, model: str) -> None:
    """On one mesh the free search finds a plan that the framework has not, and with the target a dearer one."""
    mesh = "dp=2,tp=2" if model == "hm_llama_tiny" or target in ("deepspeed", "transformers") else "dp=4"
    free = found(prepared(None, model, mesh=mesh))
    made = prepared(target, model, mesh=mesh)
    bound = found(made)
    assert free.objective_ns < bound.objective_ns and free.bound_ns <= free.objective_ns
    assert_expressible(bound)
    graph = made.graph
    rules = [request.constraints(free.mesh, graph) for request in made.requests]
    broken = [
        operator.id
        for operator, decided in zip(graph.operators, free.decisions.operators, strict=True)
        for strategy_filter in rules
        if not all(d.is_kept(strategy_filter.axes, decided.strategy) for d in strategy_filter.demands(operator))
    ]
    assert broken


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_tensor_parallelism_of_the_whole_model(target: str) -> None:
    """With tp every weight is split as these frameworks do, norms and biases are whole."""
    result = found(prepared(target, mesh="dp=2,tp=2", zero=0, recompute="none"))
    for name, placement in stored(result, "tp").items():
        assert placement == style(name), name
    assert set(stored(result, "dp").values()) == {"R"}
    assert_expressible(result)


@pytest.mark.parametrize("target", NAMES)
def test_layers_still_fold(target: str) -> None:
    """What a framework demands is alike in all layers: runs are as without it."""
    made = prepared(target, "deep_llama_12", batch=2, dims={}, mesh="dp=2,tp=2")
    free = fold(made.graph).runs
    assert [run.count for run in free] == [12]
    assert all(request.folded(1).runs == free for request in made.requests)


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_sequence_parallelism_is_one_switch(target: str) -> None:
    """The parts of the space with and without it: norms and residuals are all alike; the better is taken."""
    made = prepared(target, mesh="dp=2,tp=2", zero=0, recompute="none")
    results = [search(request) for request in made.requests]
    assert len(results) == 2
    for result, choice in zip(results, ("none", "d1"), strict=True):
        chosen = {
            decided.strategy[1]
            for decided in result.decisions.operators
            if "layernorm" in decided.id or decided.id.startswith(("model.layers.0/Add", "model.layers.1/Add"))
        }
        assert chosen == {choice}
    best = found(made)
    assert best.objective_ns == min(result.objective_ns for result in results)
    assert best.bound_ns <= min(result.bound_ns for result in results)


def test_deepspeed_splits_linear_layers_only() -> None:
    """AutoTP: embedding, norms and loss are whole on tp; a weight is whole or, as a rule may ask, split."""
    rules = (parse_rule("layers.*.mlp.*: tp", origin="--fix"),)
    result = found(prepared("deepspeed", mesh="tp=4", constraints=rules))
    placements = stored(result, "tp")
    assert placements["model.embed_tokens.weight"] == "R"
    assert {placement for name, placement in placements.items() if "norm" in name} == {"R"}
    assert all(placement == style(name) for name, placement in placements.items() if ".mlp." in name)
    assert result.decisions.operators[-1].strategy == ("none",)
    assert_expressible(result, None)


def test_ulysses() -> None:
    """On DeepSpeed's sp sequences are split, attention by heads, and weights are whole."""
    result = found(prepared("deepspeed", mesh="dp=2,sp=2"))
    assert set(stored(result, "sp").values()) == {"R"}
    chosen = {decided.id: decided.strategy[1] for decided in result.decisions.operators}
    assert chosen["model.layers.0.self_attn/MatMul_56"] == "b1"
    assert chosen["model.layers.0.mlp/MatMul_72"] == "m" and chosen["model.layers.0/Add_64"] == "d1"


@pytest.mark.parametrize("target", ["megatron", "torchtitan"])
def test_context_parallelism(target: str) -> None:
    """On cp every operator with a sequence splits it, attention by its queries."""
    result = found(prepared(target, mesh="dp=2,cp=2"))
    chosen = {decided.id: decided.strategy[1] for decided in result.decisions.operators}
    assert chosen["model.layers.0.self_attn/MatMul_56"] == "m" and chosen["model.layers.0.self_attn/MatMul_60"] == "m"
    assert chosen["model.layers.0.mlp/MatMul_72"] == "m" and chosen["model.layers.0/Add_64"] == "d1"
    assert set(stored(result, "cp").values()) == {"R"}


def test_routers_are_whole_and_experts_spread() -> None:
    """Megatron's routers are not split along tp, experts' weights are."""
    result = found(prepared("megatron", "hm_mixtral_tiny", mesh="dp=2,tp=2"))
    placements = stored(result, "tp")
    assert {placements[name] for name in placements if "mlp.gate" in name} == {"R"}
    assert all(placements[name] != "R" for name in placements if ".experts." in name)


def test_sizes_must_divide() -> None:
    """A vocabulary of 101 has no tensor parallelism in Megatron; the meshes that are left have none."""
    with pytest.raises(NoStrategyError) as error:
        prepared("megatron", "hm_gpt_tiny", mesh="dp=2,tp=2")
    assert "--target megatron leaves operator 'model.embed_tokens/Gather_1' (Gather) no strategy" in error.value.message
    assert "v (unevenly)" in error.value.message
    made = prepared("megatron", "hm_gpt_tiny", max_axes=3)
    assert [str(mesh) for request in made.requests for mesh in request.meshes] == ["dp=4", "cp=4", "dp=2,cp=2"]


def test_heads_must_divide() -> None:
    """Two key/value heads cannot go to four tensor ranks (the recipes that torchtitan PR #4016 corrected)."""
    with pytest.raises(NoStrategyError, match=r"--target torchtitan leaves operator 'model\.layers\.0\.self_attn"):
        prepared("torchtitan", "hm_llama_tiny", mesh="tp=4")


@pytest.mark.parametrize(
    ("target", "levels"),
    [
        ("megatron", [(0, 1), (0, 1), (0, 1)]),
        ("torchtitan", [(0, 2, 3), (0, 2, 3), (0, 2, 3)]),
        ("deepspeed", [(0, 1, 2, 3), (0, 1, 2)]),
        ("transformers", [(0, 2, 3)]),
    ],
)
def test_zero_levels(target: str, levels: list[tuple[int, ...]]) -> None:
    """Each framework's own, in training; recompute and ZeRO are one setting."""
    made = prepared(target)
    assert [request.zero_levels for request in made.requests] == levels
    assert all(request.uniform_settings for request in made.requests)
    assert not prepared(None).request.uniform_settings
    tensor = [any("tp" in mesh.names for mesh in request.meshes) for request in made.requests]
    assert tensor == [True] if target == "transformers" else tensor == [False, *[True] * (len(levels) - 1)]


@pytest.mark.parametrize(
    ("target", "options", "says"),
    [
        ("megatron", {"zero": 3}, "--zero 3: --target megatron has ZeRO 0, 1"),
        ("torchtitan", {"zero": 1}, "--zero 1: --target torchtitan has ZeRO 0, 2, 3"),
        ("transformers", {"recompute": "selective"}, "--recompute selective: --target transformers has none, full"),
        ("megatron", {"mesh": "dp=2,a=2"}, "--target megatron: the mesh dp=2,a=2 has an axis 'a'"),
        ("megatron", {"mesh": "tp=2,dp=2"}, "--target megatron has no mesh tp=2,dp=2"),
        ("transformers", {"mesh": "dp=2,cp=2"}, "has an axis 'cp'"),
        ("deepspeed", {"mesh": "dp=2,tp=2", "zero": 3}, "has no mesh that keeps the rules"),
    ],
)
def test_what_a_framework_has_not(target: str, options: dict[str, object], says: str) -> None:
    """Options and meshes that a framework has not are errors that say what it has."""
    with pytest.raises(UsageError) as error:
        prepared(target, **options)  # pyright: ignore[reportArgumentType]
    assert says in error.value.message and error.value.hint
