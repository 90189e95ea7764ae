"""Measured times of training steps, one table of tests/data/measurements each.

All three tables name what ran: sizes of the model, devices, tensor, data and pipeline parallelism, micro-batch. What
they do not name is set down here, with its source.
"""

from __future__ import annotations

import csv
import enum
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tap_planner.cluster import Cluster, load_cluster, parse_cluster
from tap_planner.plan import Overlap
from tests.bench.megatron_gpt import GptShape, Kernels

MEASUREMENTS = Path(__file__).parents[1] / "data" / "measurements"
ITERATIONS = "megatron_deepspeed_a100_iterations.csv"
THROUGHPUT = "megatron_throughput.csv"
FSDP = "llmfoundry_fsdp_throughput.csv"
FITTED = "1 node, 12 or 24 layers"
"""The part of ``ITERATIONS`` that constants are fitted on."""

_MPT_VOCABULARY = 50368
"""llm-foundry, scripts/train/yamls/pretrain/mpt-*.yaml."""
_LINKS: Mapping[str, str] = {
    "800 Gb/s a node": "inter_node: {bandwidth: 200 Gbit/s, nics_per_node: 4}",
    "1600 Gb/s a node": "inter_node: {bandwidth: 200 Gbit/s, nics_per_node: 8}",
    "DGX-2": "intra_node: {kind: switch, bandwidth: 150 GB/s}",
}
"""Links that are not the catalogue's, as cluster.yaml has them. 800 Gb/s: Bang et al., "vTrain", MICRO'24, section 4;
1600 Gb/s over RoCE: llm-foundry, scripts/train/benchmarking/README.md; DGX-2: NVSwitch joins its 16 V100."""


class Recompute(enum.Enum):
    """What a row says of activation checkpointing."""

    NONE = "none"
    SELECTIVE = "selective"
    FULL = "full"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One row: what ran, and what it took."""

    table: str
    part: str
    """What is reported together: ``1 node``, ``64``, ``tp > 8``, ..."""
    label: str
    """Model and settings, for people."""
    shape: GptShape
    device: str
    """Of the catalogue."""
    links: str | None = None
    """Key of ``_LINKS``; None: the catalogue's."""
    devices_per_node: int = 8
    tp: int
    dp: int
    pp: int = 1
    chunks: int = 1
    """Parts of the model on each stage; above 1 the schedule is the interleaved one."""
    micro_batch: int
    is_micro_batch_assumed: bool = False
    """The table does not say: as many samples as fit, at most this many."""
    global_batch: int
    precision: str
    zero: int = 0
    recompute: Recompute = Recompute.FULL
    sequence_parallel: bool = False
    scatter: bool = True
    """Whether tensor-parallel ranks, which hold the same activation, each send a part of it to the next stage."""
    overlap: Overlap = Overlap.NONE
    """What the library hides behind computation."""
    measured_ns: int

    @property
    def num_devices(self) -> int:
        """All of them."""
        return self.tp * self.dp * self.pp

    @property
    def microbatches(self) -> int:
        """Micro-batches of a step, on each data-parallel rank."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def fused_softmax(self) -> bool:
        """Whether scale, mask and softmax are one kernel: no part of the model, but of how it ran."""
        return self.shape.fuses_softmax(tp=self.tp, micro_batch=self.micro_batch)

    @property
    def mesh(self) -> str:
        """As ``--mesh``, of one stage."""
        axes = [f"{name}={size}" for name, size in (("dp", self.dp), ("tp", self.tp)) if size > 1]
        return ",".join(axes) or "dp=1"

    def cluster(self, num_devices: int | None = None) -> Cluster:
        """Nodes that the devices (or so many devices) fill, or a part of one node."""
        count = num_devices or self.num_devices
        per_node = min(self.devices_per_node, count)
        nodes = -(-count // per_node)
        if self.links is None:
            return load_cluster(f"{nodes}x{per_node}:{self.device}")
        text = f"device: {self.device}\nnodes: {nodes}\ndevices_per_node: {per_node}\n{_LINKS[self.links]}\n"
        return parse_cluster(text, file=self.links)


def read_iterations(folder: Path) -> tuple[MeasuredStep, ...]:
    """Megatron-DeepSpeed on A100-80GB: fp16, full recompute, plain data parallelism without overlap, no sequence
    parallelism, 1F1B (vTrain's validation data). DeepSpeed's pipeline engine partitions what tensor-parallel ranks
    send to other stages.

    Args:
        folder: holds the table.
    """
    return tuple(
        MeasuredStep(
            table=ITERATIONS,
            part=_iterations_part(row),
            label="h{hidden} l{layers} tp{tp} dp{dp} pp{pp} m{micro_batch}/{global_batch}".format(**row),
            shape=_shape(row, vocab=51200),
            device="a100-sxm4-80gb",
            links="800 Gb/s a node",
            tp=int(row["tp"]),
            dp=int(row["dp"]),
            pp=int(row["pp"]),
            micro_batch=int(row["micro_batch"]),
            global_batch=int(row["global_batch"]),
            precision="fp16",
            measured_ns=_ns(row["iter_time_ms_measured"], 1e6),
        )
        for row in _rows(folder / ITERATIONS)
    )


def _iterations_part(row: Mapping[str, str]) -> str:
    staged = ", pipeline" if int(row["pp"]) > 1 else ""
    if int(row["tp"]) > 8:
        return f"tp > 8{staged}"
    if row["set"] == "multi":
        return f"{row['n_gpus']} devices{staged}"
    if staged:
        return f"1 node{staged}"
    return FITTED if row["layers"] in ("12", "24") else "1 node, other layers"


_MEGATRON_DEVICES: Mapping[str, tuple[str, int]] = {
    "V100-32GB": ("v100-sxm2-32gb", 16),
    "A100-40GB": ("a100-sxm4-40gb", 8),
    "A100-80GB": ("a100-sxm4-80gb", 8),
    "H100-80GB": ("h100-sxm5-80gb", 8),
    "V100 (8x)": ("v100-sxm2-16gb", 8),
}
"""How the table's devices begin -> catalogue entry, devices a node (a DGX-2 has 16)."""


_WITH_TORCH_DDP = 8.0
"""Billions of parameters from which Megatron-LM's README of 2020 runs torch's data parallelism, which reduces gradients
behind the backward pass: it scales 8.3 billion on 512 devices at 76 % instead of 60, and is slower for 1.2 and 2.5
billion. Its 8.67 billion, 8 ways tensor-parallel, take 37 ms longer on 1024 devices than on 8, where 2.2 GB of
gradients a device take 173 ms over the one NIC that it has."""


def read_throughput(folder: Path) -> tuple[MeasuredStep, ...]:
    """Megatron-LM's published steps: rows that name sizes, degrees and a time (or TFLOP/s).

    What the table leaves out: pipelines without a micro-batch ran one sample at a time; without a pipeline the whole
    batch of a rank ran at once, or as many of its samples as fit. Megatron-Core 0.8 has fused attention and hides
    data-parallel, tensor-parallel and pipeline communication (its README: ``--overlap-grad-reduce
    --overlap-param-gather --tp-comm-overlap``). That takes the distributed optimizer (ZeRO 1), sequence parallelism,
    and interleaved parts, of one layer each; as many samples at a time as fit, of those that this schedule can run; and
    that nothing is recomputed: these are assumed. Of Megatron-LM's README the largest model overlaps gradients
    (``_WITH_TORCH_DDP``). The others overlap nothing. Tensor-parallel ranks share out what they send to other stages
    (SC'21, section 4.1), but in Alpa's row.

    Args:
        folder: holds the table.
    """
    return tuple(
        _throughput_step(row)
        for row in _rows(folder / THROUGHPUT)
        if row["pp"] and row["hidden"] and row["dp"] and (row["iter_time_s"] or row["tflops_per_gpu"])
    )


def _throughput_step(row: Mapping[str, str]) -> MeasuredStep:
    core = "Core" in row["study"]
    hides = "README Sept-2020" in row["study"] and float(row["params_B"]) >= _WITH_TORCH_DDP
    dp, pp = int(row["dp"]), int(row["pp"])
    shape = _shape(row, vocab=int(row["vocab"]), kernels=Kernels.FLASH if core else Kernels.MEGATRON)
    device, per_node = next(known for name, known in _MEGATRON_DEVICES.items() if row["gpu"].startswith(name))
    batch = int(row["global_batch"])
    recompute = Recompute(row["recompute"] or "none")
    if row["iter_time_s"]:
        measured_ns = _ns(row["iter_time_s"], 1e9)
    else:  # model FLOP/s
        flops = shape.training_flops(batch, recompute=recompute is Recompute.FULL)
        measured_ns = round(flops / (float(row["tflops_per_gpu"]) * int(row["n_gpus"]) * 1e3))
    return MeasuredStep(
        table=THROUGHPUT,
        part=row["study"] + (", pipeline" if pp > 1 else ""),
        label=f"{row['model']} {row['gpu']} tp{row['tp']} dp{dp} pp{pp} {recompute.value}",
        shape=shape,
        device=device,
        devices_per_node=per_node,
        links="DGX-2" if "DGX-2" in row["gpu"] else None,
        tp=int(row["tp"]),
        dp=dp,
        pp=pp,
        chunks=int(row["vpp_chunks"] or (shape.layers // pp if core and pp > 1 else 1)),
        micro_batch=int(row["micro_batch"] or (batch // dp // pp if core or pp == 1 else 1)),
        is_micro_batch_assumed=not row["micro_batch"] and (core or pp == 1),
        global_batch=batch,
        precision="bf16" if core else "fp16",
        zero=1 if core else 0,
        recompute=recompute,
        sequence_parallel=core or row["seq_parallel"] == "yes",
        scatter="Alpa" not in row["study"],
        overlap=Overlap.ALL if core else Overlap.DATA if hides else Overlap.NONE,
        measured_ns=measured_ns,
    )


_FSDP_DEVICES: Mapping[str, str] = {"a100_40gb": "a100-sxm4-40gb", "h100_80gb": "h100-sxm5-80gb"}
_ZERO_LEVELS: Mapping[str, int] = {"FULL_SHARD": 3, "SHARD_GRAD_OP": 2}


def read_fsdp(folder: Path) -> tuple[MeasuredStep, ...]:
    """MPT under PyTorch's FSDP (llm-foundry): a step is the tokens of its batch over the measured tokens a second.

    Args:
        folder: holds the table.
    """
    return tuple(map(_fsdp_step, _rows(folder / FSDP)))


def _fsdp_step(row: Mapping[str, str]) -> MeasuredStep:
    devices, batch, seq = int(row["n_gpus"]), int(row["global_batch_seqs"]), int(row["seq"])
    nodes = "1 node" if devices <= 8 else "several nodes"
    special = ["FP8"] if "fp8" in row["precision"] else []
    if row["sharding"] != "FULL_SHARD":
        special.append(row["sharding"])
    return MeasuredStep(
        table=FSDP,
        part=", ".join([row["gpu"], *(special or [nodes])]),
        label=f"{row['model']} s{seq} n{devices} m{row['micro_batch']}x{row['grad_accum']} ckpt={row['act_ckpt']}",
        shape=_shape(row, vocab=_MPT_VOCABULARY, kernels=Kernels.FLASH),
        device=_FSDP_DEVICES[row["gpu"]],
        links="1600 Gb/s a node" if row["gpu"] == "a100_40gb" else None,
        tp=1,
        dp=devices,
        micro_batch=int(row["micro_batch"]),
        global_batch=batch,
        precision="bf16",
        zero=_ZERO_LEVELS[row["sharding"]],
        recompute=Recompute.FULL if row["act_ckpt"] == "True" else Recompute.NONE,
        overlap=Overlap.DATA,
        measured_ns=round(1e9 * batch * seq / float(row["tokens_per_s"])),
    )


def _rows(path: Path) -> Iterator[Mapping[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def _shape(row: Mapping[str, str], *, vocab: int, kernels: Kernels = Kernels.MEGATRON) -> GptShape:
    hidden, heads, layers, seq = (int(row[name]) for name in ("hidden", "heads", "layers", "seq"))
    return GptShape(hidden=hidden, heads=heads, layers=layers, seq=seq, vocab=vocab, kernels=kernels)


def _ns(text: str, unit: float) -> int:
    return round(float(text) * unit)
