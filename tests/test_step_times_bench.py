"""The benchmark of step times: rows are read, models are what ran, features cost what the planner predicts."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from tap_planner.plan import Overlap
from tests.bench.measured_steps import (
    FSDP,
    ITERATIONS,
    MEASUREMENTS,
    THROUGHPUT,
    MeasuredStep,
    Recompute,
    read_fsdp,
    read_iterations,
    read_throughput,
)
from tests.bench.megatron_gpt import GptShape, Kernels, gpt_model
from tests.bench.planned_steps import PlannedStep, plan_step
from tests.bench.step_choice import choice_rows, choices
from tests.bench.step_constants import Constants
from tests.bench.step_features import FeatureTable, features_of
from tests.bench.step_fit import refit
from tests.bench.step_times import main

SMALL = GptShape(hidden=256, heads=8, layers=2, seq=128, vocab=1024)


def _step(**changes: Any) -> MeasuredStep:
    return MeasuredStep(
        **{
            "table": ITERATIONS,
            "part": "",
            "label": "",
            "shape": SMALL,
            "device": "a100-sxm4-80gb",
            "tp": 2,
            "dp": 2,
            "micro_batch": 2,
            "global_batch": 16,
            "precision": "fp16",
            "measured_ns": 1,
            **changes,
        }
    )


def _parameters(shape: GptShape) -> int:
    count = 0
    for tensor in gpt_model(shape).graph.initializer:
        if tensor.external_data:
            size = 1
            for dim in tensor.dims:
                size *= dim
            count += size
    return count


def test_every_row_is_read() -> None:
    """388 rows of Megatron-DeepSpeed without pipeline: 360 on one node, half of them fitted on; six beyond eight tensor
    ranks; and 373 with one."""
    parts = [step.part for step in read_iterations(MEASUREMENTS)]
    found = {part: parts.count(part) for part in parts}
    assert found == {
        "1 node, 12 or 24 layers": 180,
        "1 node, other layers": 180,
        "64 devices": 18,
        "256 devices": 4,
        "tp > 8": 6,
        "1 node, pipeline": 360,
        "64 devices, pipeline": 3,
        "256 devices, pipeline": 10,
    }


@pytest.mark.parametrize(
    ("heads", "tp", "micro_batch", "is_fused"),
    [
        (16, 8, 1, False),
        (16, 8, 2, True),
        (16, 4, 1, True),
        (15, 1, 8, True),
        (15, 1, 2, False),
        (48, 16, 2, False),
        (48, 16, 4, True),
        (48, 8, 2, True),
        (48, 8, 1, False),
    ],
)
def test_softmax_is_fused_where_four_heads_fill_a_block(heads: int, tp: int, micro_batch: int, is_fused: bool) -> None:
    """Megatron's kernel takes a multiple of four heads times samples; fused attention needs none."""
    step = _step(shape=replace(SMALL, heads=heads, seq=1024), tp=tp, micro_batch=micro_batch)
    assert step.fused_softmax == is_fused
    assert replace(step, shape=replace(step.shape, kernels=Kernels.FLASH)).fused_softmax


@pytest.mark.parametrize(("seq", "is_fused"), [(16, False), (20, True), (2048, True), (2052, False)])
def test_softmax_is_fused_up_to_2048_keys(seq: int, is_fused: bool) -> None:
    """The kernel's limits."""
    assert _step(shape=replace(SMALL, seq=seq)).fused_softmax == is_fused


def test_rows_whose_softmax_is_not_fused() -> None:
    """One sample on eight tensor ranks of 16 heads, two on 16 of 48; none of Megatron-LM, of FSDP or in a pipeline."""
    of_deepspeed = [step for step in read_iterations(MEASUREMENTS) if not step.fused_softmax]
    found = [(step.shape.heads, step.tp, step.micro_batch, step.pp) for step in of_deepspeed]
    assert sorted(found) == [*[(16, 8, 1, 1)] * 16, (48, 16, 2, 1)]
    assert all(step.fused_softmax for read in (read_throughput, read_fsdp) for step in read(MEASUREMENTS))


def test_softmax_of_torch_is_five_kernels() -> None:
    """Cast, scale, mask, softmax and cast back in place of one; all else is as it was."""
    fused = [node.op_type for node in gpt_model(SMALL).graph.node]
    plain = [node.op_type for node in gpt_model(SMALL, fused_softmax=False).graph.node]
    kernels = ["ToFloat", "Scale", "Mask", "FloatSoftmax", "ToHalf"]
    assert [op for op in plain if op in kernels] == kernels * SMALL.layers
    assert [op for op in fused if op != "MaskedSoftmax"] == [op for op in plain if op not in kernels]
    assert fused.count("MaskedSoftmax") == SMALL.layers


def test_softmax_of_torch_moves_float32(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A score takes 6, 8, 8, 8 and 6 bytes each way, and the softmax reads its result backward, 4 more; fused they are
    4, and 6 backward."""
    step = _step(tp=8, dp=1, micro_batch=1, recompute=Recompute.NONE)
    assert not step.fused_softmax
    plain = _moved_bytes(plan_step(step, tmp_path))
    monkeypatch.setattr(GptShape, "fuses_softmax", lambda *_, **__: True)
    fused = _moved_bytes(plan_step(step, tmp_path))
    scores = step.microbatches * SMALL.layers * SMALL.seq**2
    assert [more - less for more, less in zip(plain, fused, strict=True)] == [scores * (36 - 4), scores * (40 - 6)]


def _moved_bytes(planned: PlannedStep) -> tuple[int, int]:
    """Forward and backward."""
    found = [0, 0]
    for (_, num_bytes, backward, _), count in features_of(planned).operators:
        found[backward] += num_bytes * count
    return found[0], found[1]


def test_throughput_rows_have_a_time() -> None:
    """Rows that name TFLOP/s instead of a time get the time of their FLOPs: 408.8 TFLOP/s on 48 devices."""
    steps = read_throughput(MEASUREMENTS)
    core = next(step for step in steps if step.num_devices == 48)
    flops = core.shape.training_flops(192, recompute=False)
    assert core.measured_ns / 1e9 == pytest.approx(flops / 48 / 408.8e12)
    assert [step.pp > 1 for step in steps].count(False) == 18
    assert len(steps) == 29


def test_a_step_of_fsdp_is_its_tokens_over_their_rate() -> None:
    """The table's own step time, which is derived as well, agrees; and its batch is micro-batch x accumulation."""
    with (MEASUREMENTS / FSDP).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for step, row in zip(read_fsdp(MEASUREMENTS), rows, strict=True):
        assert step.measured_ns / 1e9 == pytest.approx(float(row["step_time_s_derived"]), rel=2e-3)
        assert step.microbatches == int(row["grad_accum"])


def test_nodes_hold_the_devices_of_a_step() -> None:
    """Of 16 devices two nodes of eight, of four a part of one; 800 Gb/s leave a node of Megatron-DeepSpeed's."""
    sizes = {
        step.num_devices: tuple(level.size for level in step.cluster().levels) for step in read_iterations(MEASUREMENTS)
    }
    assert sizes == {2: (2, 1), 4: (4, 1), 8: (8, 1), 64: (8, 8), 256: (8, 32)}
    wide = next(step for step in read_iterations(MEASUREMENTS) if step.num_devices == 64).cluster()
    assert wide.levels[1].child_bandwidth_bytes_per_s == 100 * 10**9


@pytest.mark.parametrize("name", ["125m", "7b"])
def test_mpt_has_the_parameters_of_the_table(name: str) -> None:
    """The written model is the one that ran: the table counts its parameters."""
    with (MEASUREMENTS / FSDP).open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    for step, row in zip(read_fsdp(MEASUREMENTS), rows, strict=True):
        if row["model"] == name and row["seq"] == "2048":
            assert _parameters(step.shape) == int(row["num_params"])


def test_megatron_has_the_parameters_of_the_formula() -> None:
    """12 l h^2 (1 + 13 / 12h) + (V + s) h, and the last normalisation (Narayanan et al., SC'21, equation 2)."""
    h, n, s, v = 3072, 30, 2048, 51200
    shape = GptShape(hidden=h, heads=32, layers=n, seq=s, vocab=v)
    assert _parameters(shape) == 12 * n * h * h + 13 * n * h + (v + s) * h + 2 * h


@pytest.mark.parametrize(("tp", "dp"), [(1, 2), (2, 2), (4, 1)])
def test_flops_are_those_of_the_formula(tmp_path: Path, tp: int, dp: int) -> None:
    """All devices together do 96 B s l h^2 (1 + s / 6h + V / 16lh) FLOPs (Narayanan et al., SC'21, equation 3)."""
    step = _step(tp=tp, dp=dp)
    features = features_of(plan_step(step, tmp_path))
    flops = tp * dp * sum(flops * count for (flops, *_), count in features.operators)
    b, s, n, h, v = step.global_batch, SMALL.seq, SMALL.layers, SMALL.hidden, SMALL.vocab
    assert flops == 96 * b * s * n * h * h * (1 + Fraction(s, 6 * h) + Fraction(v, 16 * n * h))


def test_flash_attention_does_the_same_products(tmp_path: Path) -> None:
    """Fused attention does four products backward, as the unfused one does; without recomputation a layer does three
    passes."""
    step = _step(shape=replace(SMALL, kernels=Kernels.FLASH), tp=1, dp=4, zero=3, recompute=Recompute.NONE)
    features = features_of(plan_step(step, tmp_path))
    flops = 4 * sum(flops * count for (flops, *_), count in features.operators)
    assert flops == SMALL.training_flops(step.global_batch, recompute=False)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tp": 1, "dp": 4, "micro_batch": 1},
        {"tp": 4, "dp": 1},
        {"tp": 8, "dp": 1, "micro_batch": 1},
        {"tp": 4, "dp": 16, "micro_batch": 1, "links": "800 Gb/s a node"},
        {"sequence_parallel": True, "recompute": Recompute.SELECTIVE},
    ],
)
def test_features_cost_what_the_planner_predicts(tmp_path: Path, changes: dict[str, Any]) -> None:
    """A step taken apart and priced at the catalogue's constants is the planner's own prediction, up to rounding."""
    planned = plan_step(_step(**changes), tmp_path)
    table = FeatureTable([features_of(planned)])
    ns = table.compute_ns(planned.cluster.device) + table.collective_ns()
    assert float(ns[0]) == pytest.approx(planned.predicted_ns(), rel=1e-6)


def test_all_reduces_of_a_layer(tmp_path: Path) -> None:
    """Tensor parallelism reduces the residual stream twice a layer, forward, in recomputation and backward, once for
    the embedding and once for the output layer's gradient (Shoeybi et al., 2019, section 3)."""
    step = _step()
    features = features_of(plan_step(step, tmp_path))
    payload = step.micro_batch * SMALL.seq * SMALL.hidden * 2
    calls = {call: count for call, count in features.calls if call[:2] == ("all_reduce", (1,))}
    assert calls["all_reduce", (1,), payload] == step.microbatches * (6 * SMALL.layers + 2)


def test_an_assumed_micro_batch_is_halved_until_it_fits(tmp_path: Path) -> None:
    """Where the table does not say how many samples ran at once, it is as many as fit."""
    shape = GptShape(hidden=4096, heads=32, layers=2, seq=4096, vocab=51200)
    step = _step(shape=shape, tp=1, dp=2, micro_batch=64, global_batch=128, recompute=Recompute.NONE)
    assert not plan_step(step, tmp_path).fits
    planned = plan_step(replace(step, is_micro_batch_assumed=True), tmp_path)
    assert planned.fits
    assert planned.step.micro_batch in (1, 2, 4, 8, 16, 32)


def test_regret_is_what_the_choice_costs_as_measured() -> None:
    """Two groups: the prediction chooses a step that is 10 % slower than the best, the rule another; and the best."""
    slow, fast = _step(measured_ns=110), _step(measured_ns=100, tp=4, dp=1)
    other = _step(measured_ns=50, global_batch=32)
    wide = _step(measured_ns=40, global_batch=32, tp=1, dp=4)
    alone = _step(measured_ns=1, global_batch=64)
    found = choices([(slow, 1), (fast, 2), (other, 2), (wide, 1), (alone, 1)])
    assert [round(choice.regret, 6) for choice in found] == [0.1, 0.0]
    rows = choice_rows(found)
    assert [(row["within_5_percent"], row["mean_regret_percent"]) for row in rows] == [(50.0, 5.0), (50.0, 5.0)]


def test_measured_groups() -> None:
    """62 groups without pipeline, 74 with; how a step's softmax runs does not split them."""
    steps = read_iterations(MEASUREMENTS)
    found = choices([(step, step.measured_ns) for step in steps])
    assert len(found) == 74
    assert len(choices([(step, step.measured_ns) for step in steps if step.pp == 1])) == 62
    assert all(choice.regret == 0 for choice in found)
    one_node = [step for step in steps if step.num_devices == 8 and step.shape.layers == 12 and step.global_batch == 8]
    assert {step.fused_softmax for step in one_node} == {False, True}
    assert len(choices([(step, 1) for step in one_node])) == 1


def test_a_fit_finds_constants_again(tmp_path: Path) -> None:
    """Steps of small, of wide and of long models, which take what constants say, are fitted by those constants."""
    truth = Constants(
        backward_launch_ns=60_000,
        matrix_efficiency_permille=450,
        attention_efficiency_permille=300,
        memory_efficiency_permille=700,
    )
    wide = replace(SMALL, hidden=8192, heads=64, layers=1)
    long = replace(SMALL, seq=4096, layers=1)
    fused = replace(SMALL, seq=8192, layers=1, kernels=Kernels.FLASH)
    steps = [_step(shape=shape, tp=1, dp=2, micro_batch=4) for shape in (SMALL, wide, long, fused)]
    rows = []
    for step in steps:
        features = features_of(plan_step(step, tmp_path, {"a100": truth}))
        table = FeatureTable([features])
        ns = table.compute_ns(features.cluster.device) + table.collective_ns()
        rows.append((replace(step, measured_ns=round(float(ns[0]))), features))
    fitted = refit(rows, attention=True)["a100"]
    assert fitted.backward_launch_ns == pytest.approx(truth.backward_launch_ns, rel=0.05)
    assert fitted.matrix_efficiency_permille == pytest.approx(truth.matrix_efficiency_permille, rel=0.05)
    assert fitted.attention_efficiency_permille == pytest.approx(truth.attention_efficiency_permille, rel=0.05)
    assert fitted.memory_efficiency_permille == pytest.approx(truth.memory_efficiency_permille, rel=0.05)


def test_other_rows_of_the_same_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--data`` takes a folder with some of the tables, and any of their rows; the JSON holds what is printed."""
    with (MEASUREMENTS / ITERATIONS).open(encoding="utf-8") as file:
        lines = file.readlines()
    chosen = [line for line in lines if line.startswith("multi,3.6,64,512,8,") and ",2,32,1," in line]
    (tmp_path / ITERATIONS).write_text("".join([lines[0], *chosen]), encoding="utf-8")
    path = tmp_path / "steps.json"
    result = main(["--data", str(tmp_path), "--json", str(path), "--rows"])
    assert json.loads(path.read_text(encoding="utf-8")) == result
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert row["measured_ms"] == 3975.2
    assert f" {row['predicted_ms']} " in capsys.readouterr().out


def sampled(folder: Path, name: str, every: int, keep: Callable[[dict[str, str]], bool] = lambda row: True) -> None:
    """Some rows of a table, spread over it."""
    with (MEASUREMENTS / name).open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if keep(row)]
    with (folder / name).open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[::every])


@pytest.mark.full
def test_steps_are_predicted_as_measured(tmp_path: Path) -> None:
    """At the catalogue's constants a sample of the rows that they are not fitted on is within the limits, and none is
    called out of memory; the benchmark does all rows."""
    sampled(tmp_path, ITERATIONS, 9, lambda row: row["pp"] == "1" and row["layers"] in ("16", "20", "30"))
    sampled(tmp_path, FSDP, 6)
    sampled(tmp_path, THROUGHPUT, 4, lambda row: row["pp"] == "1")
    result = main(["--data", str(tmp_path)])
    summary: Any = result["summary"]
    rows = {(row["table"], row["part"]): row for row in summary}
    assert rows[ITERATIONS.removesuffix(".csv"), "1 node, other layers"]["MAPE"] <= 8
    assert all(row["out_of_memory"] == 0 for row in summary)
    of_fsdp = [row for (table, part), row in rows.items() if table == FSDP.removesuffix(".csv") and "node" in part]
    assert of_fsdp and all(row["median"] <= 15 for row in of_fsdp)


@pytest.mark.full
def test_megatron_core_hides_its_communication(tmp_path: Path) -> None:
    """Its published steps, with and without pipeline, are predicted within 10 % where it hides what its flags say, and
    none of those with tensor parallelism is where nothing runs behind products."""
    steps = [step for step in read_throughput(MEASUREMENTS) if "Core" in step.part]
    assert [step.num_devices for step in steps] == [48, 192, 768, 2304, 6144]
    for step in steps:
        planned = plan_step(step, tmp_path)
        assert planned.predicted_ns() == pytest.approx(step.measured_ns, rel=0.1)
        waiting = replace(planned, step=replace(planned.step, overlap=Overlap.DATA))
        assert (waiting.predicted_ns() > 1.15 * step.measured_ns) == (step.tp > 1)
