"""Cases about operators: how each may be split, and that every split computes what another runtime did."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator

from tap_planner.graph import Graph, Operator
from tap_planner.operators import rule_of
from tap_planner.plan import OperatorDecision
from tap_planner.sharding import Strategy, block_hints, enumerate_strategies, local_indices
from tests.cases.running import (
    Case,
    Planned,
    assert_any_plan_runs_as_elsewhere,
    assert_equal_outputs,
    assert_runs_as_elsewhere,
    bound_graph,
    execute,
    random_plans,
)

PLAIN = (
    ("opset9_five", Case("batchnorm_training_outputs")),
    ("opset15_training", Case("batchnorm_training_outputs")),
    ("model", Case("com_microsoft_fused_ops")),
    ("model", Case("gather_negative_index")),
    ("model", Case("gqa_heads_28_kv4_tp8")),
    ("model", Case("ops_coupled_along_a_dim")),
    ("model", Case("rank0_scalars")),
    ("model", Case("reshape_needs_redistribution")),
    ("model", Case("reshape_zero_minus1_allowzero")),
    ("model", Case("symbolic_concat_expand")),
    ("model", Case("weights_in_constant_nodes")),
)


@pytest.mark.parametrize(("stem", "case"), PLAIN, ids=lambda value: value.name if isinstance(value, Case) else value)
def test_every_plan_computes_what_another_runtime_did(stem: str, case: Case, tmp_path: Path) -> None:
    """The best plan and random ones on 2x2 and 3 devices give the stored outputs."""
    planned = assert_runs_as_elsewhere(case, tmp_path, stem=stem)
    assert_any_plan_runs_as_elsewhere(case, planned, tmp_path, stem=stem)


def strategies(graph: Graph, operator_id: str, ranks: int) -> Iterator[Strategy]:
    """Every way to run an operator on an axis of so many devices."""
    operator = operator_of(graph, operator_id)
    rule = rule_of(operator.signature)
    partial = [name is not None and graph.tensors[name].read is None for name in operator.inputs]
    yield from enumerate_strategies(operator.signature, rule, (ranks,), block_hints(graph)[operator.id], partial)


def operator_of(graph: Graph, operator_id: str) -> Operator:
    """The operator whose first output has this name."""
    return next(operator for operator in graph.operators if operator.id == operator_id)


def decision_of(planned: Planned, operator_id: str) -> OperatorDecision:
    """The decision about an operator."""
    return next(decision for decision in planned.decisions.operators if decision.id == operator_id)


def placements(strategy: Strategy) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Placements of operands and results on the only axis."""
    return (
        tuple("-" if given is None else str(given[0]) for given in strategy.inputs),
        tuple(str(given[0]) for given in strategy.outputs),
    )


# -- what couples elements ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ["opset9_five", "opset15_training"])
def test_batch_statistics_forbid_a_split_of_the_batch(stem: str, tmp_path: Path) -> None:
    """Statistics over batch and space: only channels may be split."""
    case = Case("batchnorm_training_outputs")
    graph = bound_graph(case.plan(tmp_path, stem=stem).job())
    assert {placements(strategy)[1][0] for strategy in strategies(graph, "y", 2)} == {"R", "S(1)"}


def test_operators_are_not_split_along_what_they_couple(tmp_path: Path) -> None:
    """Softmax over dim 1, LayerNormalization over dim 2, CumSum along dim 1; the batch is free for all of them."""
    case = Case("ops_coupled_along_a_dim")
    planned = case.plan(tmp_path)
    graph = bound_graph(planned.job())
    for name, coupled in (("s", "S(1)"), ("y", "S(2)"), ("z", "S(1)")):
        found = {placements(strategy)[1][0] for strategy in strategies(graph, name, 2)}
        assert coupled not in found and "S(0)" in found, (name, found)
    pinned = case.plan(tmp_path, "--mesh", "dp=4", "--constraint", "a:dp=b0")
    assert not pinned.document.collectives
    assert all(str(o.outputs[0].placement[0]) == "S(0)" for o in pinned.decisions.operators)


def test_a_full_reduction_of_split_rows_is_summed(tmp_path: Path) -> None:
    """With x split by rows the mean is a sum over the ranks that divides once; the loss that is returned has no dims,
    and is whole: the rows come together for it, or their sums do."""
    case = Case("rank0_scalars")
    planned = case.plan(
        tmp_path, "--precision", "fp32", "--mesh", "dp=4", "--constraint", "m:dp!=none", "--constraint", "a:dp=d0"
    )
    operators = planned.operators
    assert operators[-1].outputs[0].shape == ()
    first = operators[0]
    assert first.type == "ReduceMean" and str(first.outputs[0].placement[0]) == "P(sum)"
    assert [entry.kind for entry in planned.document.collectives][-1] == "all_reduce"
    assert str(decision_of(planned, "loss__output").outputs[0].placement[0]) == "R"
    assert_equal_outputs(execute(planned.job(), case.inputs(tmp_path)), case.outputs())
    scalars = [output for operator in operators for output in operator.outputs if output.shape == ()]
    assert not any(placement.is_shard for output in scalars for placement in output.placement)


def test_a_reshape_across_split_columns_gathers_before(tmp_path: Path) -> None:
    """12x8 split by columns cannot become 16x6 split by rows: columns are brought together before ``reflow``."""
    case = Case("reshape_needs_redistribution")
    planned = case.plan(tmp_path, "--precision", "fp32", "--mesh", "tp=4", "--constraint", "a:tp=n")
    (first, *_) = planned.decisions.operators
    assert str(first.outputs[0].placement[0]) == "S(1)"
    reshape = next(o for o in planned.decisions.operators if o.type == "Reshape")
    (moved,) = (r for r in planned.decisions.redistributions if reshape.id in r.consumers)
    assert moved.tensor == first.id and [step.kind for step in moved.forward] in (["all_gather"], ["all_to_all"])
    assert reshape.inputs[0] is not None and str(reshape.inputs[0].placement[0]) != "S(1)"
    assert_equal_outputs(execute(planned.job(), case.inputs(tmp_path)), case.outputs())


# -- shapes ------------------------------------------------------------------------------------------------------


def test_reshape_targets(tmp_path: Path) -> None:
    """0 copies, -1 infers, allowzero makes 0 a size; the batch of 3 may still be split."""
    case = Case("reshape_zero_minus1_allowzero")
    planned = case.plan(tmp_path)
    shapes = {o.tensor: o.shape for operator in planned.decisions.operators for o in operator.outputs}
    assert shapes["b"] == (3, 4, 12) and shapes["z"] == (0, 2)
    graph = bound_graph(planned.job())
    assert "S(0)" in {placements(strategy)[1][0] for strategy in strategies(graph, "b", 3)}


def test_sizes_that_follow_from_others(tmp_path: Path) -> None:
    """past_len + seq is derived, not asked for; what nobody reads is dropped."""
    planned = Case("symbolic_concat_expand").plan(tmp_path)
    shapes = {o.tensor: o.shape for operator in planned.decisions.operators for o in operator.outputs}
    assert shapes["kv"] == shapes["y"] == (2, 8, 8)
    assert set(shapes) <= {"kv", "be", "y", "y__output"} and "total" not in planned.document.model.dims


def test_a_branch_chosen_by_an_input(tmp_path: Path) -> None:
    """Without the rate the error says what to give; with it the other branch, impossible here, does not matter."""
    case = Case("if_selected_by_input_value")
    case.attempt(tmp_path).refused(2, "'sr'", "--value sr=16000")
    planned = assert_runs_as_elsewhere(case, tmp_path, "--value", "sr=16000")
    assert planned.decisions.operators[-1].outputs[0].shape == (2, 2, 8)
    assert "If" not in {operator.type for operator in planned.decisions.operators}
    assert_any_plan_runs_as_elsewhere(case, planned, tmp_path)


SHAPES = Case("shape_from_data")


def test_a_shape_that_an_input_decides(tmp_path: Path) -> None:
    """The error names the node and offers the value; with it the plan computes what it should."""
    SHAPES.attempt(tmp_path, stem="reshape_input").refused(2, "dyn_reshape", "'shp'", "--value shp=")
    assert_runs_as_elsewhere(SHAPES, tmp_path, "--value", "shp=8,3", stem="reshape_input")


def test_a_shape_that_the_data_decide(tmp_path: Path) -> None:
    """The error names NonZero and asks for k; a plan for k elements says so and runs where there are as many."""
    SHAPES.attempt(tmp_path, stem="nonzero").refused(2, "'nz' (NonZero)", "--dim k=")
    planned = assert_runs_as_elsewhere(SHAPES, tmp_path, "--dim", "k=24", stem="nonzero")
    assert any("'nz'" in line and "24" in line for line in planned.done.warnings)
    other = SHAPES.plan(tmp_path, "--dim", "k=20", stem="nonzero")
    other.apply("--inputs", SHAPES.inputs(tmp_path, "nonzero")).refused(5, "nz", "24", "20")


def test_sequences_and_strings(tmp_path: Path) -> None:
    """A value that is no tensor of numbers is kept whole on every device, or refused by name and type."""
    case = Case("sequences_and_strings")
    done = case.attempt(tmp_path, stem="sequence")
    if done.code:
        done.refused(2, "'s'", "sequence")
    else:
        planned = case.plan(tmp_path, "--precision", "fp32", stem="sequence")
        x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
        np.savez(tmp_path / "inputs.npz", x=x)
        expected = ReferenceEvaluator(str(case.model("sequence"))).run(None, {"x": x})
        found = execute(planned.job(), tmp_path / "inputs.npz")
        assert_equal_outputs(found, dict(zip(("y", "e"), expected, strict=True)))  # pyright: ignore[reportArgumentType]
    planned = case.plan(tmp_path, "--dim", "n=4", "--constraint", "y:dp=e0", "--mesh", "dp=4", stem="strings")
    assert [operator.type for operator in planned.operators] == ["ai.onnx.ml::LabelEncoder", "Gather"]
    encoder, gather = planned.operators
    assert encoder.strategy == ("none",) and str(gather.outputs[0].placement[0]) == "S(1)"


# -- heads, tables, weights --------------------------------------------------------------------------------------

HEADS = Case("gqa_heads_28_kv4_tp8")


def _head_dim(strategy: OperatorDecision) -> int | None:
    """Which dim of the result is split, if any is."""
    (placement,) = strategy.outputs[0].placement
    return placement.dim if placement.is_shard else None


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_heads_that_do_not_divide_are_not_cut(mode: str, tmp_path: Path) -> None:
    """28 heads on 8 devices: the plan's JSON has every head whole on some device, and tap-plan says why."""
    planned = HEADS.plan(tmp_path, "--mesh", "tp=8", mode=mode)
    assert any("'q1' (Reshape)" in line and "28 is no multiple of 8" in line for line in planned.done.warnings)
    for name in ("q1", "q2", "k1", "v1", "sc", "p", "o0"):
        decision = decision_of(planned, name)
        assert decision.strategy == ("none",) or _head_dim(decision) in (None, 0), (name, decision.strategy)


@pytest.mark.parametrize("degree", [2, 4])
def test_heads_that_divide_are_split_whole(degree: int, tmp_path: Path) -> None:
    """On 2 and 4 devices query heads can be split; K and V of 4 heads as well, and the outputs stay the same."""
    options = ("--cluster", f"1x{degree}:a100-sxm4-80gb", "--mesh", f"tp={degree}", "--precision", "fp32")
    planned = HEADS.plan(tmp_path, *options, "--constraint", "q1:tp!=none", "--constraint", "sc:tp!=none")
    assert not any("no multiple" in line for line in planned.done.warnings)
    assert decision_of(planned, "q1").strategy != ("none",)
    assert_equal_outputs(execute(planned.job(), HEADS.inputs(tmp_path)), HEADS.outputs())


def test_free_search_takes_a_degree_that_divides(tmp_path: Path) -> None:
    """Left free, no head is cut: where heads are split, their number divides by the axis."""
    planned = HEADS.plan(tmp_path)
    for axis, size in enumerate(planned.mesh.values()):
        placement = decision_of(planned, "q2").outputs[0].placement[axis]
        assert not placement.is_shard or placement.dim != 1 or 28 % size == 0
        assert not placement.is_shard or placement.dim != 3, "a split inside a head"


TIED = Case("tied_embedding_vocab50257_tp8")


def test_an_odd_vocabulary_is_split_unevenly(tmp_path: Path) -> None:
    """Pinned to the vocabulary on 8 devices, the table is stored once, in parts of 6283 rows and a last of 6276."""
    options = ("--mesh", "tp=8", "--constraint", "logits:tp=n", "--max-memory", "300KiB")
    planned = TIED.plan(tmp_path, *options)
    (table,) = planned.decisions.parameters
    assert (table.name, table.shape, str(table.placement[0])) == ("emb", (50257, 16), "S(0)")
    rows = [len(local_indices(table.shape, table.placement, (8,), (rank,))[0]) for rank in range(8)]
    assert rows == [6283] * 7 + [6276]
    assert planned.document.predicted.memory_bytes["parameters"] == 6283 * 16 * 2
    logits = decision_of(planned, "logits").outputs[0]
    assert logits.shape == (2, 4, 50257) and str(logits.placement[0]) == "S(2)"
    gather = decision_of(planned, "h").inputs[0]
    assert gather is not None
    moved = [r for r in planned.decisions.redistributions if r.tensor == gather.tensor and "h" in r.consumers]
    assert gather.placement == table.placement or moved, "a copy for the Gather must be in the plan"
    verified = planned.apply("--init", "random", "--verify")
    assert verified.code == 0, verified.out + verified.err


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_tied_table_is_one_parameter(mode: str, tmp_path: Path) -> None:
    """Read by Gather and, transposed, by the last product, the table is stored and counted once, and trained once."""
    planned = TIED.plan(tmp_path, mode=mode)
    (table,) = planned.decisions.parameters
    assert table.trainable == (mode == "train")
    assert planned.document.predicted.memory_bytes["parameters"] <= 50257 * 16 * 2
    assert planned.apply("--init", "random", "--verify").code == 0


def test_weights_in_constant_nodes(tmp_path: Path) -> None:
    """Weights of Constant and ConstantOfShape are parameters, one of them read twice and counted once."""
    case = Case("weights_in_constant_nodes")
    planned = case.plan(tmp_path)
    assert [(p.name, p.shape) for p in planned.decisions.parameters] == [("w", (8, 16)), ("w2", (4, 4))]
    assert planned.document.predicted.memory_bytes["parameters"] == 2 * (8 * 16 + 4 * 4)
    assert [o.type for o in planned.operators] == ["MatMul", "Reshape", "MatMul", "MatMul"]
    split = case.plan(tmp_path, "--mesh", "dp=4", "--constraint", "a:dp=n", "--max-memory", "140B")
    assert split.decisions.parameters[0].placement[0].dim == 1 and split.decisions.parameters[0].placement[0].is_shard
    trained = case.plan(tmp_path, mode="train")
    assert all(parameter.trainable for parameter in trained.decisions.parameters)


def test_negative_indices_on_split_rows(tmp_path: Path) -> None:
    """-1 and -10 mean rows 9 and 0 on every one of 3 devices that hold rows; 10 and -11 are reported."""
    case = Case("gather_negative_index")
    planned = case.plan(tmp_path, "--precision", "fp32", "--mesh", "dp=3", "--max-memory", "130B")
    assert str(planned.decisions.parameters[0].placement[0]) == "S(0)"
    assert_equal_outputs(execute(planned.job(), case.inputs(tmp_path)), case.outputs())
    with np.load(case.inputs(tmp_path)) as stored:
        ids = stored["ids"]
    assert {-1, -10} <= set(ids.ravel().tolist())
    for wrong in (10, -11):
        np.savez(tmp_path / "wrong.npz", ids=np.where(ids == -1, wrong, ids))
        for plan in (planned, case.plan(tmp_path, "--precision", "fp32", "--mesh", "dp=3")):
            plan.apply("--inputs", tmp_path / "wrong.npz").refused(5, str(wrong), "10")


# -- quantised ---------------------------------------------------------------------------------------------------


def test_packed_weights(tmp_path: Path) -> None:
    """40 int4 are 20 bytes, 30 bfloat16 are 60; blocks of 4 rows stay whole and take their scales along."""
    case = Case("int4_bf16_sizes")
    planned = case.plan(tmp_path, "--mesh", "dp=4", "--constraint", "wd:dp=none")
    assert planned.document.predicted.memory_bytes["parameters"] <= 20 + 10 * 2 + 60
    graph = bound_graph(planned.job())
    assert {placements(s)[0] for s in strategies(graph, "wd", 2)} == {
        ("R", "R"),
        ("S(0)", "S(0)"),
        ("S(1)", "S(1)"),
    }
    for ranks in (4, 8):
        assert not any("S(0)" in placements(s)[0] for s in strategies(graph, "wd", ranks)), "a block would be cut"
    single = case.plan(tmp_path, "--cluster", "1x1:a100-sxm4-80gb")
    assert single.document.predicted.memory_bytes["parameters"] == 20 + 10 * 2 + 60


def test_packed_weights_split_anywhere_compute_the_same(tmp_path: Path) -> None:
    """Columns of int4, 5 over 2 devices, are packed anew for each: random plans give the closed form."""
    case = Case("int4_bf16_sizes")
    planned = case.plan(tmp_path, "--precision", "fp32")
    stored = {
        tensor.name: numpy_helper.to_array(tensor).astype(np.float32)
        for tensor in onnx.load(case.model()).graph.initializer
    }
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    expected = {"y": x @ (stored["w4"] * np.repeat(stored["s4"], 4, axis=0)) @ stored["wbf"]}
    jobs = (planned.job(), *random_plans(planned, ((2,), (3,), (2, 2)), 4))
    for job in jobs:
        assert_equal_outputs(execute(job, tmp_path / "inputs.npz"), expected)


def test_per_channel_scales_follow_their_channels(tmp_path: Path) -> None:
    """A byte an element for int8; scales and zero points split with the weight's channels, scalars stay whole."""
    case = Case("qdq_int8_per_channel")
    planned = case.plan(tmp_path)
    graph = bound_graph(planned.job())
    weights = next(
        o
        for o in graph.operators
        if o.type == "DequantizeLinear"
        and len(o.signature.inputs[0].shape) == 4  # type: ignore[union-attr]
        and graph.tensors[o.inputs[0] or ""].read is not None
    )
    found = {placements(strategy)[0] for strategy in strategies(graph, weights.id, 2)}
    assert ("S(0)", "S(0)", "S(0)") in found
    assert all(scale == zero == ("S(0)" if value == "S(0)" else "R") for value, scale, zero in found)
    for operator in graph.operators:
        if operator.type == "QuantizeLinear":
            assert all(placements(s)[0][1:] == ("R", "R") for s in strategies(graph, operator.id, 2))
    stored = {parameter.name: parameter for parameter in planned.decisions.parameters}
    assert stored["wq"].dtype == "int8"
    single = case.plan(tmp_path, "--cluster", "1x1:a100-sxm4-80gb")
    sizes = {"wq": 216, "wz": 8, "xz": 1, "ws": 16, "xs": 2, "bias": 16}
    assert single.document.predicted.memory_bytes["parameters"] == sum(sizes[name] for name in stored)


def test_quantised_convolution_computes_the_same(tmp_path: Path) -> None:
    """Best and random plans give the stored outputs up to one step of the output's scale, and nearly all exactly."""
    case = Case("qdq_int8_per_channel")
    planned = case.plan(tmp_path, "--precision", "fp32")
    inputs, (expected,) = case.inputs(tmp_path), case.outputs().values()
    steps = np.unique(np.abs(np.diff(np.unique(expected))).round(6))
    step = float(steps[steps > 0].min())
    for job in (planned.job(), *random_plans(planned, ((2, 2), (3,)), 4)):
        (found,) = execute(job, inputs).values()
        difference = np.abs(found - expected)
        assert difference.max() <= step * 1.01 and (difference > step / 2).mean() < 0.01


def test_fused_operators_are_split_by_heads_and_columns(tmp_path: Path) -> None:
    """com.microsoft::Attention splits its projection in three equal column groups, MatMulNBits along its columns."""
    planned = Case("com_microsoft_fused_ops").plan(tmp_path)
    shapes = {o.tensor: o.shape for operator in planned.decisions.operators for o in operator.outputs}
    assert {name: shapes[name] for name in ("att", "n", "f", "y")} == {
        "att": (2, 4, 16),
        "n": (2, 4, 16),
        "f": (2, 4, 32),
        "y": (2, 4, 16),
    }
    assert not any("not known" in line for line in planned.done.warnings)
    graph = bound_graph(planned.job())
    attention = {placements(strategy)[0] for strategy in strategies(graph, "att", 2)}
    assert any(given[1:3] == ("S(1, blocks=3)", "S(0, blocks=3)") for given in attention), attention
    packed = {placements(strategy) for strategy in strategies(graph, "y", 2)}
    assert any(given[1] == "S(0)" and made == ("S(2)",) for given, made in packed), packed


# -- random and unknown ------------------------------------------------------------------------------------------


def test_random_operators(tmp_path: Path) -> None:
    """Random nodes are named; their numbers (the file gives the seeds) are the same on every device where they are
    whole, differ by part where they are split, and do not depend on the split."""
    case = Case("random_ops")
    planned = case.plan(tmp_path, "--precision", "fp32")
    assert any("random" in line and "d" in line and "n" in line for line in planned.done.warnings)
    np.savez(tmp_path / "inputs.npz", x=np.zeros((8, 4), np.float32))
    (whole,) = execute(planned.job(), tmp_path / "inputs.npz").values()
    assert len(np.unique(whole)) == whole.size, "no two positions draw the same number"
    for job in random_plans(planned, ((2,), (2, 2), (3,)), 4):
        (found,) = execute(job, tmp_path / "inputs.npz").values()
        np.testing.assert_array_equal(found, whole)
    assert planned.apply("--verify").code == 0


def test_an_operator_that_nobody_knows(tmp_path: Path) -> None:
    """It is planned whole on every device, with a warning that names it; applying refuses, naming it too."""
    case = Case("unknown_custom_op")
    planned = case.plan(tmp_path, "--mesh", "dp=4", "--constraint", "a:dp=n")
    assert any("acme.ops::FlashThing" in line and "replicated" in line for line in planned.done.warnings)
    decision = decision_of(planned, "b")
    assert decision.strategy == ("none",) and str(decision.outputs[0].placement[0]) == "R"
    (operand,) = decision.inputs
    assert operand is not None and str(operand.placement[0]) == "R"
    assert [entry.kind for entry in planned.document.collectives] == ["all_gather"]
    planned.apply("--init", "random").refused(5, "acme.ops::FlashThing")
