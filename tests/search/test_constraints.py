"""Rules of the user: every plan of the space keeps them, and what cannot be kept is said."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.errors import InfeasibleError, UsageError
from tap_planner.folding import FoldedGraph, fold
from tap_planner.graph import Graph, Operator
from tap_planner.operators import rule_of
from tap_planner.plan import Constraint, Decisions, PlanOptions, PlanRequest, parse_rule, replicate_rule
from tap_planner.requests import PreparedSearch
from tap_planner.search import (
    MicrobatchGraphs,
    NoStrategyError,
    Roles,
    SearchResult,
    StrategyFilter,
    search,
    search_parts,
)
from tap_planner.sharding import block_hints, enumerate_strategies

pytestmark = pytest.mark.usefixtures("without_buffers")

DATA = Path(__file__).parents[1] / "data"
GPT = "hm_gpt_tiny"


def fix(text: str) -> Constraint:
    """A rule of ``--fix``."""
    return parse_rule(text, origin="--fix")


def forbid(text: str) -> Constraint:
    """A rule of ``--forbid``."""
    return parse_rule(text, forbid=True, origin="--forbid")


def replicate(pattern: str) -> Constraint:
    """A rule of ``--replicate``."""
    return replicate_rule(pattern, origin="--replicate")


def prepared(
    *rules: Constraint,
    model: str = GPT,
    cluster: str = "2x2:a100-sxm4-80gb",
    mesh: str | None = "dp=2,tp=2",
    **options: object,
) -> PreparedSearch:
    """A search of a small model, on four devices."""
    given = {"batch": 8, "dims": {"seq": 16}, "precision": "fp32", "loss": "mean", "zero": 0, "recompute": "none"}
    made = PlanOptions(constraints=rules, mesh=mesh, **{**given, **options})  # pyright: ignore[reportArgumentType]
    request = PlanRequest(model=DATA / f"{model}.onnx", cluster=cluster, options=made)
    return api.prepare_search(request)


def found(*rules: Constraint, **options: object) -> SearchResult:
    """The best plan under rules."""
    return search_parts(prepared(*rules, **options).requests, search)  # pyright: ignore[reportArgumentType]


def strategies(result: SearchResult, axis: str = "tp") -> dict[str, str]:
    """Per operator its choice on an axis."""
    number = result.mesh.names.index(axis)
    return {operator.id: operator.strategy[number] for operator in result.decisions.operators}


def readers(graph: Graph, ending: str) -> Iterator[Operator]:
    """Operators that read a parameter whose name ends so."""
    for operator in graph.operators:
        reads = [graph.tensors[name].read for name in operator.inputs if name is not None]
        if any(read is not None and read.parameter.endswith(ending) for read in reads):
            yield operator


def placements(decisions: Decisions, part: str) -> list[str]:
    """Placements of the parameters in whose names ``part`` occurs, all axes of all of them."""
    chosen = [p for p in decisions.parameters if part in p.name]
    assert chosen, part
    return [str(placement) for parameter in chosen for placement in parameter.placement]


# -- what rules do -----------------------------------------------------------------------------------------------


def test_a_bare_axis_splits_the_weights_that_are_named() -> None:
    """``--fix 'layers.*.mlp.*: tp'`` splits every weight of every MLP along tp; without it none is here."""
    free, fixed = found(), found(fix("layers.*.mlp.*: tp"))
    weights = (".mlp.c_fc.weight", ".mlp.c_proj.weight")
    for ending in weights:
        assert set(placements(free.decisions, ending)) == {"R"}
        chosen = [p for p in fixed.decisions.parameters if p.name.endswith(ending)]
        assert len(chosen) == 2 and all(p.placement[1].is_shard for p in chosen)
    assert fixed.objective_ns > free.objective_ns


def test_forbid_is_the_negation() -> None:
    """What a fixed rule makes optimal, the forbidden one takes away, and nothing else."""
    fixed = found(fix("layers.*.mlp.*: tp"))
    assert found(fix("layers.*.mlp.*: tp"), forbid("c_fc.weight: tp=row")).objective_ns == fixed.objective_ns
    forbidden = found(forbid("layers.*.mlp.*: tp"), forbid("layers.*.mlp.*: dp"))
    assert set(placements(forbidden.decisions, ".mlp.")) == {"R"}
    assert forbidden.objective_ns == found().objective_ns


@pytest.mark.parametrize(
    ("rule", "ending", "choice"),
    [
        ("mlp.c_fc.weight: tp=column", ".mlp.c_fc.weight", "n"),
        ("mlp.c_fc.weight: tp=row", ".mlp.c_fc.weight", "k"),
        ("mlp.c_fc.weight: tp=n", ".mlp.c_fc.weight", "n"),
        ("mlp.c_fc.weight: tp=sequence", ".mlp.c_fc.weight", "m"),
        ("mlp.c_fc.weight: tp=batch", ".mlp.c_fc.weight", "b0"),
        ("mlp.c_fc.weight: tp=none", ".mlp.c_fc.weight", "none"),
        ("wpe.weight: tp=vocabulary", ".wpe.weight", "v"),
        ("wpe.weight: tp=column", ".wpe.weight", "e0"),
        ("c_fc.bias: tp", ".mlp.c_fc.bias", "d2"),
    ],
)
def test_values(rule: str, ending: str, choice: str) -> None:
    """Each readable name is the factor that the operator's own rule says it is."""
    result = found(fix(rule))
    chosen = strategies(result)
    read = list(readers(result.folded.graph, ending))
    assert read and {chosen[operator.id] for operator in read} == {choice}


def test_alternatives() -> None:
    """Values with | between them: one of them."""
    result = found(fix("mlp.*.weight: tp=row|column"))
    chosen = strategies(result)
    read = [*readers(result.folded.graph, ".c_fc.weight"), *readers(result.folded.graph, ".c_proj.weight")]
    assert {chosen[operator.id] for operator in read} <= {"n", "k"}


def test_types_name_operators() -> None:
    """A pattern that is an operator type speaks of all products, with and without weights."""
    chosen = strategies(found(fix("MatMul: tp"), mesh="dp=2,tp=2"))
    graph = prepared().graph
    products = [operator.id for operator in graph.operators if operator.type == "MatMul"]
    assert products and all(chosen[name] not in ("none", "partial") for name in products)


def test_replicate_keeps_parameters_whole() -> None:
    """A replicated parameter is R on all axes, also where another rule wants all others split."""
    result = found(fix("layers.*.mlp.*: tp"), fix("embed_tokens.weight: tp"), replicate("wpe.weight"))
    assert set(placements(result.decisions, "wpe")) == {"R"}
    with pytest.raises(NoStrategyError, match=r"'wpe.weight:tp=column' and --replicate 'wpe.weight:replicate' exclude"):
        found(fix("wpe.weight: tp=column"), replicate("wpe.weight"))


def test_replicate_and_fix_a_tied_parameter() -> None:
    """A tied embedding, which two operators read, is stored as the rule says, and may be stored otherwise without."""
    split = found(fix("lm_head.weight: tp"), model="gpt2_tiny", max_memory_bytes="none")
    assert "R" not in placements(split.decisions, "lm_head")[1]
    whole = found(replicate("lm_head.weight"), model="gpt2_tiny", max_memory_bytes="none")
    assert set(placements(whole.decisions, "lm_head")) == {"R"}


def test_batch_rules() -> None:
    """``batch=dp``: where there are samples they are split along dp; also by however many microbatches."""
    result = found(fix("batch=dp"))
    roles = Roles(result.folded.graph)
    chosen = strategies(result, "dp")
    carrying = {o.id: roles.of(o, "batch") for o in result.folded.graph.operators if roles.of(o, "batch")}
    assert len(carrying) > 50 and all(chosen[name] in names for name, names in carrying.items())
    with pytest.raises(NoStrategyError, match="--fix 'batch=dp' leaves operator"):
        found(fix("batch=dp"), microbatches=8)


def test_a_rule_about_one_layer() -> None:
    """The layer is set apart in folding, keeps the rule, and the others do not."""
    free, ruled = prepared(), prepared(fix("layers.1.*: tp=none"), fix("layers.0.mlp.*: tp"))
    assert [run.count for run in free.request.folded(1).runs] == [2]
    assert ruled.request.folded(1).runs == ()
    result = search(ruled.request)
    chosen = strategies(result)
    inside = [name for name in chosen if ".layers.1" in name]
    assert len(inside) == 31 and {chosen[name] for name in inside} == {"none"}
    assert chosen["model.layers.0.mlp/MatMul_38"] in ("n", "k")


def test_a_layer_in_the_middle_cuts_the_run() -> None:
    """Of twelve layers a rule on the fourth leaves the three before it and the eight after it as runs."""
    options = {"model": "deep_gpt2_12", "batch": 2, "dims": {}}
    free = prepared(**options).request.folded(1)  # pyright: ignore[reportArgumentType]
    ruled = prepared(fix("h.3.mlp.*.weight: tp"), **options).request.folded(1)  # pyright: ignore[reportArgumentType]
    (run,) = free.runs
    assert run.count == 12
    assert [(part.period, part.count) for part in ruled.runs] == [(run.period, 3), (run.period, 8)]


def test_layers_under_rules_that_ask_the_same_fold() -> None:
    """Rules of their own that ask the same of every layer leave the runs as they are."""
    free, ruled = prepared(), prepared(fix("layers.0.mlp.*: tp"), fix("layers.1.mlp.*: tp"))
    assert ruled.request.folded(1).runs == free.request.folded(1).runs != ()


def test_layers_under_one_rule_still_fold() -> None:
    """Rules that are alike for all layers leave the runs as they are."""
    ruled = prepared(fix("layers.*: tp"), forbid("*.bias: tp"))
    assert ruled.request.folded(1).runs == fold(ruled.graph).runs


@pytest.mark.parametrize(
    "rules",
    [
        (fix("layers.1.*: tp=none"), fix("layers.0.mlp.*: tp")),
        (fix("layers.0.mlp.c_fc.weight: tp=column"), forbid("layers.1.*: tp=batch")),
        (fix("layers.*.mlp.*: tp"),),
    ],
)
def test_folding_under_rules_is_exact(rules: Sequence[Constraint]) -> None:
    """With rules on one layer, or on all, the answer is that of the graph in which nothing folds."""
    request = prepared(*rules, gap_basis_points=0).request
    graphs = MicrobatchGraphs(lambda count: FoldedGraph(graph=request.folded(count).graph, runs=()))
    unfolded = replace(request, graphs=graphs)
    assert search(request).objective_ns == search(unfolded).objective_ns


# -- the filter against plain enumeration ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rules",
    [
        (fix("layers.*: tp"),),
        (forbid("layers.*: tp=column|row"), fix("batch=dp")),
        (replicate("*.weight"),),
        (fix("MatMul: tp=sequence|head"), forbid("Softmax: dp=sequence")),
    ],
)
def test_the_filter_keeps_just_what_the_rules_say(rules: Sequence[Constraint]) -> None:
    """Choice by choice, what is left of each operator is what its demands allow, and what is left out is not."""
    made = prepared(*rules)
    graph, mesh = made.graph, made.request.meshes[0]
    strategy_filter = made.request.constraints(mesh, graph)
    hints = block_hints(graph)
    ruled = 0
    for operator in graph.operators:
        rule = rule_of(operator.signature)
        demands = strategy_filter.demands(operator)
        ruled += bool(demands)
        all_of_them = enumerate_strategies(
            operator.signature, rule, mesh.shape, hints[operator.id], [True] * len(operator.inputs)
        )
        for strategy in all_of_them:
            kept = True
            for demand, (axis, name) in itertools.product(demands, zip(mesh.names, strategy.names(rule), strict=True)):
                if demand.axis in (None, axis):
                    meant = name in demand.names or name.split("[")[0] in demand.bases
                    kept = kept and meant != demand.forbid
            assert strategy_filter.allows(operator, strategy, rule) == kept
            assert StrategyFilter().allows(operator, strategy, rule)
    assert ruled > 5


# -- what cannot be ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "says", "hint"),
    [
        ((fix("layers.*.mpl.*: tp"),), "no operator, parameter or tensor is called", "model.layers.*.mlp.c_fc.bias"),
        ((fix("MatMull: tp"),), "is called 'MatMull'", "'MatMul'"),
        ((replicate("c_fc.weigth"),), "no parameter is called 'c_fc.weigth'", "model.layers.*.mlp.c_fc.weight"),
        ((fix("layers.*: tp=colum"),), "none of which has colum (did you mean 'column'?)", ""),
        ((fix("LayerNormalization: tp=column"),), "they have none, batch, sequence", ""),
        ((fix("layers.*: pp"),), "names axis 'pp', the axes are dp, tp", "--mesh"),
        (
            (fix("embed_tokens.weight: tp=row"), forbid("embed_tokens.weight: tp=vocabulary")),
            "--fix 'embed_tokens.weight:tp=row' and --forbid 'embed_tokens.weight:tp!=vocabulary' exclude each other "
            "at operator 'model.embed_tokens/Gather_1' (Gather)",
            "Drop one of them.",
        ),
        (
            (fix("batch=tp"), fix("layers.*.mlp.*: tp"), fix("layers.*: dp=batch")),
            "--fix 'batch=tp' and --fix 'layers.*.mlp.*:tp' exclude each other",
            "Drop one of them.",
        ),
    ],
)
def test_wrong_rules(rules: Sequence[Constraint], says: str, hint: str) -> None:
    """Each names the rule, the value and a remedy; a pair that conflicts is named without the innocent."""
    with pytest.raises(UsageError) as error:
        found(*rules)
    assert says in error.value.message and hint in error.value.hint


def test_a_rule_that_leaves_nothing() -> None:
    """The operator and what it could have been are named: three heads cannot be split by four."""
    with pytest.raises(NoStrategyError) as error:
        found(fix("Softmax: tp=head"), fix("MatMul: tp"), mesh="tp=4")
    message = error.value.message
    assert "--fix 'Softmax:tp=head' leaves operator 'model.layers.0.self_attn/Softmax_30' (Softmax)" in message
    assert message.endswith("on the mesh tp=4: along tp it could be none, d0, d2")


def test_meshes_that_cannot_keep_the_rules_are_left_out() -> None:
    """Without --mesh only meshes with the axis, and on which sizes divide, are searched; with it the lack is said."""
    made = prepared(fix("layers.*.mlp.*: tp"), mesh=None)
    assert [str(mesh) for mesh in made.request.meshes] == ["dp=2,tp=2", "dp=2,tp=2/tp,dp"]
    wide = prepared(fix("Softmax: tp=head"), mesh=None, model="hm_llama_tiny", cluster="2x4:a100-sxm4-80gb")
    assert [str(mesh) for mesh in wide.request.meshes] == [
        *("dp=2,tp=4", "dp=4,tp=2"),
        *("dp=2,tp=4/tp,dp", "dp=4,tp=2/tp,dp"),
    ]
    with pytest.raises(UsageError, match="names axis 'tp', the axes are dp"):
        prepared(fix("layers.*.mlp.*: tp"), mesh="dp=4")


def test_a_rule_against_the_limit() -> None:
    """Infeasible with the rules, feasible without: the rule is named, and the innocent one is not."""
    made = prepared(replicate("*.weight"), replicate("*.bias"), max_memory_bytes=1_000_000)
    with pytest.raises(InfeasibleError) as error:
        api._plan(made, None)  # pyright: ignore[reportPrivateUsage]
    assert error.value.conflicts == ("--zero 0", "--replicate '*.weight:replicate'")
    assert "--zero 0 and --replicate '*.weight:replicate' each conflict with that limit" in error.value.message
    assert any(hint.startswith("Drop --replicate '*.weight:replicate'") for hint in error.value.hints)
    assert "*.bias" not in " ".join((error.value.message, *error.value.hints))
    assert error.value.least_memory_bytes > error.value.limit_bytes == 1_000_000


def test_rules_that_are_not_the_reason_are_not_blamed() -> None:
    """Where nothing fits anyway the answer is about the limit alone."""
    with pytest.raises(InfeasibleError) as error:
        api._plan(prepared(replicate("*.bias"), max_memory_bytes=200_000), None)  # pyright: ignore[reportPrivateUsage]
    assert "--replicate" not in error.value.message + error.value.hint
