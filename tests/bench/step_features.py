"""What a planned step consists of, by itself: work of operators, and collectives; priced for many steps at once.

Taking a plan's Program apart once lets constants be fitted in milliseconds an evaluation: nothing is planned or walked
through again. A test holds the price at the catalogue's constants to the planner's own prediction.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from tap_planner.cluster import Cluster, Device, Mesh, MeshAxis
from tap_planner.cost import CollectiveModel, ComputeModel, is_attention, operator_work
from tap_planner.operators import ComputeKind, record_of, rule_of
from tap_planner.program import Compute, Phase, Program, collectives, local_factor_sizes, local_operands, made_gradients
from tap_planner.sharding import local_elements
from tap_planner.simulate.durations import Durations
from tests.bench.planned_steps import PlannedStep

Operator = tuple[int, int, bool, bool]
"""(FLOPs, bytes, whether it is a backward, whether it is fused attention)."""
Call = tuple[str, tuple[int, ...], int]
"""(kind, axes, bytes)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFeatures:
    """One step without overlap, all its microbatches."""

    operators: tuple[tuple[Operator, int], ...]
    """Equal ones are counted together."""
    calls: tuple[tuple[Call, int], ...]
    update_ns: float
    """The optimizer's step, if all of the memory's bandwidth were reached."""
    peak_flops_per_s: int
    cluster: Cluster
    mesh: Mesh


def features_of(planned: PlannedStep) -> StepFeatures:
    """Take a plan apart."""
    program, cluster = planned.program, planned.cluster
    decisions = program.decisions
    device = replace(cluster.device, memory_efficiency_permille=1000)
    durations = Durations(program, replace(cluster, device=device))
    axes = tuple(MeshAxis(name=axis.name, size=axis.size) for axis in decisions.axes)
    calls = (
        (c.kind, c.axes, durations.compute.tensor_bytes(c.dtype, c.elements), c.count) for c in collectives(program)
    )
    counted: Counter[Call] = Counter()
    for kind, over, num_bytes, count in calls:
        counted[kind, over, num_bytes] += count
    return StepFeatures(
        operators=tuple(_operators(program, durations.compute).items()),
        calls=tuple(counted.items()),
        update_ns=durations.update_ns(),
        peak_flops_per_s=durations.compute.peak_flops_per_s,
        cluster=cluster,
        mesh=Mesh(axes=axes),
    )


def _operators(program: Program, compute: ComputeModel) -> Counter[Operator]:
    counted: Counter[Operator] = Counter()
    known: dict[int, tuple[Operator, Operator] | None] = {}
    for instruction in program.microbatch:
        if not isinstance(instruction, Compute):
            continue
        index, backward = instruction.operator, instruction.phase is Phase.BACKWARD
        if index not in known:
            known[index] = _work(program, compute, index)
        found = known[index]
        if found is not None and any(found[backward][:2]):
            counted[found[backward]] += program.decisions.microbatches
    return counted


def _work(program: Program, compute: ComputeModel, index: int) -> tuple[Operator, Operator] | None:
    """Forward and backward of an operator on the rank at coordinate 0; None for a view."""
    signature, decision = program.graph.operators[index].signature, program.decisions.operators[index]
    record, layout = record_of(signature), rule_of(signature).layout
    if record.kind is ComputeKind.VIEW:
        return None
    needed = made_gradients(decision)
    input_bytes = tuple(
        0 if operand is None else compute.tensor_bytes(operand.dtype, count)
        for operand, count in zip(signature.inputs, local_operands(program, index), strict=True)
    )
    output_bytes = tuple(
        compute.tensor_bytes(made.dtype, local_elements(made.shape, given.placement, program.decisions.mesh_shape))
        for made, given in zip(signature.outputs, decision.outputs, strict=True)
    )
    sizes = enumerate(local_factor_sizes(program, index))
    work = operator_work(
        record,
        factor_sizes=tuple(size for factor, size in sizes if factor not in layout),
        input_bytes=input_bytes,
        output_bytes=output_bytes,
        gradient_operands=sum(needed),
        gradient_bytes=sum(size for size, is_needed in zip(input_bytes, needed, strict=True) if is_needed),
    )
    attention = is_attention(record)
    return (
        (work.forward_flops, work.forward_bytes, False, attention),
        (work.backward_flops, work.backward_bytes, True, attention),
    )


class FeatureTable:
    """Many steps, priced at once.

    Args:
        steps: their features.
    """

    def __init__(self, steps: Sequence[StepFeatures]) -> None:
        self._steps = tuple(steps)
        rows = [(row, *work, count) for row, step in enumerate(steps) for work, count in step.operators]
        columns = np.array(rows, dtype=np.int64).reshape(-1, 6).T
        self._row, self._flops, self._bytes, backward, attention, self._count = columns
        self._backward, self._attention = backward.astype(bool), attention.astype(bool)
        self._peak = np.array([step.peak_flops_per_s for step in steps], dtype=np.float64)
        bandwidth = [step.cluster.device.memory_bandwidth_bytes_per_s for step in steps]
        self._bandwidth = np.array(bandwidth, dtype=np.float64)
        self._update_ns = np.array([step.update_ns for step in steps], dtype=np.float64)

    def compute_ns(self, device: Device) -> np.ndarray:
        """[steps] time of operators and optimizer; peak and bandwidth are those of each step's own device.

        Args:
            device: gives launch floors and efficiencies.
        """
        products, attention = (device.efficiency_permille("", attention=fused) for fused in (False, True))
        share = np.where(self._attention, attention, products)
        flops_ns = 1e12 / (self._peak[self._row] * share) * self._flops
        bytes_ns = 1e12 / (self._bandwidth[self._row] * device.memory_efficiency_permille) * self._bytes
        launch_ns = np.where(self._backward, device.backward_floor_ns, device.launch_ns)
        ns = np.ceil(np.maximum(flops_ns + bytes_ns, launch_ns)) * self._count
        update_ns = self._update_ns * 1000 / device.memory_efficiency_permille
        return np.bincount(self._row, weights=ns, minlength=len(self._steps)) + update_ns

    def collective_ns(self) -> np.ndarray:
        """[steps] time of all collectives."""
        return np.array([collective_ns(step, step.cluster) for step in self._steps], dtype=np.float64)


def collective_ns(step: StepFeatures, cluster: Cluster) -> int:
    """Time of all collectives of a step.

    Args:
        step: the features.
        cluster: its cluster, perhaps with other constants.
    """
    model = CollectiveModel(cluster, step.mesh)
    return sum(count * model.cost(*call).ns for call, count in step.calls)
