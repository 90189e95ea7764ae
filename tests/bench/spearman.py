"""Predicted against measured step times, on CPU processes that were calibrated first.

    python -m tests.bench.spearman [--json] [--budget 60s] [--steps 10] [--calibration FILE]

``tap-calibrate`` measures four gloo processes; then six named plans of two GPTs, each predicted at least 15 % apart
from the others, are run by what ``tap-apply`` runs, on four processes. A step's time is the mean over the processes, a
plan's the median of its steps; the plans of a model take turns step by step, so that what else the machine does falls
on all alike. Shown are both times, Spearman's rank correlation and the errors of the predictions.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch.distributed as dist

from tap_planner import api
from tap_planner.apply import ApplyJob, ProcessGroupCommunicator, run_task
from tap_planner.apply.jobs import JobRunner, prepare
from tap_planner.apply.launch import Tell
from tap_planner.errors import TapError
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest, expand, parse_constraint
from tap_planner.requests import bind_options
from tests.bench.expert_plans import EXPERTS, Anatomy
from tests.bench.instances import DATA, markdown
from tests.search.models import decoder

RANKS = 4
APART = 1.15
"""Predicted times of two plans differ at least by this factor."""
WANTED = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """What is trained."""

    name: str
    path: Path
    batch: int
    dims: Mapping[str, int]
    anatomy: Anatomy


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """A plan that people would write, as options and rules."""

    name: str
    mesh: str
    zero: int = 0
    recompute: str = "none"
    microbatches: int = 1
    rules: tuple[str, ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan's two times."""

    model: str
    plan: str
    predicted_ms: float
    measured_ms: float
    error: float
    """predicted / measured - 1"""


def models(folder: Path) -> tuple[Model, ...]:
    """GPT-2 tiny as exported, and a wider and deeper GPT, written into ``folder``."""
    small = folder / "gpt_small.onnx"
    onnx.save(decoder("gpt", layers=4, d=192, heads=4, ff=768).proto, str(small))
    tiny = Anatomy(
        column=("*.attn.c_attn.weight", "*.mlp.c_fc.weight"),
        row=("*.attn.c_proj.weight", "*.mlp.c_proj.weight"),
        norm=("*.ln_?.weight",),
    )
    wide = Anatomy(column=("l*.q.w", "l*.k.w", "l*.v.w", "l*.up.w"), row=("l*.o.w", "l*.down.w"), norm=("*.scale",))
    return (
        Model(name="gpt2_tiny", path=DATA / "gpt2_tiny.onnx", batch=8, dims={"seq": 32}, anatomy=tiny),
        Model(name="gpt_small", path=small, batch=16, dims={"seq": 64}, anatomy=wide),
    )


def named_plans(anatomy: Anatomy) -> tuple[Named, ...]:
    """Candidates, those that most people know first."""
    experts = {expert.name: expert for expert in EXPERTS}
    data = experts["DDP"].rules(anatomy)
    tensor = experts["Megatron TP"].rules(anatomy)
    return (
        Named(name="DDP", mesh="dp=4", rules=data),
        Named(name="Megatron TP", mesh="tp=4", rules=tensor),
        Named(name="FSDP", mesh="dp=4", zero=3, rules=data),
        Named(name="TP x DP", mesh="dp=2,tp=2", zero=0, rules=tensor),
        Named(name="replicated", mesh="dp=4", rules=("*: dp=none",)),
        Named(name="DDP, recompute full", mesh="dp=4", recompute="full", rules=data),
        Named(name="FSDP, 2 microbatches", mesh="dp=4", zero=3, microbatches=2, rules=data),
        Named(name="TP x DP, 4 microbatches", mesh="dp=2,tp=2", microbatches=4, rules=tensor),
        Named(name="DDP, 2 microbatches", mesh="dp=4", microbatches=2, rules=data),
        Named(name="Megatron TP, recompute full", mesh="tp=4", recompute="full", rules=tensor),
        Named(name="Megatron TP, 4 microbatches", mesh="tp=4", microbatches=4, rules=tensor),
    )


def planned(model: Model, plan: Named, cluster: str) -> PlanDocument | None:
    """The best plan of a name; None where the model has none."""
    rules = [parse_constraint(rule) for rule in plan.rules]
    options = PlanOptions(
        batch=model.batch,
        precision="fp32",
        loss="mean",
        dims=dict(model.dims),
        mesh=plan.mesh,
        zero=plan.zero,
        recompute=plan.recompute,
        microbatches=plan.microbatches,
        max_memory_bytes="none",
        constraints=tuple(rule for rule in rules if rule.axis is None or f"{rule.axis}=" in plan.mesh),
    )
    try:
        return api.make_plan(PlanRequest(model=model.path, cluster=cluster, options=options))
    except TapError as error:
        print(f"{model.name}, {plan.name}: {error.message}", file=sys.stderr)
        return None


def chosen(model: Model, cluster: str) -> list[tuple[Named, PlanDocument]]:
    """The first candidates whose predictions are far enough from those of all before."""
    found: list[tuple[Named, PlanDocument]] = []
    for plan in named_plans(model.anatomy):
        document = planned(model, plan, cluster)
        if document is None:
            continue
        step_ns = document.predicted.step_ns
        near = [other.name for other, known in found if _are_near(step_ns, known.predicted.step_ns)]
        print(f"{model.name}, {plan.name}: {step_ns / 1e6:.3f} ms", f"near {near[0]}" if near else "", file=sys.stderr)
        if not near:
            found.append((plan, document))
        if len(found) == WANTED:
            break
    return found


def _are_near(first: int, second: int) -> bool:
    return max(first, second) < APART * min(first, second)


def measured_ns(model: Model, documents: Sequence[PlanDocument], steps: int) -> list[float]:
    """Per plan the median of its steps (after one to warm up), each the mean over the processes."""
    jobs = [
        ApplyJob(
            model=model.path,
            options=bind_options(document.options),
            decisions=expand(document),
            graph_digest=document.model.graph_digest,
            random_weights=True,
            steps=steps,
        )
        for document in documents
    ]
    times = np.array(run_task(partial(_take_turns, jobs), RANKS))  # [processes, steps, plans]
    return [float(part) for part in np.median(times.mean(axis=0), axis=0)]


def _take_turns(jobs: Sequence[ApplyJob], world: int, tell: Tell) -> list[list[int]]:
    """What one process does: [steps][plans] ns."""
    runners = [JobRunner(job, prepare(job), ProcessGroupCommunicator(job.decisions.mesh_shape, "gloo")) for job in jobs]
    times: list[list[int]] = []
    for number in range(jobs[0].steps + 1):
        times.append([])
        for runner in runners:
            dist.barrier()
            times[-1].append(runner.step(number)[1])
    return times[1:]


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; ties share their mean rank."""
    a, b = _ranks(first), _ranks(second)
    mean = (len(a) + 1) / 2
    covariance = sum((x - mean) * (y - mean) for x, y in zip(a, b, strict=True))
    spread = sum((x - mean) ** 2 for x in a) * sum((y - mean) ** 2 for y in b)
    return covariance / spread**0.5 if spread else 0.0


def _ranks(values: Sequence[float]) -> list[float]:
    return [
        (sum(other < value for other in values) + sum(other <= value for other in values) + 1) / 2 for value in values
    ]


def calibrated(folder: Path, budget: str, known: Path | None) -> str:
    """Path of a cluster of four CPU cores at measured figures."""
    file = folder / "calibration.json"
    if known is None:
        command = [sys.executable, "-m", "tap_planner_cli.calibrate", "--cluster", f"1x{RANKS}:cpu-core"]
        subprocess.run([*command, "-o", str(file), "--budget", budget], check=True)
    else:
        file.write_text(known.read_text(encoding="utf-8"), encoding="utf-8")
    cluster = folder / "cluster.yaml"
    text = f"device: cpu-core\nnodes: 1\ndevices_per_node: {RANKS}\ncalibration: {file.name}\n"
    cluster.write_text(text, encoding="utf-8")
    return str(cluster)


def measure(budget: str, steps: int, known: Path | None) -> list[Row]:
    """Both times of every plan."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        cluster = calibrated(folder, budget, known)
        for model in models(folder):
            plans = chosen(model, cluster)
            times = measured_ns(model, [document for _, document in plans], steps)
            for (plan, document), found in zip(plans, times, strict=True):
                predicted = document.predicted.step_ns
                rows.append(
                    Row(
                        model=model.name,
                        plan=plan.name,
                        predicted_ms=round(predicted / 1e6, 3),
                        measured_ms=round(found / 1e6, 3),
                        error=round(predicted / found - 1, 3),
                    )
                )
                print(rows[-1], file=sys.stderr)
    return rows


def correlations(rows: Sequence[Row]) -> dict[str, float]:
    """Spearman's correlation of predicted with measured times, per model and over all."""
    names = list(dict.fromkeys(row.model for row in rows))
    parts = {name: [row for row in rows if row.model == name] for name in names} | {"all": list(rows)}
    return {
        name: round(spearman([row.predicted_ms for row in part], [row.measured_ms for row in part]), 3)
        for name, part in parts.items()
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--budget", default="60s")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--calibration", type=Path, help="take this file instead of measuring")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    rows = measure(given.budget, given.steps, given.calibration)
    found = correlations(rows)
    error = statistics.median(abs(row.error) for row in rows)
    if given.json:
        result = {"rows": [asdict(row) for row in rows], "spearman": found, "median_error": error}
        print(json.dumps(result, indent=2))
        return
    print(markdown([asdict(row) for row in rows]))
    print(f"\nSpearman: {found}; median absolute error {100 * error:.1f} %")


if __name__ == "__main__":
    main()
