"""175B on A100s in pipelines: what interleaving gains, and the planner's choice against the experts'.

GPT-3 175B (96 layers, hidden 12288, sequence 2048) as Megatron-LM runs it, in fp16. Simulated, not measured.

    python -m tests.bench.pipelines [--part gains|choice] [--json build/pipelines.json] [--markdown]

*Gains*: 1,024 devices, tp 8, pp 16, dp 8, batch 1,536, micro-batch 1, with 1, 2 and 3 parts on each stage (Narayanan et
al., SC'21). *Choice*: 64 devices, batch 64; the experts' plan is tp 8, pp 8, 3 parts on each stage, micro-batch 1,
sequence parallelism and selective recomputation (Korthikanti et al. 2022), and the planner chooses everything
(``open``), or all but the number of stages and parts, each of which is tried; and on 1,024 devices, where the experts'
plan is that of the gains.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tap_planner import api
from tap_planner.errors import InfeasibleError, LimitReachedError, UsageError
from tap_planner.plan import Overlap, PlanDocument, PlanOptions, PlanRequest
from tests.bench.instances import markdown, table, write_json
from tests.bench.measured_steps import MeasuredStep, Recompute
from tests.bench.megatron_gpt import GptShape, write_gpt
from tests.bench.planned_steps import plan_step

SHAPE = GptShape(layers=96, hidden=12288, heads=96, seq=2048, vocab=51200)
_EXPERTS = MeasuredStep(
    table="",
    part="",
    label="experts",
    shape=SHAPE,
    device="a100-sxm4-80gb",
    tp=8,
    dp=1,
    pp=8,
    chunks=3,
    micro_batch=1,
    global_batch=64,
    precision="fp16",
    recompute=Recompute.SELECTIVE,
    sequence_parallel=True,
    overlap=Overlap.DATA,
    measured_ns=0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Contest:
    """A cluster, the experts' plan for it, and the pipelines that the planner is asked for."""

    experts: MeasuredStep
    meshes: tuple[str, ...]


CONTESTS = (
    Contest(experts=_EXPERTS, meshes=("pp=4,dp=2,tp=8", "pp=8,tp=8", "pp=16,tp=4", "pp=8,dp=2,tp=4")),
    Contest(
        experts=replace(_EXPERTS, dp=8, pp=16, global_batch=1536),
        meshes=("pp=8,dp=16,tp=8", "pp=16,dp=8,tp=8", "pp=8,dp=32,tp=4"),
    ),
)
OPEN = "open"
"""Where the planner chooses the mesh, the number of stages and the schedule."""
SCHEDULES: tuple[tuple[str, int | None], ...] = (("1f1b", None), ("interleaved", 2), ("interleaved", 3), ("zbv", None))


def gains(folder: Path) -> Iterator[dict[str, object]]:
    """What parts on each stage gain, under the settings of both papers."""
    base = replace(_EXPERTS, dp=8, pp=16, global_batch=1536)
    for recompute, sequence in ((Recompute.FULL, False), (Recompute.SELECTIVE, True)):
        plain = 0
        for chunks in (1, 2, 3):
            step = replace(base, chunks=chunks, recompute=recompute, sequence_parallel=sequence)
            planned = plan_step(step, folder)
            ns = planned.predicted_ns()
            plain = plain or ns
            yield {
                "devices": step.num_devices,
                "recompute": recompute.value,
                "sequence": "split" if sequence else "whole",
                "parts": chunks,
                "step_s": round(ns / 1e9, 3),
                "gain_percent": round(100 * (plain / ns - 1), 1),
                "memory_gib": round(planned.memory_bytes / 2**30, 1),
                "fits": planned.fits,
            }


_COLUMNS = (
    *("devices", "by", "mesh", "schedule", "parts", "microbatches"),
    *("step_s", "percent", "memory_gib", "gap_percent", "seconds"),
)


def contest(given: Contest, folder: Path) -> Iterator[dict[str, object]]:
    """The experts' plan, and the planner's of each pipeline; without figures where none was found that fits."""
    step = given.experts
    planned = plan_step(step, folder)
    experts_ns = planned.predicted_ns()
    empty: dict[str, object] = {**dict.fromkeys(_COLUMNS), "devices": step.num_devices}
    yield empty | {
        "by": "experts",
        "mesh": f"pp={step.pp},{step.mesh}",
        "schedule": "interleaved",
        "parts": step.chunks,
        "microbatches": step.microbatches,
        "step_s": round(experts_ns / 1e9, 3),
        "percent": 0.0,
        "memory_gib": round(planned.memory_bytes / 2**30, 1),
    }
    asked = [(OPEN, "auto", None), *((mesh, *schedule) for mesh in given.meshes for schedule in SCHEDULES)]
    for mesh, schedule, chunks in asked:
        started = time.perf_counter()
        document = _plan(step, folder, mesh, schedule, chunks)
        row: dict[str, object] = {**empty, "by": "planner", "mesh": mesh, "schedule": schedule, "parts": chunks or 1}
        if document is not None:
            row |= _figures(document, experts_ns)
            if mesh == OPEN:
                row |= _chosen(document)
        yield row | {"seconds": round(time.perf_counter() - started, 1)}


def _chosen(document: PlanDocument) -> dict[str, object]:
    """The mesh, the schedule and the parts that the planner chose."""
    axes = ",".join(f"{axis.name}={axis.size}" for axis in document.mesh.axes)
    stages = document.pipeline.num_stages
    return {
        "by": "planner, open",
        "mesh": f"pp={stages},{axes}" if stages > 1 else axes,
        "schedule": document.pipeline.schedule,
        "parts": len(document.pipeline.stages) // stages,
    }


def _figures(document: PlanDocument, experts_ns: int) -> dict[str, object]:
    predicted, certificate = document.predicted, document.certificate
    return {
        "microbatches": document.pipeline.microbatches,
        "step_s": round(predicted.step_ns / 1e9, 3),
        "percent": round(100 * (predicted.step_ns / experts_ns - 1), 1),
        "memory_gib": round(predicted.total_memory_bytes / 2**30, 1),
        "gap_percent": round(100 * (certificate.objective_ns / certificate.bound_ns - 1), 2),
    }


def _plan(step: MeasuredStep, folder: Path, mesh: str, schedule: str, chunks: int | None) -> PlanDocument | None:
    """The planner's pipeline; None where none was found that fits."""
    options = PlanOptions(
        batch=step.global_batch,
        precision=step.precision,
        loss="cross-entropy",
        mesh=None if mesh == OPEN else mesh,
        stages="auto" if mesh == OPEN else 1,
        schedule=schedule,
        chunks=chunks,
        custom_rules=SHAPE.rules,
    )
    cluster = f"{step.num_devices // 8}x8:{step.device}"
    try:
        return api.make_plan(PlanRequest(model=write_gpt(folder, SHAPE), cluster=cluster, options=options))
    except (InfeasibleError, LimitReachedError, UsageError) as error:
        print(f"{mesh} {schedule}: {error.message}")
        return None


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Simulate, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("gains", "choice"), help="only one of them")
    parser.add_argument("--devices", type=int, choices=(64, 1024), help="of the choice, only this cluster")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--markdown", action="store_true", help="tables as Markdown")
    options = parser.parse_args(arguments)
    show = markdown if options.markdown else table
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        if options.part != "choice":
            result["gains"] = rows = list(gains(Path(folder)))
            print(show(rows) + "\n")
        if options.part != "gains":
            asked = [c for c in CONTESTS if options.devices in (None, c.experts.num_devices)]
            result["choice"] = rows = [row for each in asked for row in contest(each, Path(folder))]
            print(show(rows))
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
