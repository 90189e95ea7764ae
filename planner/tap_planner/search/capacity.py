"""What is plain before any table is built: sizes that no plan can hold, or that 64-bit tables cannot count.

A file of a few hundred bytes may describe 2^66 elements. Everything here is exact: Python integers, no tables.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tap_planner.cluster import Cluster, Device
from tap_planner.cost import ComputeModel, StageCompute, StageShare, is_attention, padded_points, whole_operator_ns
from tap_planner.graph import Graph, TensorKind
from tap_planner.operators import ComputeKind, OperatorSignature, TensorType, record_of, rule_of
from tap_planner.schedule import made_gradients

LARGEST_WHOLE = 1 << 54
"""Most bytes, and most nanoseconds, of the whole graph on one device: twelfths of sums of them stay in 64 bits."""
LARGEST_SHARE = 1 << 52
"""Most bytes and nanoseconds of the best plan that can be thought of: stays below what tables call infinite."""


LARGEST_SENT = 1 << 42
"""Most bytes of one tensor where sent bytes are added up: all ways between placements stay below what tables call
infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Memory that no plan can do without, on one of the devices."""

    num_bytes: int
    what: str
    """What needs it, as the subject of a sentence in the singular."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What a graph holds, by kind."""

    signatures: Mapping[OperatorSignature, int]
    """How many operators are alike."""
    parameters: Mapping[TensorType, int]
    """How many parameters are alike."""
    largest: Mapping[str, tuple[str, TensorType]]
    """By element type, the largest tensor that exists as a whole, and its type; parameters are none of them."""


def sizes_of(graph: Graph) -> Sizes:
    """Count what a graph holds."""
    largest: dict[str, tuple[str, TensorType]] = {}
    for name, tensor in _held(graph):
        if tensor.dtype not in largest or tensor.num_elements > largest[tensor.dtype][1].num_elements:
            largest[tensor.dtype] = (name, tensor)
    return Sizes(
        signatures=Counter(operator.signature for operator in graph.operators),
        parameters=Counter(parameter.type for parameter in graph.parameters),
        largest=largest,
    )


def _parameter_bytes(sizes: Sizes, compute: ComputeModel) -> int:
    """Bytes of all parameters."""
    kinds = sizes.parameters.items()
    return sum(count * compute.tensor_bytes(kind.dtype, kind.num_elements) for kind, count in kinds)


def parameter_demand(sizes: Sizes, cluster: Cluster, precision: str) -> Demand:
    """A lower bound of what some device stores: all devices together hold every parameter."""
    stored = _parameter_bytes(sizes, ComputeModel(cluster.device, precision))
    return Demand(num_bytes=-(-stored // cluster.num_devices), what="an equal share of the parameters")


def tensor_demand(sizes: Sizes, cluster: Cluster, precision: str, microbatches: int) -> Demand:
    """A lower bound of what some device holds at some time, which memory model M does not see in inference.

    However it is split, all of a tensor (of one microbatch) exists on the devices together when it is computed with.
    Results of views need no memory of their own.

    Args:
        sizes: of the graph, bound with the whole batch.
        cluster: the devices.
        precision: what floats are cast to.
        microbatches: the most that any plan cuts the batch into.
    """
    compute = ComputeModel(cluster.device, precision)
    least = Demand(num_bytes=0, what="nothing")
    for name, tensor in sizes.largest.values():
        whole = compute.tensor_bytes(tensor.dtype, tensor.num_elements)
        share = -(-whole // (cluster.num_devices * microbatches))
        if share > least.num_bytes:
            shape = "x".join(map(str, tensor.shape))
            least = Demand(num_bytes=share, what=f"an equal share of tensor {name!r} ({tensor.dtype} {shape})")
    return least


def _held(graph: Graph) -> Iterator[tuple[str, TensorType]]:
    """Tensors that exist as a whole, each once, without parameters: operands, results that are no views, outputs."""
    seen = {name for name, tensor in graph.tensors.items() if tensor.kind is TensorKind.PARAMETER}
    for operator in graph.operators:
        if record_of(operator.signature).kind is ComputeKind.VIEW:
            continue
        for name in (*operator.inputs, *operator.outputs):
            if name is not None and name not in seen:
                seen.add(name)
                yield name, graph.tensors[name].type
    for name in graph.outputs:
        if name not in seen:
            yield name, graph.tensors[name].type


def least_ns(graph: Graph, cluster: Cluster, precision: str) -> int:
    """A lower bound of objective A on a cluster: every operator split perfectly over all devices, nothing sent.

    Args:
        graph: bound with the global batch.
        cluster: the devices that are used.
        precision: what floats are cast to.
    """
    return sum(least_of_stages(graph, cluster, precision))


def least_of_stages(
    graph: Graph, cluster: Cluster, precision: str, num_stages: int = 1, shares: Sequence[StageShare] = ()
) -> tuple[int, int]:
    """What forward and backward take at least: operators split perfectly over the devices of a stage, nothing sent.

    The largest part of an operator's loops, operands and results is at least an even share of them; microbatches,
    recompute, collectives and the optimizer only add to that.

    Args:
        graph: bound with the global batch.
        cluster: the devices that are used.
        precision: what floats are cast to.
        num_stages: with pipeline stages, over the devices of one of them: what all stages together take.
        shares: what stages count where they are unlike.
    """
    count = cluster.num_devices // num_stages
    if shares:
        together = [replace(s, devices=tuple(_together(device, count) for device in s.devices)) for s in shares]
        return _both_ns(graph, StageCompute(cluster.device, precision, together))
    return least_on(graph, cluster.device, cluster.devices, precision, count)


def least_on(graph: Graph, slowest: Device, kinds: Sequence[Device], precision: str, count: int) -> tuple[int, int]:
    """What all operators of a graph take at least on so many devices that do equal parts, forward and backward.

    Args:
        graph: bound with the batch that they work on.
        slowest: of each figure the slowest of the devices (``slowest_device``).
        kinds: of the devices.
        precision: what floats are cast to.
        count: how many devices there are.
    """
    first, *unlike = (_together(device, count) for device in (slowest, *kinds))
    return _both_ns(graph, ComputeModel(first, precision, unlike))


def _both_ns(graph: Graph, compute: ComputeModel) -> tuple[int, int]:
    """What the operators of a graph take on one device, forward and backward."""
    kinds = Counter((operator.signature, made_gradients(graph, operator)) for operator in graph.operators)
    forward = backward = 0
    for (signature, needed), number in kinds.items():
        forward_ns, backward_ns = whole_operator_ns(compute, signature, needed)
        forward, backward = forward + number * forward_ns, backward + number * backward_ns
    return forward, backward


def _together(device: Device, count: int) -> Device:
    """One device that is as fast as ``count`` of them."""
    return replace(
        device,
        memory_bandwidth_bytes_per_s=device.memory_bandwidth_bytes_per_s * count,
        peak_flops={dtype: peak * count for dtype, peak in device.peak_flops.items()},
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Excess:
    """A figure that 64-bit tables cannot count."""

    what: str
    value: int
    most: int


def uncountable(sizes: Sizes, cluster: Cluster, precision: str) -> Excess | None:
    """What of a graph is too large to be counted in tables, if anything is."""
    compute = ComputeModel(cluster.device, precision)
    whole_bytes = 8 * _parameter_bytes(sizes, compute)
    whole_ns = 0
    for signature, count in sizes.signatures.items():
        num_bytes = sum(
            compute.tensor_bytes(operand.dtype, operand.num_elements)
            for operand in (*signature.inputs, *signature.outputs)
            if operand is not None
        )
        whole_bytes += count * num_bytes
        whole_ns += count * _operator_ns(signature, num_bytes, cluster, compute)
    most = min(LARGEST_WHOLE, LARGEST_SHARE * cluster.num_devices)
    for what, value in (("bytes", whole_bytes), ("ns", whole_ns)):
        if value > most:
            return Excess(what=what, value=value, most=most)
    return None


def unsendable(graph: Graph, cluster: Cluster, precision: str) -> Excess | None:
    """The largest tensor of a graph, where sending it is more than can be counted in tables."""
    compute = ComputeModel(cluster.device, precision)
    sizes = (compute.tensor_bytes(t.type.dtype, t.type.num_elements) for t in graph.tensors.values())
    largest = max(sizes, default=0)
    return Excess(what="bytes of one tensor", value=largest, most=LARGEST_SENT) if largest > LARGEST_SENT else None


def _operator_ns(signature: OperatorSignature, num_bytes: int, cluster: Cluster, compute: ComputeModel) -> int:
    """Forward and backward of an operator on one device, in whole numbers: sizes may be beyond any float."""
    device, record = cluster.device, record_of(signature)
    flops = 0
    if record.kind is ComputeKind.CONTRACTION:
        rule = rule_of(signature)
        flops = 4 * padded_points(rule, [factor.size for factor in rule.factors], device.matrix_padding)
    share = device.efficiency_permille(compute.peak_dtype, attention=is_attention(record))
    products = flops * 10**12 // (compute.peak_flops_per_s * share)
    traffic = num_bytes * 10**12 // (device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille)
    return 4 * (products + traffic + max(device.launch_ns, device.backward_floor_ns))
