"""Measuring a cluster: which processes run what, and what is made of their times."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tap_planner.cluster import Calibration, Cluster
from tap_planner.errors import ClusterError, UsageError

if TYPE_CHECKING:
    from tap_planner.apply import StepTimes, Team
    from tap_planner.calibration import Sample

__all__ = ["CalibrateRequest", "Progress", "calibrate"]

DEFAULT_BUDGET_S = 60.0
_DEVICE_SHARE = 0.5
"""Of the time budget, where there are collectives to be measured as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrateRequest:
    """A wish to measure a cluster."""

    cluster: str
    """Path of a cluster.yaml, or the shorthand."""
    nproc: int | None = None
    """Local processes to start; None: join a launcher's, else one for each device."""
    budget_s: float = DEFAULT_BUDGET_S
    """Time for measuring; starting processes and fitting come on top."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far measuring is."""

    stage: str
    """``device`` or ``collectives``."""
    done: int
    total: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """What was measured, in the order of samples and cases; None for what no time was left for."""

    steps: tuple[StepTimes | None, ...]
    collectives: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Measuring:
    """What one process does; it can be sent to another one."""

    cluster: Cluster
    budget_s: float
    links: bool
    """Whether collectives are measured."""

    def in_process(self, world: int, tell: Callable[[object], None]) -> _Times:
        """Measure as one of the processes that ``run_task`` started."""
        from tap_planner.apply import alone

        return self.run(alone("cpu"), tell)

    def run(self, team: Team, tell: Callable[[object], None]) -> _Times:
        """Measure as one process of a team."""
        from tap_planner.apply import CollectiveCase, measure_collectives, measure_steps
        from tap_planner.calibration import collectives_to_measure

        def progress(stage: str, done: int, total: int) -> None:
            if team.is_first:
                tell(Progress(stage, done, total))

        samples = samples_for(self.cluster)
        share = self.budget_s * (_DEVICE_SHARE if self.links else 1.0)
        steps = measure_steps([sample.program for sample in samples], team, share, partial(progress, "device"))
        collectives: list[float | None] = []
        if self.links:
            cases = [
                CollectiveCase(kind=row.kind, mesh_shape=row.mesh.shape, axes=row.axes, num_bytes=row.num_bytes)
                for row in collectives_to_measure(self.cluster)
            ]
            backend = "gloo" if self.cluster.library == "gloo" else "nccl"
            told = partial(progress, "collectives")
            stretch_ns = _between_collectives(steps)
            collectives = measure_collectives(cases, backend, team, self.budget_s - share, told, stretch_ns=stretch_ns)
        return _Times(steps=tuple(steps), collectives=tuple(collectives))


def _between_collectives(steps: Sequence[StepTimes | None]) -> float:
    """How long a step computes between two collectives, in ns: a tensor-parallel layer has two of them forward and
    two backward (Shoeybi et al., "Megatron-LM", 2019, figure 4). The first sample is such a layer."""
    first = next((step for step in steps if step is not None), None)
    return 0.0 if first is None else (first.forward_ns + first.backward_ns) / 4


def samples_for(cluster: Cluster) -> tuple[Sample, ...]:
    """The steps that are measured on a device: tiny layers for the floors, then everything else, small ones first."""
    from tap_planner.calibration import attention, elementwise, layer, product

    if cluster.library != "gloo":
        return samples_for_gpu(("bf16", "fp32"))
    samples = [layer(1, 8, 32, 2, "fp32"), layer(2, 16, 48, 4, "fp32"), layer(4, 16, 64, 4, "fp32")]
    samples += [product(size, size, size, "fp32") for size in (64, 128, 256)]
    samples += [elementwise(rows, columns, "fp32") for rows, columns in ((64, 256), (256, 512), (1024, 1024))]
    samples += [layer(4, 64, 128, 4, "fp32"), layer(8, 64, 256, 8, "fp32")]
    samples += [attention(4, 64, 4, 32, "fp32"), attention(8, 128, 4, 64, "fp32")]
    samples += [product(rows, 512, 512, "fp32") for rows in (8, 64, 512)]
    samples += [product(256, 256, 256, "fp64"), elementwise(256, 512, "fp64"), layer(4, 64, 128, 4, "fp64")]
    return (*samples, product(1024, 1024, 1024, "fp32"))


def samples_for_gpu(precisions: tuple[str, ...]) -> tuple[Sample, ...]:
    """The same for a GPU."""
    from tap_planner.calibration import attention, elementwise, fused_attention, layer, product

    samples = [layer(1, 8, 32, 2, precisions[0]), layer(2, 16, 64, 4, precisions[0]), layer(4, 32, 128, 4, "fp32")]
    for precision in precisions:
        samples += [product(size, size, size, precision) for size in (512, 1024, 2048, 4096, 8192)]
        samples += [product(rows, 4096, 4096, precision) for rows in (64, 512)]
        samples += [product(8192, 128, 8192, precision), product(4096, 8192, 1024, precision)]
        samples += [elementwise(rows, 4096, precision) for rows in (512, 4096, 16384)]
        samples += [attention(8, 1024, 16, 64, precision), attention(4, 2048, 16, 128, precision)]
        samples += [fused_attention(8, 1024, 16, 64, precision), fused_attention(4, 2048, 16, 128, precision)]
        samples += [layer(8, 1024, 2048, 16, precision)]
    return tuple(samples)


def calibrate(
    request: CalibrateRequest, cluster: Cluster, on_progress: Callable[[Progress], None]
) -> Calibration | None:
    """Measure and fit; None on processes of a launcher other than the first.

    Args:
        request: what is asked.
        cluster: of the request.
        on_progress: called while measuring, on the first process.

    Raises:
        ClusterError: nodes are unlike.
        UsageError: the number of processes does not fit the cluster.
        ApplyError: there is no GPU, or a process failed.
    """
    if cluster.node_groups:
        raise ClusterError(
            f"{request.cluster}: the nodes are unlike (node_groups): a calibration is of one kind of device",
            hint="Measure a part of the cluster with equal nodes, described in a file of its own.",
        )

    def tell(value: object) -> None:
        if isinstance(value, Progress):
            on_progress(value)

    measuring = _Measuring(cluster=cluster, budget_s=request.budget_s, links=cluster.num_devices > 1)
    times = _measure(request, measuring, tell)
    return None if times is None else _fitted(measuring, times)


def _measure(request: CalibrateRequest, measuring: _Measuring, tell: Callable[[object], None]) -> _Times | None:
    cluster, devices = measuring.cluster, measuring.cluster.num_devices
    if request.nproc is None and "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _joined(measuring, tell)
    if cluster.library == "gloo":
        count = devices if request.nproc is None else request.nproc
        _check_local(cluster, count)
        from tap_planner.apply import run_task

        measuring = replace(measuring, links=count > 1)
        first = run_task(measuring.in_process, count, heard=tell)[0]
        assert isinstance(first, _Times)
        return first
    if request.nproc not in (None, 1) or (devices > 1 and request.nproc is None):
        raise UsageError(
            f"the cluster has {devices} GPUs: each needs a process of a launcher",
            hint="torchrun --nproc-per-node GPUS $(which tap-calibrate) ..., or --nproc 1 for the device alone",
        )
    from tap_planner.apply import alone

    return replace(measuring, links=False).run(alone("cuda"), tell)


def _check_local(cluster: Cluster, count: int) -> None:
    """Local processes can stand for one node, or for a device alone."""
    if count == 1:
        return
    nodes = math.prod(level.size for level in cluster.levels[1:])
    if nodes > 1:
        raise UsageError(
            f"the cluster has {nodes} nodes: processes of this machine cannot measure the links between them",
            hint="Start tap-calibrate with torchrun on every node, or give --nproc 1 for the device alone.",
        )
    if count != cluster.num_devices:
        raise UsageError(
            f"--nproc {count}: the cluster has {cluster.num_devices} devices, expected as many processes, or 1",
            hint=f"Give --nproc {cluster.num_devices}, or describe {count} devices in the cluster file.",
        )


def _joined(measuring: _Measuring, tell: Callable[[object], None]) -> _Times | None:
    """As one of a launcher's processes."""
    from tap_planner.apply import joined_team

    world = int(os.environ["WORLD_SIZE"])
    devices = measuring.cluster.num_devices
    if world != devices:
        raise UsageError(
            f"the launcher started {world} processes, the cluster has {devices} devices",
            hint=f"Start {devices} processes, or describe {world} devices in the cluster file.",
        )
    with joined_team(world, "gloo" if measuring.cluster.library == "gloo" else "nccl") as team:
        times = measuring.run(team, tell)
        team.wait_for_all()
        return times if team.is_first else None


def _fitted(measuring: _Measuring, times: _Times) -> Calibration:
    from tap_planner.calibration import MeasuredStep, collectives_to_measure, fit_device, fit_links

    cluster = measuring.cluster
    steps = [
        MeasuredStep(sample=sample, forward_ns=time.forward_ns, backward_ns=time.backward_ns)
        for sample, time in zip(samples_for(cluster), times.steps, strict=True)
        if time is not None
    ]
    if not steps:
        raise UsageError("no time was left to measure anything", hint="Give more time with --budget.")
    device, fit = fit_device(cluster.device, steps)
    rows = [
        replace(row, ns=ns)
        for row, ns in zip(collectives_to_measure(cluster), times.collectives, strict=False)
        if ns is not None
    ]
    if not rows:
        return Calibration(device=device, library=cluster.library, fit=fit)
    levels, launch_ns, links = fit_links(cluster, rows)
    return Calibration(
        device=device, library=cluster.library, collective_launch_ns=launch_ns, levels=levels, fit=(*fit, *links)
    )
