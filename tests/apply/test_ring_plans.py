"""The sequence split over devices: models run as one process does, and issue the exchanges that the plan lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest

from tap_planner.apply import (
    ApplyJob,
    LockstepCommunicator,
    apply_job,
    synthetic_inputs,
)
from tap_planner.apply.communicator import Axes, Bundle
from tap_planner.cluster import load_cluster
from tap_planner.errors import PlanFormatError
from tap_planner.graph import BindOptions, Graph, LossOptions, ModelFile, bind
from tap_planner.plan import Decisions
from tap_planner.program import Collective, Phase, collectives, lower
from tap_planner.simulate import price_program
from tests.apply.lockstep_runs import calls_by_phase, listed, verified
from tests.apply.sequence_plans import SequencePlan, sequence_factors
from tests.graph.models import data_model, saved, symbols
from tests.search.test_rings import attention as small_attention

_MESHES = ((1, 2), (2, 2), (1, 4))
_LENGTH = 8
_FUSED = ("llama_tiny_op23", "hm_llama_tiny_fused")
_DECOMPOSED = ("llama_tiny_ortext", "hm_gpt_tiny", "gpt2_tiny_ortext", "bert_tiny_orttransformers", "t5_tiny_ortext")

_CONTRIB = """
g (float[batch, 8, 64] x, int32[batch] ends) => (float[batch, 8, 64] y, float[batch, 2, 8, 16] key) {
    n = SimplifiedLayerNormalization<epsilon = 0.00001>(x, gamma)
    q = MatMul(n, q_weight)
    k = MatMul(n, k_weight)
    v = MatMul(n, v_weight)
    a, key, value = com.microsoft.GroupQueryAttention<num_heads = 4, kv_num_heads = 2, do_rotary = 1>
        (q, k, v, , , ends, total, cos_cached, sin_cached)
    o, , , s = com.microsoft.SkipSimplifiedLayerNormalization<epsilon = 0.00001>(a, x, gamma)
    m = com.microsoft.MultiHeadAttention<num_heads = 4, unidirectional = 1>(o, o, o, qkv_bias)
    p = com.microsoft.Attention<num_heads = 4, unidirectional = 1>(m, qkv_weight, qkv_bias)
    y = com.microsoft.FastGelu(p, bias)
}
"""
_CONTRIB_WEIGHTS = {
    "gamma": (64,),
    "q_weight": (64, 64),
    "k_weight": (64, 32),
    "v_weight": (64, 32),
    "qkv_weight": (64, 192),
    "qkv_bias": (192,),
    "bias": (64,),
    "cos_cached": (9, 8),
    "sin_cached": (9, 8),
}


def contrib_model(folder: Path) -> ModelFile:
    """Three attention operators of com.microsoft in a row, with random weights."""
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 20, "com.microsoft" : 1]>\n{_CONTRIB}')
    rng = np.random.default_rng(0)
    for name, shape in _CONTRIB_WEIGHTS.items():
        array = rng.normal(0, 0.3, shape).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(_LENGTH, np.int32), "total"))
    return saved(folder, model, "contrib.onnx")


def bound(file: ModelFile, *, batch: int = 2, training: bool = True) -> Graph:
    """Bound with a sequence of eight."""
    return bind(file, options_of(file, batch=batch, training=training))


def options_of(file: ModelFile, *, batch: int = 2, training: bool = True) -> BindOptions:
    """How ``bound`` binds."""
    dims = {dim: _LENGTH for dim in ("seq", "dec_seq") if dim in symbols(file)}
    return BindOptions(batch=batch, dims=dims, training=training, loss=LossOptions(kind="mean"))


def inputs_of(graph: Graph) -> dict[str, np.ndarray]:
    """Synthetic inputs; texts of full length."""
    inputs = synthetic_inputs(graph)
    if "ends" in inputs:
        inputs["ends"][:] = _LENGTH - 1
    return inputs


def exchanges_of(graph: Graph, decisions: Decisions) -> tuple[Collective, ...]:
    """The steps of rings that a plan lists."""
    return listed(graph, decisions, "ring_exchange")


def check(graph: Graph, plan: SequencePlan) -> Counter[Phase]:
    """Verifies a plan; returns the number of exchanges by phase."""
    decisions = plan.build()
    report = verified(graph, decisions, inputs_of(graph))
    assert report.passed, "\n".join(report.lines())
    return calls_by_phase(exchanges_of(graph, decisions))


def _check_seeds(graph: Graph, seeds: Sequence[int], recompute: str = "none") -> Counter[Phase]:
    found: Counter[Phase] = Counter()
    for mesh_shape in _MESHES:
        for seed in seeds:
            found += check(graph, SequencePlan(graph, mesh_shape, seed, length=_LENGTH, recompute=recompute))
    return found


@pytest.mark.parametrize(
    ("name", "attention"),
    [*((name, "ring") for name in _FUSED), *((name, "gather") for name in (*_FUSED, *_DECOMPOSED))],
)
def test_the_whole_model_runs_with_the_sequence_split(name: str, attention: str) -> None:
    """Every operator that the sequence runs through is split along it, and all is the same; only the lookup of
    BERT's mask of keys is whole."""
    graph = bound(data_model(name), batch=1 if name.startswith("gpt2") else 2)
    decisions = SequencePlan(graph, (4,), 0, length=_LENGTH, attention=attention, share=1.0).build()
    carrying = sequence_factors(graph, _LENGTH)
    assert len(carrying) > len(graph.operators) * 0.9
    whole = {d.type for d in decisions.operators if d.id in carrying and d.strategy == ("none",)}
    assert whole <= {"GatherND"}, whole
    rings = [decision for decision in decisions.operators if "ring" in decision.strategy]
    assert bool(rings) == (attention == "ring")
    assert bool(exchanges_of(graph, decisions)) == bool(rings)
    report = verified(graph, decisions, inputs_of(graph))
    assert report.passed, "\n".join(report.lines())


@pytest.mark.parametrize("name", _FUSED)
def test_random_plans(name: str) -> None:
    """Rings beside splits of batch, heads and queries, and rings over two axes: outputs, gradients and collectives are
    those of one process and of the plan."""
    found = _check_seeds(bound(data_model(name)), range(3))
    assert found[Phase.BACKWARD] == 2 * found[Phase.FORWARD] > 0


def test_operators_of_com_microsoft(tmp_path: Path) -> None:
    """The same for grouped, multi-head and projecting attention, in training and in inference."""
    file = contrib_model(tmp_path)
    found = _check_seeds(bound(file), range(4))
    assert found[Phase.BACKWARD] == 2 * found[Phase.FORWARD] > 0
    found = _check_seeds(bound(file, training=False), range(4))
    assert found[Phase.FORWARD] > 0 == found[Phase.BACKWARD]


@pytest.mark.parametrize("recompute", ["full", "selective", "mixed"])
def test_recomputed_rings(recompute: str, tmp_path: Path) -> None:
    """Where attention runs again keys go round again, and the plan lists it; operands that are made again, or gathered
    again at ZeRO 3, are looked up in backward."""
    graph = bound(contrib_model(tmp_path))
    found: Counter[Phase] = Counter()
    for seed in range(8):
        zero = 3 if seed % 2 else 0
        found += check(graph, SequencePlan(graph, (2, 2), seed, length=_LENGTH, recompute=recompute, zero=zero))
    assert found[Phase.BACKWARD] == 2 * found[Phase.FORWARD] > 0
    assert found[Phase.RECOMPUTE] > 0


def test_gradients_go_round_only_where_they_are_wanted() -> None:
    """Where keys and values are inputs of the model they go round in backward, and no gradients do."""
    for keys, rounds in (("x", 1), ("q", 2)):
        graph = small_attention(length=_LENGTH, width=4, training=True, keys=keys)
        plan = SequencePlan(graph, (4,), 0, length=_LENGTH, attention="ring", share=1.0)
        found = check(graph, plan)
        assert (found[Phase.FORWARD], found[Phase.BACKWARD]) == (3, 3 * rounds)


def test_a_lost_exchange_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that arrive as zeros make outputs and gradients differ: the exchange is no decoration."""
    graph = bound(data_model("hm_llama_tiny_fused"))
    decisions = SequencePlan(graph, (4,), 0, length=_LENGTH, attention="ring", share=1.0).build()
    real = LockstepCommunicator.ring_exchange

    def losing(self: LockstepCommunicator, parts: Sequence[Bundle], axes: Axes) -> list[Bundle]:
        return [tuple(part * 0 for part in bundle) for bundle in real(self, parts, axes)]

    monkeypatch.setattr(LockstepCommunicator, "ring_exchange", losing)
    findings = verified(graph, decisions, inputs_of(graph)).findings
    assert any(finding.startswith("output ") for finding in findings)
    assert any(finding.startswith("gradient ") for finding in findings)


def test_a_ring_holds_less() -> None:
    """From forward to backward a ring holds parts of keys and values where an all-gather holds them whole."""
    graph = bound(data_model("hm_llama_tiny_fused"))
    held: dict[str, int] = {}
    for attention in ("ring", "gather"):
        decisions = SequencePlan(graph, (4,), 0, length=_LENGTH, attention=attention, share=1.0).build()
        price = price_program(lower(graph, decisions), load_cluster("1x4:a100-sxm4-80gb"))
        held[attention] = price.activation_bytes
    keys = [o for o in graph.operators if o.type == "Attention" for o in o.signature.inputs[1:3]]
    whole = sum(8 * key.num_elements for key in keys if key is not None)
    assert held["gather"] - held["ring"] == whole * 3 // 4 > 0


def test_an_unknown_choice_is_refused() -> None:
    """A plan that was changed by hand names the operator and the choice that it does not have."""
    graph = bound(data_model("hm_llama_tiny_fused"))
    decisions = SequencePlan(graph, (4,), 0, length=_LENGTH, attention="ring", share=1.0).build()
    position = next(i for i, d in enumerate(decisions.operators) if d.type == "Attention")
    changed = replace(decisions.operators[position], strategy=("ring[1]",))
    operators = (*decisions.operators[:position], changed, *decisions.operators[position + 1 :])
    with pytest.raises(PlanFormatError, match=r"\(Attention\): the operator has no choice 'ring\[1\]'"):
        collectives(lower(graph, replace(decisions, operators=operators)))


@pytest.mark.full
def test_processes_pass_on_what_lockstep_does(tmp_path: Path) -> None:
    """Four gloo processes on 2x2 and 1x4 verify, with as many collectives as lockstep."""
    for file in (contrib_model(tmp_path), data_model("hm_llama_tiny_fused")):
        options = options_of(file)
        graph = bind(file, options)
        for mesh_shape in ((2, 2), (1, 4)):
            plan = SequencePlan(graph, mesh_shape, 1, length=_LENGTH, attention="ring", share=1.0)
            decisions = plan.build()
            assert exchanges_of(graph, decisions)
            job = ApplyJob(
                model=file.path,
                options=options,
                decisions=decisions,
                graph_digest=graph.digest,
                random_weights=True,
                verify=True,
            )
            result, lockstep = apply_job(job, num_processes=4), apply_job(job)
            assert result is not None and result.report is not None and lockstep is not None
            assert result.report.passed, "\n".join(result.report.lines())
            assert result.num_collectives == lockstep.num_collectives > 0


@pytest.mark.full
@pytest.mark.parametrize("recompute", ["none", "full", "selective"])
@pytest.mark.parametrize("name", [*_FUSED, "contrib", *_DECOMPOSED])
def test_many_random_plans(name: str, recompute: str, tmp_path: Path) -> None:
    """The same for twelve plans per mesh, with and without recomputation."""
    file = contrib_model(tmp_path) if name == "contrib" else data_model(name)
    _check_seeds(bound(file, batch=4), range(12), recompute)
