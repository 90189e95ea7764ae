"""Every operator's torch function agrees with the ONNX reference, whole and under every strategy, also in backward."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from tap_planner.apply import LockstepCommunicator
from tap_planner.apply.operators import (
    FUNCTIONS,
    OperatorContext,
    exchanges,
    narrow,
    ring_axes,
    run_loss,
    run_operator,
    run_ring,
    widen,
)
from tap_planner.apply.placing import assemble
from tap_planner.operators import OperatorSignature, TensorType, known_types, lookup, rule_of
from tap_planner.sharding import REPLICATE, Placements, Strategy, enumerate_strategies, local_indices
from tests.operators.halo_cases import SPATIAL_CASES, evaluate, pads_of
from tests.operators.operator_cases import CASES, name_of
from tests.operators.operator_reference import random_values, run, signature, tensor
from tests.operators.ring_cases import RING_CASES

_MESHES = ((3,), pytest.param((2,), marks=pytest.mark.full), pytest.param((2, 2), marks=pytest.mark.full))
_SPECIAL = frozenset({"Loss"})
"""Types with a record but no plain function: the loss communicates and has ``run_loss``."""
_SINGLE = frozenset({"GroupNormalization", "GridSample", "DeformConv", "LinearAttention"})
"""Types that the reference evaluator computes in float32 (of some others it holds constants in float32)."""
_MAX_STRATEGIES = 60
"""Per case and mesh; beyond it an even sample is taken."""

_MORE_CASES: tuple[OperatorSignature, ...] = (
    signature("Gather", tensor(10, 6), TensorType(dtype="int64", shape=(4, 3)), axis=-2),
    signature("ReduceMean", tensor(4, 6, 8), axes=(0, 1, 2), keepdims=0),
    signature("TopK", tensor(4, 6), num_outputs=2, k=2, axis=-1, largest=0, sorted=1),
    signature("Resize", tensor(2, 3, 4, 5), sizes=(2, 3, 8, 10), mode="linear"),
)


def test_every_record_has_a_function() -> None:
    """The planner's table and the applier's hold the same operator types."""
    assert set(known_types()) - _SPECIAL == set(FUNCTIONS)


def _context(
    sig: OperatorSignature,
    inputs: tuple[Placements | None, ...],
    outputs: tuple[Placements, ...],
    mesh_shape: tuple[int, ...],
    coordinates: tuple[int, ...],
) -> OperatorContext:
    return OperatorContext(
        signature=sig,
        inputs=inputs,
        outputs=outputs,
        mesh_shape=mesh_shape,
        coordinates=coordinates,
        dtype=torch.float64,
    )


def _whole_context(sig: OperatorSignature) -> OperatorContext:
    whole: Placements = (REPLICATE,)
    inputs = tuple(None if found is None else whole for found in sig.inputs)
    return _context(sig, inputs, (whole,) * len(sig.outputs), (1,), (0,))


def _run_context(contexts: list[OperatorContext], operands: list[list[Tensor | None]]) -> list[tuple[Tensor, ...]]:
    if contexts[0].signature.type == "Loss":
        losses, _ = run_loss(contexts, operands, LockstepCommunicator(contexts[0].mesh_shape))
        return [(loss,) for loss in losses]
    return [run_operator(context, values) for context, values in zip(contexts, operands, strict=True)]


def _torch_values(sig: OperatorSignature) -> list[Tensor | None]:
    return [None if value is None else torch.from_numpy(np.asarray(value)) for value in random_values(sig)]


_CASES = [pytest.param(sig, id=name_of(sig)) for sig in (*CASES, *_MORE_CASES)]
_SPLIT_CASES = [
    *_CASES,
    *(pytest.param(sig, id=f"halo-{name_of(sig)}") for sig in SPATIAL_CASES),
    *(pytest.param(sig, id=f"ring-{name_of(sig)}") for sig in RING_CASES),
]


@pytest.mark.parametrize("sig", _CASES)
def test_agrees_with_the_onnx_reference(sig: OperatorSignature) -> None:
    """On whole tensors the function computes what the ONNX reference evaluator computes."""
    values = random_values(sig)
    expected = run(sig, values)
    outputs = _run_context([_whole_context(sig)], [_torch_values(sig)])[0]
    assert len(outputs) == len(sig.outputs)
    tolerance = 1e-5 if sig.type in _SINGLE else 1e-7
    for output, reference, declared in zip(outputs, expected, sig.outputs, strict=False):
        assert tuple(output.shape) == declared.shape
        made = output.numpy().astype(np.float64)
        np.testing.assert_allclose(made, np.asarray(reference, np.float64), rtol=tolerance, atol=tolerance)


def _strategies(sig: OperatorSignature, mesh_shape: tuple[int, ...]) -> Sequence[Strategy]:
    rule = rule_of(sig)
    hints = tuple(
        tuple(blocks for blocks in (2, 3) if factor.size % blocks == 0 and factor.size > blocks)
        for factor in rule.factors
    )
    found = enumerate_strategies(sig, rule, mesh_shape, hints, [True] * len(sig.inputs))
    return found[:: -(-len(found) // _MAX_STRATEGIES)]


def _parts(whole: Tensor, placements: Placements, mesh_shape: tuple[int, ...]) -> list[Tensor]:
    """One part per rank; P values are spread over the axis in unequal shares."""
    parts = []
    for coordinates in itertools.product(*(range(size) for size in mesh_shape)):
        part = whole
        for dim, held in enumerate(local_indices(tuple(whole.shape), placements, mesh_shape, coordinates)):
            part = part.index_select(dim, torch.from_numpy(held))
        for placement, size, coordinate in zip(placements, mesh_shape, coordinates, strict=True):
            if placement.is_partial:
                part = part * (2.0 * (coordinate + 1) / (size * (size + 1)))
        parts.append(part.clone())
    return parts


@pytest.mark.parametrize("sig", SPATIAL_CASES, ids=name_of)
def test_agrees_with_windows_written_as_loops(sig: OperatorSignature) -> None:
    """On whole tensors the windowed functions compute what their definition in numpy does."""
    values = random_values(sig)
    (output,) = _run_context([_whole_context(sig)], [_torch_values(sig)])[0]
    np.testing.assert_allclose(output.numpy(), evaluate(sig, values, pads_of(sig)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("mesh_shape", _MESHES, ids=str)
@pytest.mark.parametrize("sig", _SPLIT_CASES)
def test_every_strategy_gives_parts_of_the_whole(sig: OperatorSignature, mesh_shape: tuple[int, ...]) -> None:
    """Under each strategy the local outputs are parts (or terms) of the whole output, and the local vector-Jacobian
    products are parts (or terms) of the whole one, in the placements that the strategy states."""
    _check_strategies(sig, _strategies(sig, mesh_shape), mesh_shape)


@pytest.mark.parametrize("mesh_shape", [(4,), (2, 2), pytest.param((2, 3), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("sig", RING_CASES, ids=name_of)
def test_every_ring_gives_parts_of_the_whole(sig: OperatorSignature, mesh_shape: tuple[int, ...]) -> None:
    """The same for rings: over one axis or two, and beside splits of batch, heads and queries."""
    rule = rule_of(sig)
    found = enumerate_strategies(sig, rule, mesh_shape, [()] * len(rule.factors), [True] * len(sig.inputs))
    rings = [strategy for strategy in found if any(choice.kind == "ring" for choice in strategy.choices)]
    assert len(rings) > (1 if len(mesh_shape) > 1 else 0)
    _check_strategies(sig, rings, mesh_shape)


def _check_strategies(sig: OperatorSignature, strategies: Sequence[Strategy], mesh_shape: tuple[int, ...]) -> None:
    values = _torch_values(sig)
    differentiable = lookup(sig.type).differentiable_operands
    wanted = [
        position
        for position, found in enumerate(sig.inputs)
        if found is not None and found.is_float and (differentiable is None or position in differentiable)
    ]
    if sig.type == "Loss":
        wanted = []
    whole, seeds, gradients = _whole_products(sig, values, wanted)
    for strategy in strategies:
        names = strategy.names(rule_of(sig))
        outputs, columns = _local_products(sig, strategy, mesh_shape, values, seeds, wanted)
        for position, reference in enumerate(whole):
            made = assemble(
                [each[position] for each in outputs], tuple(reference.shape), strategy.outputs[position], mesh_shape
            )
            for replica in made:
                np.testing.assert_allclose(replica, reference.numpy(), rtol=1e-10, atol=1e-10, err_msg=str(names))
        for position, column in columns.items():
            placements = strategy.input_gradients[position]
            assert placements is not None
            expected = gradients[position]
            for replica in assemble(column, tuple(expected.shape), placements, mesh_shape):
                np.testing.assert_allclose(replica, expected.numpy(), rtol=1e-9, atol=1e-9, err_msg=str(names))


def _whole_products(
    sig: OperatorSignature, values: list[Tensor | None], wanted: list[int]
) -> tuple[list[Tensor], list[Tensor | None], dict[int, Tensor]]:
    """Whole outputs, random gradients of them, and the resulting gradients of the wanted operands."""
    leaves = [
        value.clone().requires_grad_() if value is not None and position in wanted else value
        for position, value in enumerate(values)
    ]
    outputs = _run_context([_whole_context(sig)], [leaves])[0]
    generator = torch.Generator().manual_seed(1)
    seeds = [
        torch.rand(output.shape, dtype=torch.float64, generator=generator) if output.requires_grad else None
        for output in outputs
    ]
    return (
        [output.detach() for output in outputs],
        seeds,
        dict(zip(wanted, _vjp(outputs, leaves, wanted, seeds), strict=True)),
    )


def _vjp(
    outputs: Sequence[Tensor], leaves: Sequence[Tensor | None], wanted: list[int], seeds: Sequence[Tensor | None]
) -> list[Tensor]:
    inputs = [leaf for position in wanted if (leaf := leaves[position]) is not None]
    pairs = [(o, s) for o, s in zip(outputs, seeds, strict=True) if s is not None and o.requires_grad]
    if not pairs or not inputs:
        return [torch.zeros_like(leaf) for leaf in inputs]
    made = torch.autograd.grad([o for o, _ in pairs], inputs, [s for _, s in pairs], allow_unused=True)
    return [torch.zeros_like(leaf) if g is None else g for leaf, g in zip(inputs, made, strict=True)]


def _local_products(
    sig: OperatorSignature,
    strategy: Strategy,
    mesh_shape: tuple[int, ...],
    values: list[Tensor | None],
    seeds: list[Tensor | None],
    wanted: list[int],
) -> tuple[list[tuple[Tensor, ...]], dict[int, list[Tensor]]]:
    ranks = list(itertools.product(*(range(size) for size in mesh_shape)))
    columns = [
        None if value is None or placements is None else _parts(value, placements, mesh_shape)
        for value, placements in zip(values, strategy.inputs, strict=True)
    ]
    operands = [
        [
            None if column is None else (column[rank].requires_grad_() if position in wanted else column[rank])
            for position, column in enumerate(columns)
        ]
        for rank in range(len(ranks))
    ]
    contexts = [_context(sig, strategy.inputs, strategy.outputs, mesh_shape, rank) for rank in ranks]
    communicator = LockstepCommunicator(mesh_shape)
    if exchanges(contexts[0]):
        first = [part for each in operands if (part := each[0]) is not None]
        for each, part in zip(operands, widen(contexts, first, communicator), strict=True):
            each[0] = part.requires_grad_() if 0 in wanted else part
    dual = [
        None if seed is None else _parts(seed, _dual(placements), mesh_shape)
        for seed, placements in zip(seeds, strategy.outputs, strict=True)
    ]
    if ring_axes(contexts[0]):
        made, record = run_ring(contexts, operands, communicator, {})
        rows = [[None if column is None else column[rank] for column in dual] for rank in range(len(ranks))]
        return made, dict(zip(wanted, record.backward(wanted, rows, communicator), strict=True))
    outputs = _run_context(contexts, operands)
    products: dict[int, list[Tensor]] = {position: [] for position in wanted}
    for rank in range(len(ranks)):
        local_seeds = [None if column is None else column[rank] for column in dual]
        for position, gradient in zip(wanted, _vjp(outputs[rank], operands[rank], wanted, local_seeds), strict=True):
            products[position].append(gradient)
    if 0 in wanted:
        products[0] = narrow(contexts, products[0], communicator)
    return [tuple(output.detach() for output in each) for each in outputs], products


def _dual(placements: Placements) -> Placements:
    return tuple(REPLICATE if placement.is_partial else placement for placement in placements)
