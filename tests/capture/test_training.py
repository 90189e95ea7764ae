"""An exported module is planned, run in lockstep, and trained; PyTorch's autograd and optimizer say what is right."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tap_planner import api
from tap_planner.apply import LockstepCommunicator, ParameterStore, StepExecutor, StoredWeights
from tap_planner.apply.optimizer import make_optimizer
from tap_planner.apply.placing import assemble
from tap_planner.capture import export_graph
from tap_planner.graph import BindOptions, LossOptions, WeightReader, bind, load_model
from tap_planner.plan import ApplyRequest, PlanOptions, PlanRequest, write_plan
from tap_planner.program import lower
from tests.apply.random_plans import RandomPlan
from tests.capture.conftest import Exported
from tests.capture.modules import EXAMPLES, build

MESH = (2, 2)
ROUNDING = 1e-6
"""Constants of a float32 module (epsilon, the scale of attention) are float32 in the file."""


@pytest.mark.parametrize("name", ["tied", "conv_train"])
def test_the_optimal_plan_verifies(name: str, exported: Exported, tmp_path: Path) -> None:
    """tap-plan, then tap-apply --verify with the module's own weights."""
    captured = exported(name)
    options = PlanOptions(batch=4, dims=dict(EXAMPLES[name].sizes), precision="fp32", mesh="dp=2,tp=2")
    plan = tmp_path / "plan.json"
    write_plan(plan, api.make_plan(PlanRequest(model=captured.path, cluster="1x4:cpu-core", options=options)))
    outcome = api.apply_plan(ApplyRequest(plan=plan, model=captured.path, verify=True))
    assert outcome.passed, "\n".join(outcome.lines())


def distributed_step(path: Path, name: str, inputs: dict[str, np.ndarray], seed: int) -> dict[str, Tensor]:
    """Parameters after one step of SGD on a random plan, in float64, by name; and the gradients as ``NAME.grad``."""
    example = EXAMPLES[name]
    model = load_model(path)
    batch = next(iter(inputs.values())).shape[0]
    dims = {key: inputs["input_ids"].shape[1] for key in example.sizes}  # noqa: C420 - only where there is one
    options = BindOptions(batch=batch, dims=dims, training=True, loss=LossOptions(kind="sum"))
    graph = bind(model, options)
    decisions = RandomPlan(graph, MESH, seed, optimizer="sgd", loss_kind="sum").build()
    communicator = LockstepCommunicator(MESH)
    program = lower(graph, decisions)
    store = ParameterStore(program, communicator, StoredWeights(WeightReader(model)), torch.float64)
    StepExecutor(program, communicator, store, make_optimizer("sgd"), dtype=torch.float64).run(inputs)
    result: dict[str, Tensor] = {}
    placed = {decision.name: decision for decision in decisions.parameters}
    for suffix, values in (
        ("", store.final_values(communicator)),
        (".grad", store.final_gradients(communicator)),
    ):
        for key, parts in values.items():
            whole = assemble(parts, placed[key].shape, placed[key].placement, MESH)[0]
            result[f"{key}{suffix}"] = torch.from_numpy(whole)
    return result


def torch_step(module: nn.Module, inputs: dict[str, object]) -> None:
    """One step of SGD on the sum of the output, by PyTorch."""
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    pytree.tree_leaves(module(**inputs))[0].sum().backward()
    optimizer.step()


@pytest.mark.parametrize("name", ["mlp", "tied", "conv", "conv_train"])
def test_a_distributed_step_is_that_of_pytorch(name: str, exported: Exported) -> None:
    """Gradients and updated parameters, by PyTorch's names, equal those of autograd and torch.optim on the module.

    What the step gives loads into the module's state dict.
    """
    doubled = pytree.tree_map(
        lambda tensor: tensor.double() if tensor.is_floating_point() else tensor, dict(EXAMPLES[name].inputs)
    )
    expected = build(name).double()
    torch_step(expected, doubled)
    arrays = {key: leaf.numpy() for key, leaf in doubled.items()}
    got = distributed_step(exported(name).path, name, arrays, seed=5)
    largest = max(
        float(parameter.grad.abs().max()) for parameter in expected.parameters() if parameter.grad is not None
    )
    assert largest > 1e-3
    for key, parameter in expected.named_parameters():
        if parameter.grad is None:
            assert key in EXAMPLES[name].not_read
            continue
        torch.testing.assert_close(got.pop(f"{key}.grad"), parameter.grad, rtol=ROUNDING, atol=ROUNDING * largest)
    loaded = build(name).double()
    missing, unexpected = loaded.load_state_dict(got, strict=False)
    assert not unexpected
    assert set(missing).isdisjoint(dict(expected.named_parameters())) or set(missing) == set(EXAMPLES[name].not_read)
    for key, parameter in loaded.named_parameters():
        want = expected.get_parameter(key)
        torch.testing.assert_close(parameter, want, rtol=ROUNDING, atol=1e-2 * ROUNDING * largest)


def test_what_the_module_does_not_train_is_not_trained(exported: Exported) -> None:
    """A float buffer that is used as a scale is no parameter to train, though its place in the graph suggests it."""
    graph = bind(load_model(exported("tied").path), BindOptions(batch=4, dims={"seq": 6}, training=True))
    assert {item.name: item.trainable for item in graph.parameters}["table"] is False


def test_a_frozen_parameter_is_not_trained(tmp_path: Path) -> None:
    """A parameter that requires no gradient is marked in the file; --train takes it in again."""
    module = build("mlp")
    module.get_parameter("up.weight").requires_grad_(False)
    captured = export_graph(module, EXAMPLES["mlp"].inputs, tmp_path / "mlp.onnx")
    for train, expected in (((), False), (("up.weight",), True)):
        graph = bind(load_model(captured.path), BindOptions(batch=3, training=True, train=train))
        assert {item.name: item.trainable for item in graph.parameters} == {
            "up.weight": expected,
            "up.bias": True,
            "down.weight": True,
            "down.bias": True,
        }
