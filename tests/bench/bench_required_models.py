"""An answer for every required model on 1x8, 2x8, 4x8 and 128x8 A100s, and the share of work that can be split.

Training with AdamW in bf16, batch = number of devices, sequence 512 where it is symbolic. Each answer is one cold
``tap-plan``: a plan with its certificate, or exit 3 with the least memory.

    python -m tests.bench.bench_required_models --json build/required.json [--models NAME ...] [--clusters 1x8 ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tap_planner.cost import ComputeModel, operator_work
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.operators import FactorKind, lookup, rule_of
from tap_planner.sharding import map_batch
from tests.bench.instances import CLUSTERS, DATA, DEVICE, Instance, required_models, table, write_json

TIMEOUT_S = 600
LEAST_SHARE_PERCENT = 99.0
"""Share of a transformer's FLOPs that must lie in operators with a shardable factor beside the batch."""


def shardable_share(instance: Instance, batch: int = 8) -> float:
    """Percent of the FLOPs in operators with a shardable factor beside the batch."""
    graph = bind(load_model(instance.path), BindOptions(batch=batch, dims=dict(instance.dims), training=True))
    total = shardable = 0
    batches = map_batch(graph).factors
    for index, operator in enumerate(graph.operators):
        flops = _flops(graph, index)
        total += flops
        rule = rule_of(operator.signature)
        if any(
            factor.kind is not FactorKind.FIXED and factor.size > 1 and number not in batches.get(operator.id, ())
            for number, factor in enumerate(rule.factors)
        ):
            shardable += flops
    return 100 * shardable / total if total else 0.0


def _flops(graph: Graph, index: int) -> int:
    from tap_planner.cluster import load_cluster

    signature = graph.operators[index].signature
    rule = rule_of(signature)
    compute = ComputeModel(load_cluster(f"1x8:{DEVICE}").device, "bf16")
    work = operator_work(
        lookup(signature.type),
        factor_sizes=tuple(factor.size for factor in rule.factors),
        input_bytes=tuple(0 if t is None else compute.tensor_bytes(t.dtype, t.num_elements) for t in signature.inputs),
        output_bytes=tuple(compute.tensor_bytes(t.dtype, t.num_elements) for t in signature.outputs),
        gradient_operands=sum(
            name is not None and graph.tensors[name].requires_gradient for name in graph.operators[index].inputs
        ),
    )
    return work.forward_flops + work.backward_flops


def answer(instance: Instance, cluster: str, folder: Path) -> dict[str, object]:
    """One cold run of tap-plan."""
    nodes, _, devices = cluster.partition("x")
    plan, report = folder / "plan.json", folder / "report.json"
    for path in (plan, report):
        path.unlink(missing_ok=True)
    dims = [text for name, size in instance.dims.items() for text in ("--dim", f"{name}={size}")]
    command = [
        str(Path(sys.executable).with_name("tap-plan")),
        *(str(instance.path), "--cluster", f"{cluster}:{DEVICE}", "--batch", str(int(nodes) * int(devices))),
        *(*dims, "-q", "-o", str(plan), "--report", str(report)),
    ]
    started = time.perf_counter()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        code, errors = done.returncode, done.stderr
    except subprocess.TimeoutExpired:
        code, errors = 124, f"no answer in {TIMEOUT_S} s"
    seconds = time.perf_counter() - started
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else {}
    return {
        "model": instance.name,
        "cluster": cluster,
        "exit": code,
        "status": found.get("status", errors.strip().splitlines()[-1] if errors.strip() else "?"),
        "seconds": round(seconds, 2),
        "objective_ms": _scaled(found.get("objective_ns"), 1e6),
        "gap_percent": _gap(found),
        "mesh": _mesh(plan) if code == 0 else "-",
        "least_memory_gb": _scaled(found.get("least_memory_bytes"), 1e9),
    }


def _scaled(value: int | None, unit: float) -> str:
    return "-" if value is None else f"{value / unit:.3f}"


def _gap(report: dict[str, int]) -> str:
    if "objective_ns" not in report:
        return "-"
    return f"{100 * (report['objective_ns'] - report['bound_ns']) / max(report['bound_ns'], 1):.3f}"


def _mesh(plan: Path) -> str:
    document = json.loads(plan.read_text(encoding="utf-8"))
    levels = {parameter["zero"]["level"] for parameter in document["parameters"] if parameter.get("zero")}
    axes = " ".join(f"{axis['name']}={axis['size']}" for axis in document["mesh"]["axes"])
    recompute = any(repeat.get("recompute") == "full" for repeat in document["repeats"])
    microbatches = document["pipeline"]["microbatches"]
    return f"{axes} Z{max(levels, default=0)} m{microbatches}{' recompute' if recompute else ''}"


def measure(models: Sequence[Instance], clusters: Sequence[str]) -> dict[str, list[dict[str, object]]]:
    """Shares and answers."""
    shares: list[dict[str, object]] = []
    answers: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory() as folder:
        for instance in models:
            share = shardable_share(instance)
            shares.append(
                {
                    "model": instance.name,
                    "transformer": instance.is_transformer,
                    "share_percent": round(share, 3),
                    "enough": share >= LEAST_SHARE_PERCENT or not instance.is_transformer,
                }
            )
            for cluster in clusters:
                answers.append(answer(instance, cluster, Path(folder)))
                print(*answers[-1].values(), file=sys.stderr, flush=True)
    return {"shares": shares, "answers": answers}


def main(arguments: Sequence[str] | None = None) -> dict[str, list[dict[str, object]]]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--models", nargs="*", help="only these")
    parser.add_argument("--clusters", nargs="*", default=list(CLUSTERS))
    options = parser.parse_args(arguments)
    models = [m for m in required_models(options.data) if not options.models or m.name in options.models]
    result = measure(models, options.clusters)
    print(table(result["shares"]), "", table(result["answers"]), sep="\n")
    write_json(options.json, result)
    return result


def test_required_models() -> None:
    """Every required model gets a plan or a proven exit 3, and transformers can be split beside the batch."""
    result = main([])
    assert all(row["enough"] for row in result["shares"])
    assert {row["exit"] for row in result["answers"]} <= {0, 3}


if __name__ == "__main__":
    main()
