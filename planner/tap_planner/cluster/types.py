"""Devices, levels and clusters as values."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

LEVEL_KINDS = ("switch", "ring", "mesh", "pcie")
LIBRARIES = ("nccl", "rccl", "gloo")
ALGORITHMS = ("ring", "tree", "hierarchical", "nvls", "pairwise", "direct")
"""Of collectives, as plans and paces name them; ``cost.collectives`` says what each is."""
TRANSPORTS = ("infiniband", "ethernet", "efa")
"""What carries the traffic between nodes, where that is known."""
PEAK_DTYPES = ("float64", "float32", "tensorfloat32", "float16", "bfloat16", "float8", "float4", "int8")

DEFAULT_LAUNCH_NS = 0
"""Floor of an operator's time on a device that a cluster.yaml describes without saying: none is assumed. Those of the
catalogue's devices are fitted (docs/cost-model.md)."""
DEFAULT_MATRIX_EFFICIENCY_PERMILLE = 650
"""Share of the dense peak that large matrix products reach. Megatron-LM reports 44-52 % of peak for whole steps
with communication and bubbles (Narayanan et al., SC'21, table 1) and up to 56 % model FLOPs utilisation
(Korthikanti et al., 2022, table 5); the products alone, which is what is priced here, lie above that."""
DEFAULT_MEMORY_EFFICIENCY_PERMILLE = 800
"""Share of the memory bandwidth that streaming kernels reach; an assumption until it is measured."""
MAX_DEVICES = 1 << 20
"""Largest cluster that is read; more is taken for a slip."""
MAX_PADDING = 1024
"""Largest multiple that sides of matrix products are filled up to; more is taken for a slip."""
STAND_INS: Mapping[str, tuple[tuple[str, int], ...]] = {
    "float64": (("float64", 1), ("float32", 2)),
    "float32": (("float32", 1), ("tensorfloat32", 1)),
    "float16": (("float16", 1), ("bfloat16", 1), ("float32", 1)),
    "bfloat16": (("bfloat16", 1), ("float16", 1), ("float32", 1)),
}
"""Peaks that serve an element type, in order, with what they are divided by. Where a device's float64 peak is unknown,
half of the float32 peak stands in (the ratio of V100, A100 and H100 without tensor cores): fp64 is for verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator (or CPU core) as the cost model sees it."""

    name: str
    memory_bytes: int
    memory_bandwidth_bytes_per_s: int
    peak_flops: Mapping[str, int] = field(hash=False)
    """Dense peak in FLOP/s by element type (``float32``, ``tensorfloat32``, ``bfloat16``, ...)."""
    launch_ns: int = DEFAULT_LAUNCH_NS
    """Floor of every operator's time forward: what the host takes to launch it."""
    backward_launch_ns: int | None = None
    """The same backward, where automatic differentiation launches several kernels; None: as forward."""
    matrix_efficiency_permille: int = DEFAULT_MATRIX_EFFICIENCY_PERMILLE
    """Share of the peak that matrix products reach."""
    own_efficiency_permille: Mapping[str, int] = field(default_factory=dict, hash=False)
    """The same of element types whose share is another one: without matrix units products come nearer to their peak."""
    attention_efficiency_permille: int | None = None
    """Share of the peak that fused attention reaches; None: as matrix products."""
    memory_efficiency_permille: int = DEFAULT_MEMORY_EFFICIENCY_PERMILLE
    """Share of the memory bandwidth that other operators reach."""
    matrix_padding: int = 1
    """Rows, columns and terms of matrix products are computed in multiples of this many."""
    source: str = ""
    """Where the figures come from."""

    @property
    def backward_floor_ns(self) -> int:
        """Floor of every operator's time backward."""
        return self.launch_ns if self.backward_launch_ns is None else self.backward_launch_ns

    def serving_peak(self, dtype: str) -> tuple[str, int] | None:
        """(element type whose peak serves ``dtype``, FLOP/s), see ``STAND_INS``; None where the device has none."""
        for known, divisor in STAND_INS.get(dtype, ((dtype, 1),)):
            if known in self.peak_flops:
                return known, self.peak_flops[known] // divisor
        return None

    def efficiency_permille(self, dtype: str, *, attention: bool = False) -> int:
        """Share of its peak that matrix products, or fused attention, of an element type reach."""
        if attention and self.attention_efficiency_permille is not None:
            return self.attention_efficiency_permille
        return self.own_efficiency_permille.get(dtype, self.matrix_efficiency_permille)

    def matrix_rate(self, dtype: str) -> int | None:
        """Permille of FLOP/s that matrix products of an element type reach; None where no peak serves it."""
        found = self.serving_peak(dtype)
        return None if found is None else found[1] * self.efficiency_permille(found[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How near an algorithm comes to the links of a level."""

    efficiency_permille: int = 1000
    """Share of the bandwidth that it reaches with large payloads."""
    latency_ns: int = 0
    """What each of its steps takes beside the latency of the link: protocol, synchronisation, the library's kernels."""


USUAL_PACE = Pace()
"""The whole bandwidth, and the latency of the link alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the topology: ``size`` children (devices, or domains of the level below) joined by links.

    A child has ``nics`` links of ``bandwidth_bytes_per_s`` each, per direction; they are shared by everything that
    leaves the child.
    """

    name: str
    size: int
    kind: str
    """``switch``, ``ring``, ``mesh`` (each pair has its own link, 1/(size - 1) of the bandwidth) or ``pcie``."""
    bandwidth_bytes_per_s: int
    latency_ns: int
    nics: int = 1
    """Links per child; always 1 at level 0, whose children are devices."""
    oversubscription_permille: int = 1000
    """1000 is a full-bisection network; 2000 halves what each child can use when all speak."""
    reduces: bool = False
    """Whether the switch itself sums what passes (NVLink SHARP); level 0 only."""
    host_bandwidth_bytes_per_s: int | None = None
    """What may pass between all children of one domain per second, where it all goes through one host (PCIe)."""
    group_bandwidths: tuple[tuple[int, int], ...] = ()
    """(group size, what a device of such a group may send per second along rings), where it depends on the size
    (hybrid cube mesh); ascending. Sizes between take the next smaller entry's. Level 0 only."""
    exchange_bandwidths: tuple[tuple[int, int], ...] = ()
    """The same where every device sends to every other (all_to_all); empty: as along rings."""
    transport: str = ""
    """One of ``TRANSPORTS``, or nothing; it tells which paces are usual. Not at level 0."""
    paces: tuple[tuple[str, Pace], ...] = ()
    """By algorithm, sorted; those that are not named have ``USUAL_PACE``."""

    def pace(self, algorithm: str) -> Pace:
        """Pace of an algorithm."""
        return next((pace for name, pace in self.paces if name == algorithm), USUAL_PACE)

    def paced(self, paces: Mapping[str, Pace]) -> Level:
        """The level with these paces by algorithm; algorithms that are not named keep theirs."""
        return replace(self, paces=tuple(sorted((dict(self.paces) | dict(paces)).items())))

    def at(self, bandwidth_bytes_per_s: int) -> Level:
        """The level with one bandwidth for groups of any size, and no limit of a host."""
        return replace(
            self,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            group_bandwidths=(),
            exchange_bandwidths=(),
            host_bandwidth_bytes_per_s=None,
        )

    def device_bandwidth(self, peers: int, *, exchange: bool = False) -> int:
        """What one child may send per second in a group of ``peers`` children (over one of its links)."""
        table = (self.exchange_bandwidths if exchange else ()) or self.group_bandwidths
        smaller = [bandwidth for size, bandwidth in table if size <= peers]
        return smaller[-1] if smaller else self.bandwidth_bytes_per_s

    @property
    def child_bandwidth_bytes_per_s(self) -> int:
        """What may leave one child per second, when all children speak at once."""
        return self.bandwidth_bytes_per_s * self.nics * 1000 // self.oversubscription_permille


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """Nodes that are alike, in a cluster of unlike nodes."""

    name: str
    nodes: int
    devices_per_node: int
    device: Device
    intra_node: Level
    """Level 0 of these nodes."""
    nics_per_node: int

    @property
    def num_devices(self) -> int:
        """Devices of the group."""
        return self.nodes * self.devices_per_node


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Devices on a tree of levels, inner to outer; level 0 is the node.

    Unlike nodes are told by ``node_groups``: ranks run through the groups in order, node by node. Then ``device`` is
    the pace of equal parts (``slowest_device`` of the groups) and ``levels`` holds two summaries: the node (most
    devices, slowest links) and the network (all nodes, fewest NICs); ``link`` gives the true links of a group.
    """

    name: str
    library: str
    """Communication library: ``nccl``, ``rccl`` or ``gloo``."""
    device: Device
    levels: tuple[Level, ...]
    reserved_memory_bytes: int = 0
    """Memory of each device that the plan may not use."""
    collective_buffers_bytes: int = 0
    """Memory of each device that one communicator of the library takes; it is part of the plan's."""
    collective_launch_ns: int = 0
    """What every collective takes before anything is sent."""
    node_groups: tuple[NodeGroup, ...] = ()
    """Two or more, where nodes are unlike; else empty."""

    @property
    def num_devices(self) -> int:
        """Number of devices of the whole cluster."""
        if self.node_groups:
            return sum(group.num_devices for group in self.node_groups)
        count = 1
        for level in self.levels:
            count *= level.size
        return count

    @property
    def usable_memory_bytes(self) -> int:
        """Memory of one device that a plan may use; of the smallest, where they are unlike, as all hold equal parts."""
        return self.device.memory_bytes - self.reserved_memory_bytes

    @property
    def devices(self) -> tuple[Device, ...]:
        """The kinds of device, one per node group."""
        return tuple(group.device for group in self.node_groups) or (self.device,)

    def link(self, level: int, group: int = 0) -> Level:
        """Links of a level as nodes of ``node_groups[group]`` have them."""
        if not self.node_groups:
            return self.levels[level]
        kind = self.node_groups[group]
        return kind.intra_node if level == 0 else replace(self.levels[level], nics=kind.nics_per_node)

    def node_sizes(self) -> np.ndarray:
        """[nodes] devices of each node of ``node_groups``."""
        sizes = [group.devices_per_node for group in self.node_groups]
        return np.repeat(np.array(sizes, dtype=np.int64), [group.nodes for group in self.node_groups])

    def node_of_ranks(self) -> np.ndarray:
        """[devices] node of each rank."""
        if not self.node_groups:
            return np.arange(self.num_devices, dtype=np.int64) // self.levels[0].size
        sizes = self.node_sizes()
        return np.repeat(np.arange(len(sizes), dtype=np.int64), sizes)

    def kind_of_ranks(self) -> np.ndarray:
        """[devices] kind of device of each rank, index into ``devices``."""
        counts = [group.num_devices for group in self.node_groups] or [self.num_devices]
        return np.repeat(np.arange(len(counts), dtype=np.int64), counts)

    def places(self) -> tuple[tuple[int, ...], ...]:
        """Where each rank lies: index per level, outermost first, as (node, device)."""
        if self.node_groups:
            sizes = self.node_sizes().tolist()
            return tuple((node, device) for node, size in enumerate(sizes) for device in range(size))
        return tuple(itertools.product(*(range(level.size) for level in reversed(self.levels))))


def slowest_device(devices: Sequence[Device]) -> Device:
    """The pace and the room of equal parts on unlike devices: per quantity the least of what each device reaches.

    A step of equal parts ends with its slowest rank, and every rank must hold its part. Where one device has the slower
    products and another the slower memory, operators that need both are faster on either than here: what they take is
    the longest on any of the devices (``cost.ComputeModel``). Where element types are missing on a device, what stands
    in for them counts (``STAND_INS``).
    """
    if len(devices) == 1:
        return devices[0]
    matrix = max(device.matrix_efficiency_permille for device in devices)
    memory = max(device.memory_efficiency_permille for device in devices)
    peaks: dict[str, int] = {}
    for dtype in PEAK_DTYPES:
        rates = [rate for device in devices if (rate := device.matrix_rate(dtype)) is not None]
        if len(rates) == len(devices):
            peaks[dtype] = min(rates) // matrix
    return Device(
        name=" + ".join(dict.fromkeys(device.name for device in devices)),
        memory_bytes=min(device.memory_bytes for device in devices),
        memory_bandwidth_bytes_per_s=min(
            device.memory_bandwidth_bytes_per_s * device.memory_efficiency_permille for device in devices
        )
        // memory,
        peak_flops=peaks,
        launch_ns=max(device.launch_ns for device in devices),
        backward_launch_ns=max(device.backward_floor_ns for device in devices),
        matrix_padding=max(device.matrix_padding for device in devices),
        matrix_efficiency_permille=matrix,
        attention_efficiency_permille=_least_share_of_attention(devices, matrix),
        memory_efficiency_permille=memory,
        source="the least of each figure, for equal parts on unlike devices",
    )


def _least_share_of_attention(devices: Sequence[Device], matrix: int) -> int | None:
    """Of peaks at which products reach the share ``matrix``: what attention reaches where it comes least near to the
    products of its device; None where it takes as long as they do everywhere."""
    ratios = [
        Fraction(device.attention_efficiency_permille, device.matrix_efficiency_permille)
        for device in devices
        if device.attention_efficiency_permille is not None
    ]
    return max(int(matrix * min(ratios)), 1) if ratios else None
