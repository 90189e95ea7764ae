"""Random plans of quantised models: whatever is split, execution equals the single process."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest

from tap_planner.apply import LockstepCommunicator, RandomWeights, synthetic_inputs, verify_program
from tap_planner.apply.weights import StoredWeights
from tap_planner.graph import BindOptions, Graph, LossOptions, WeightReader, bind, load_model
from tap_planner.operators import rule_of
from tap_planner.plan import Decisions
from tap_planner.program import lower
from tap_planner.sharding import enumerate_strategies
from tests.apply.lockstep_runs import verified
from tests.apply.random_plans import RandomPlan
from tests.graph.models import DATA, saved

_MODELS = ("bert_tiny_int8dyn", "hm_llama_tiny_int4nbits", "hm_mixtral_tiny_int4nbits")
_CASES = ("qdq_int8_per_channel", "int4_bf16_sizes")
_SEEDS = (0, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full))


def _bound(path: Path, *, training: bool, **dims: int) -> Graph:
    options = BindOptions(batch=4, dims=dims, training=training, loss=LossOptions(kind="mean"))
    return bind(load_model(path), options)


def _verified(graph: Graph, mesh_shape: tuple[int, ...], seed: int) -> Decisions:
    decisions = RandomPlan(graph, mesh_shape, seed, loss_kind="mean").build()
    report = verified(graph, decisions)
    assert report.passed, "\n".join(report.lines())
    return decisions


@pytest.mark.parametrize("seed", _SEEDS)
@pytest.mark.parametrize("training", [True, False], ids=["train", "infer"])
@pytest.mark.parametrize("name", _MODELS)
def test_models_under_random_plans(name: str, training: bool, seed: int) -> None:
    """Splits of rows, of columns in whole blocks, and of nothing: outputs, gradients and updates are the same."""
    graph = _bound(DATA / f"{name}.onnx", training=training, seq=8)
    decisions = _verified(graph, (2, 2), seed)
    split = Counter(
        p.name for p in decisions.parameters if p.name.endswith(("_Q4", "_quantized")) and _is_split(p.placement)
    )
    assert split, "a plan that splits no quantised weight tests nothing"


def _is_split(placement: tuple) -> bool:
    return any(item.is_shard for item in placement)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", _CASES)
def test_cases_under_random_plans(name: str, seed: int) -> None:
    """Per-channel and blocked scales go with the dim that is split, also where an odd number of int4 is cut."""
    _verified(_bound(DATA / "cases" / name / "model.onnx", training=False), (2,), seed)


def _splits(name: str, operator_id: str) -> dict[str, str]:
    """By strategy on one axis of two ranks: the placements of an operator's operands."""
    graph = _bound(DATA / "cases" / name / "model.onnx", training=False)
    signature = next(operator.signature for operator in graph.operators if operator.id == operator_id)
    rule = rule_of(signature)
    hints = ((),) * len(rule.factors)
    found = enumerate_strategies(signature, rule, (2,), hints, (False,) * len(signature.inputs))
    return {
        strategy.names(rule)[0]: " ".join(str(item[0]) for item in strategy.inputs if item is not None)
        for strategy in found
    }


def test_scales_are_split_as_their_dim() -> None:
    """Where output channels of an int8 kernel are split, its scale and zero point are; other splits and scalars leave
    them whole. Blocks of int4 are split whole, with their scales, and the odd dim in uneven parts, packed anew."""
    kernel = {"none": "R R R", "d0": "S(0) S(0) S(0)"}
    kernel |= {f"d{dim}": f"S({dim}) R R" for dim in (1, 2, 3)}
    assert _splits("qdq_int8_per_channel", "wd") == kernel
    image = {"none": "R R R"} | {f"d{dim}": f"S({dim}) R R" for dim in range(4)}
    assert _splits("qdq_int8_per_channel", "cq") == image
    assert _splits("int4_bf16_sizes", "wd") == {"none": "R R", "d0": "S(0) S(0)", "d1": "S(1) S(1)"}


def test_random_scales_keep_magnitudes() -> None:
    """Restored random weights have the variance of 1 / fan-in, so that activations neither vanish nor explode."""
    graph = _bound(DATA / "hm_llama_tiny_int4nbits.onnx", training=False, seq=8)
    weights = RandomWeights(graph)
    by_name = {parameter.name: parameter for parameter in graph.parameters}
    name = "model.layers.0.mlp.down_proj.weight"

    def value(key: str) -> np.ndarray:
        return weights.part(by_name[key], [np.arange(size) for size in by_name[key].type.shape])

    packed, scales = value(f"{name}_Q4"), value(f"{name}_scales").reshape(64, 4, 1)
    assert packed.min() == 0 and packed.max() == 255
    numbers = np.stack([packed & 15, packed >> 4], -1).reshape(64, 4, 32) - 8
    assert 0.8 < (numbers * scales).std() * 128**0.5 < 1.3


def test_weights_of_the_file_are_used(tmp_path: Path) -> None:
    """An inline packed model runs with its own weights as with those read whole."""
    proto = onnx.load(DATA / "cases" / "int4_bf16_sizes" / "model.onnx")
    file = saved(tmp_path, proto)
    graph = bind(file, BindOptions(batch=2))
    weights = StoredWeights(WeightReader(file))
    decisions = RandomPlan(graph, (2,), 3, loss_kind="mean").build()
    inputs = synthetic_inputs(graph)
    report = verify_program(lower(graph, decisions), LockstepCommunicator((2,)), weights, inputs)
    assert report is not None and report.passed
