"""Plans that experts write by hand (``expert_plans.py``), priced by the same model, against the plan of the search.

Training with AdamW in bf16, 4 samples a device. An expert's plan is a mesh, a ZeRO level and rules; the search fills in
what they leave open. It is held to the device's memory; where no such plan is found that fits, it is compared, as
``limit`` says, with the search's plan without a limit. All are searched to the usual gap; where an expert's plan is
better by less than that, the search is asked for the optimum (``gap_percent`` says what is left to prove). All plans
are priced over the lowered Program. The search must never be worse.

    python -m tests.bench.experts --json build/experts.json [--models gpt3_175b ...] [--clusters 1x8:... ...]
        [--experts FSDP ...] [--markdown]
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tap_planner.api import prepare_search
from tap_planner.errors import InfeasibleError, LimitReachedError
from tap_planner.graph import Graph
from tap_planner.plan import PlanOptions, PlanRequest
from tap_planner.program import lower
from tap_planner.search import SearchResult, search
from tap_planner.simulate import price_program
from tests.bench.expert_plans import EXPERTS, Anatomy, Expert, Plan
from tests.bench.instances import DATA, light_models, markdown, table, write_json

CLUSTERS = ("1x8:a100-sxm4-80gb", "2x8:a100-sxm4-80gb", "4x8:a100-sxm4-80gb", "16x8:h100-sxm5-80gb")
SAMPLES_A_DEVICE = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A model and where its weights are."""

    file: str
    anatomy: Anatomy
    dims: Mapping[str, int] = field(default_factory=dict)

    def path(self, data: Path) -> Path:
        """The ONNX file; the ``light_*`` networks come with the onnx package."""
        for instance in light_models():
            if instance.name == self.file:
                return instance.path
        return data / f"{self.file}.onnx"


LLAMA = Anatomy(
    column=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.gate_proj.weight", "*.up_proj.weight"),
    row=("*.o_proj.weight", "*.down_proj.weight"),
    norm=("model.*norm*",),
    residual=("model.layers.?/Add_*", "model.layers.??/Add_*"),
    has_sequence=True,
)
SUBJECTS: Mapping[str, Subject] = {
    "gpt3_175b": Subject(
        file="hm_gpt3_175b",
        dims={"seq": 2048},
        anatomy=replace(
            LLAMA,
            column=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.c_fc.weight"),
            row=("*.o_proj.weight", "*.c_proj.weight"),
            norm=("LayerNormalization",),
        ),
    ),
    "llama3_70b": Subject(file="hm_llama3_70b", dims={"seq": 4096}, anatomy=LLAMA),
    "llama3_8b": Subject(file="hm_llama3_8b", dims={"seq": 4096}, anatomy=LLAMA),
    "mixtral_8x7b": Subject(
        file="hm_mixtral_8x7b",
        dims={"seq": 4096},
        anatomy=replace(
            LLAMA,
            column=(*LLAMA.column[:3], "*.experts.w1", "*.experts.w3"),
            row=("*.o_proj.weight", "*.experts.w2"),
            experts=("*.experts.w1", "*.experts.w3", "*.experts.w2"),
            dense=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.o_proj.weight", "*.mlp.gate.weight"),
        ),
    ),
    "bert": Subject(
        file="bert_tiny",
        dims={"seq": 512},
        anatomy=Anatomy(
            column=("*.query.weight", "*.key.weight", "*.value.weight", "*.intermediate.dense.weight"),
            row=("*.output.dense.weight",),
            norm=("m.bert.encoder.*LayerNorm.weight",),
            width=4,
            has_sequence=True,
        ),
    ),
    "t5": Subject(
        file="t5_tiny",
        dims={"seq": 512, "dec_seq": 512},
        anatomy=Anatomy(
            column=("*Attention.q.weight", "*Attention.k.weight", "*Attention.v.weight", "*.wi.weight"),
            row=("*Attention.o.weight", "*.wo.weight"),
            norm=("*layer_norm.weight",),
            width=4,
            has_sequence=True,
        ),
    ),
    "vit": Subject(
        file="vit_tiny",
        anatomy=Anatomy(
            column=("*.q_proj.weight", "*.k_proj.weight", "*.v_proj.weight", "*.fc1.weight"),
            row=("*.o_proj.weight", "*.fc2.weight"),
            norm=("*layernorm_before.weight", "*layernorm_after.weight"),
            width=4,
            has_sequence=True,
        ),
    ),
    "resnet50": Subject(file="light_resnet50", anatomy=Anatomy()),
    "dlrm": Subject(
        file="dlrm_tiny",
        anatomy=Anatomy(
            tables=("emb.0.weight", "emb.1.weight", "emb.2.weight"), dense=("bot.*.weight", "top.*.weight"), width=4
        ),
    ),
    "gshard_moe": Subject(
        file="gshard_moe_tiny",
        anatomy=Anatomy(
            column=("*.q.weight", "*.moe.wi"),
            row=("*.o.weight", "*.moe.wo"),
            norm=("*.n1.weight", "*.n2.weight"),
            experts=("*.moe.wi", "*.moe.wo"),
            dense=("*.q.weight", "*.o.weight", "*.moe.gate.weight"),
            width=4,
            has_sequence=True,
        ),
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A plan's figures."""

    result: SearchResult
    seconds: float

    @property
    def gap_percent(self) -> float:
        """How far from the bound of its space."""
        return 100 * (self.result.objective_ns - self.result.bound_ns) / max(self.result.bound_ns, 1)


@dataclass(frozen=True, slots=True)
class Question:
    """One model on one cluster."""

    subject: Subject
    cluster: str
    data: Path

    def answer(self, options: PlanOptions, *, hybrid_zero: bool = True) -> Answer | None:
        """Search; None where nothing fits, or nothing was found that does."""
        request = PlanRequest(model=self.subject.path(self.data), cluster=self.cluster, options=options)
        prepared = prepare_search(request)
        started = time.perf_counter()
        try:
            result = search(replace(prepared.request, hybrid_zero=hybrid_zero))
        except (InfeasibleError, LimitReachedError):
            return None
        seconds = time.perf_counter() - started
        price = price_program(lower(result.folded.graph, result.decisions), prepared.cluster)
        assert price.objective_ns == result.objective_ns
        return Answer(result=result, seconds=seconds)

    def options(self, *, limited: bool, gap_basis_points: int = 10) -> PlanOptions:
        """What all plans have in common."""
        return PlanOptions(
            batch=SAMPLES_A_DEVICE * self.devices,
            dims=self.subject.dims,
            loss="mean",
            gap_basis_points=gap_basis_points,
            max_memory_bytes="device" if limited else "none",
        )

    @property
    def devices(self) -> int:
        """Devices of the cluster."""
        match = re.match(r"(\d+)x(\d+)", self.cluster)
        assert match is not None
        return int(match[1]) * int(match[2])

    def of_expert(self, expert: Expert, *, limited: bool) -> Answer | None:
        """The expert's plan, which really is one."""
        anatomy = self.subject.anatomy
        mesh = expert.mesh(self.devices, anatomy.width)
        options = replace(
            self.options(limited=limited),
            mesh=mesh,
            zero=expert.zero,
            constraints=expert.constraints(anatomy, mesh),
        )
        answer = self.answer(options, hybrid_zero=False)
        if answer is not None:
            check_pattern(expert, anatomy, answer.result)
        return answer


def check_pattern(expert: Expert, anatomy: Anatomy, result: SearchResult) -> None:
    """Raise unless the decisions are what the expert would have written."""
    graph: Graph = result.folded.graph
    axes = {axis.name: number for number, axis in enumerate(result.decisions.axes)}
    expert.check(Plan(anatomy=anatomy, decisions=result.decisions, graph=graph, axes=axes))


def compare(name: str, cluster: str, data: Path, experts: Sequence[str]) -> list[dict[str, object]]:
    """One row for each expert of a model on a cluster."""
    question = Question(SUBJECTS[name], cluster, data)
    ours: dict[bool, Answer | None] = {}
    rows: list[dict[str, object]] = []
    for expert in EXPERTS:
        if expert.name not in experts or not expert.suits(question.subject.anatomy):
            continue
        limited = True
        theirs = question.of_expert(expert, limited=True)
        if theirs is None:
            limited = False
            theirs = question.of_expert(expert, limited=False)
        assert theirs is not None
        if limited not in ours:
            ours[limited] = question.answer(question.options(limited=limited))
        best = ours[limited]
        assert best is not None  # the expert's plan lies in the space
        if theirs.result.objective_ns < best.result.objective_ns:
            best = ours[limited] = question.answer(question.options(limited=limited, gap_basis_points=0))
            assert best is not None
        rows.append({"model": name, "cluster": cluster, **_row(expert, limited, theirs, best)})
        print(rows[-1], file=sys.stderr, flush=True)
    return rows


def _row(expert: Expert, limited: bool, theirs: Answer, ours: Answer) -> dict[str, object]:
    expert_ns, our_ns = theirs.result.objective_ns, ours.result.objective_ns
    return {
        "expert": expert.name,
        "limit": "device" if limited else "none",
        "expert_ms": f"{expert_ns / 1e6:.3f}",
        "search_ms": f"{our_ns / 1e6:.3f}",
        "faster_percent": round(100 * (expert_ns - our_ns) / our_ns, 2),
        "worse": our_ns > expert_ns,
        "plan": _shown(ours.result),
        "gap_percent": round(ours.gap_percent, 3),
        "search_s": round(ours.seconds, 1),
    }


def _shown(result: SearchResult) -> str:
    decisions = result.decisions
    levels = sorted({parameter.zero_level for parameter in decisions.parameters if parameter.data_axes})
    recomputed = sorted({region.recompute for region in decisions.regions} - {"none"})
    axes = " ".join(f"{axis.name}={axis.size}" for axis in decisions.axes)
    zero = "Z" + "/".join(map(str, levels)) if levels else "Z-"
    return " ".join([axes, zero, f"m{decisions.microbatches}", *recomputed])


def summary(rows: Sequence[Mapping[str, object]]) -> list[dict[str, object]]:
    """One row for each model and cluster: how much faster the search's plan is than that of each expert."""
    found: dict[tuple[object, object], dict[str, object]] = {}
    for row in rows:
        key = (row["model"], row["cluster"])
        line = found.setdefault(key, {"model": key[0], "cluster": key[1], **dict.fromkeys(_names(), "-")})
        free = row["limit"] == "none"
        line[str(row["expert"])] = f"{row['faster_percent']:+} %" + ("*" if free else "")
        if "search" not in line or not free:
            line["search"] = f"{row['search_ms']} ms: {row['plan']}" + ("*" if free else "")
    return list(found.values())


def _names() -> tuple[str, ...]:
    return tuple(expert.name for expert in EXPERTS)


def main(arguments: Sequence[str] | None = None) -> list[dict[str, object]]:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here, after every row")
    parser.add_argument("--models", nargs="+", choices=list(SUBJECTS), default=list(SUBJECTS))
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--experts", nargs="+", choices=_names(), default=list(_names()))
    parser.add_argument("--markdown", action="store_true", help="print a summary as Markdown; * is without limit")
    options = parser.parse_args(arguments)
    rows: list[dict[str, object]] = []
    for name in options.models:
        for cluster in options.clusters:
            rows.extend(compare(name, cluster, options.data, options.experts))
            write_json(options.json, rows)
    print(markdown(summary(rows)) if options.markdown else table(rows))
    worse = [f"{row['model']} on {row['cluster']}: {row['expert']}" for row in rows if row["worse"]]
    assert not worse, worse
    return rows


if __name__ == "__main__":
    main()
