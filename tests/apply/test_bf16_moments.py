"""AdamW's moments in bfloat16 over several steps, sharded by ZeRO and not: what a single process keeps and computes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch

from tap_planner.apply import LockstepCommunicator, ParameterStore, RandomWeights, StepExecutor, synthetic_inputs
from tap_planner.apply.communicator import Parts
from tap_planner.apply.optimizer import AdamW, make_optimizer
from tap_planner.apply.placing import assemble
from tap_planner.cluster import load_cluster
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.plan import Decisions
from tap_planner.program import lower
from tap_planner.simulate import price_program
from tests.apply.lockstep_runs import verified
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model

MESH = (2, 2)
STEPS = 4
LEARNING_RATE, BETAS, EPSILON, DECAY = 1e-3, (0.9, 0.999), 1e-8, 0.01


def graph_of(model: str) -> Graph:
    """A small model to train."""
    options = BindOptions(batch=4, dims={"seq": 8}, training=True, loss=LossOptions(kind="mean"))
    return bind(data_model(model), options)


def planned(graph: Graph, zero: int | None, seed: int) -> Decisions:
    """A random plan whose moments are bfloat16."""
    return replace(RandomPlan(graph, MESH, seed, zero=zero).build(), optimizer_states="bf16")


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded to the nearest, ties to even, by the bits of float32; in float64."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32).astype(np.float64)


@dataclass(slots=True)
class ByHand:
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) on one whole parameter, moments rounded between steps."""

    value: np.ndarray
    steps: int = 0
    first: np.ndarray = field(init=False)
    second: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.first, self.second = np.zeros_like(self.value), np.zeros_like(self.value)

    def update(self, gradient: np.ndarray, *, rounds: bool) -> None:
        """One step."""
        self.steps += 1
        first = BETAS[0] * self.first + (1 - BETAS[0]) * gradient
        second = BETAS[1] * self.second + (1 - BETAS[1]) * gradient**2
        root = np.sqrt(second / (1 - BETAS[1] ** self.steps)) + EPSILON
        self.value = self.value * (1 - LEARNING_RATE * DECAY)
        self.value -= LEARNING_RATE * first / (1 - BETAS[0] ** self.steps) / root
        self.first, self.second = (to_bfloat16(first), to_bfloat16(second)) if rounds else (first, second)


class Run:
    """Steps of a plan in lockstep, in float64."""

    def __init__(self, graph: Graph, decisions: Decisions, dtype: torch.dtype = torch.float64) -> None:
        self.graph, self.decisions = graph, decisions
        self.communicator = LockstepCommunicator(MESH)
        program = lower(graph, decisions)
        self.store = ParameterStore(program, self.communicator, RandomWeights(graph), dtype)
        self.optimizer = make_optimizer(decisions.optimizer, decisions.optimizer_states)
        self.executor = StepExecutor(program, self.communicator, self.store, self.optimizer, dtype=dtype)

    def step(self, number: int) -> None:
        """One step on inputs of its own."""
        self.executor.run(synthetic_inputs(self.graph, number))

    def values(self) -> dict[str, np.ndarray]:
        """Trained parameters, whole."""
        return self._whole(self.store.final_values(self.communicator))

    def gradients(self) -> dict[str, np.ndarray]:
        """Their gradients in the last step."""
        return self._whole(self.store.final_gradients(self.communicator))

    def _whole(self, values: dict[str, Parts]) -> dict[str, np.ndarray]:
        placed = {decision.name: decision for decision in self.decisions.parameters}
        found: dict[str, np.ndarray] = {}
        for name, parts in values.items():
            replicas = assemble(parts, placed[name].shape, placed[name].placement, MESH)
            assert all(np.array_equal(replica, replicas[0]) for replica in replicas), name
            found[name] = replicas[0]
        return found


@pytest.mark.parametrize("zero", [0, 1, 2, 3, None])
def test_steps_are_those_of_a_single_process(zero: int | None) -> None:
    """After each step every parameter is what one process makes of the same gradients with rounded moments, at any ZeRO
    level (None: mixed, over some axes); without rounding it would be another."""
    graph = graph_of("gpt2_tiny")
    run = Run(graph, planned(graph, zero, 11))
    rounded = {name: ByHand(value) for name, value in run.values().items()}
    exact = {name: ByHand(value) for name, value in run.values().items()}
    assert zero is None or {p.zero_level for p in run.decisions.parameters if p.data_axes} == {zero}
    for number in range(STEPS):
        run.step(number)
        gradients, values = run.gradients(), run.values()
        assert max(float(np.abs(gradient).max()) for gradient in gradients.values()) > 1e-6
        for name, value in values.items():
            rounded[name].update(gradients[name], rounds=True)
            exact[name].update(gradients[name], rounds=False)
            np.testing.assert_allclose(value, rounded[name].value, rtol=1e-11, atol=1e-13, err_msg=name)
    apart = max(float(np.abs(values[name] - exact[name].value).max()) for name in values)
    assert 1e-7 < apart < LEARNING_RATE


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_states_take_what_the_memory_model_counts(zero: int) -> None:
    """In bf16: a float32 master and two bfloat16 moments for each element that a rank updates, padding apart."""
    graph = graph_of("gpt2_tiny")
    decisions = replace(planned(graph, zero, 3), precision="bf16")
    run = Run(graph, decisions, torch.bfloat16)
    run.step(0)
    optimizer = run.optimizer
    assert isinstance(optimizer, AdamW)
    held = 0
    for (_, rank), state in optimizer._states.items():
        if rank == 0:
            held += sum(t.numel() * t.element_size() for t in (state.master, state.first, state.second))
    counted = price_program(lower(graph, decisions), load_cluster("2x2:a100-sxm4-80gb")).optimizer_bytes
    padding = 8 * 3 * (len(decisions.buckets) + sum(bool(p.zero_axes) for p in decisions.parameters))
    assert counted - padding <= held <= counted + padding
    assert padding < held / 10


@pytest.mark.parametrize("zero", [0, 3])
def test_plans_verify(zero: int) -> None:
    """--verify compares with one process that rounds alike."""
    graph = graph_of("hm_llama_tiny")
    report = verified(graph, planned(graph, zero, 5))
    assert report.passed, "\n".join(report.lines())
