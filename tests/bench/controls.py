"""What each control of the search does, in one figure: near old plans, other meshes, targets, objectives, rules.

Every plan is made by the installed ``tap-plan`` in a process of its own, as a user would; ``seconds`` are those of that
process on the clock, import included, ``cpu_s`` its processor time. A control is compared with the plan of the same
command without it. What is not read off the plan is worked out here: changes are counted from two plan files, what a
target excludes is asked of its own rules, and each remedy of an infeasible request is planned again. A figure that does
not come out as promised is an error.

    python -m tests.bench.controls --json build/controls.json [--cases stay-near target ...] [--markdown]
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path

from tap_planner.api import prepare_search
from tap_planner.cluster import mesh_text
from tap_planner.plan import Decisions, ParameterDecision, PlanDocument, PlanRequest, expand, read_plan
from tap_planner.search import SearchRequest
from tests.bench.instances import DATA, markdown, table, write_json

Row = dict[str, object]
TAP_PLAN = Path(sys.executable).with_name("tap-plan")
TIMEOUT_S = 600


@dataclass(frozen=True, slots=True)
class Request:
    """What ``tap-plan`` is asked: a model of the data folder, and options."""

    model: str
    options: tuple[str, ...]

    @classmethod
    def of(cls, model: str, options: str) -> Request:
        """From options as typed in a shell."""
        return cls(model, tuple(shlex.split(options)))

    def plus(self, *options: str) -> Request:
        """With more options; of one that is given twice the last counts."""
        return Request(self.model, (*self.options, *options))

    @property
    def command(self) -> str:
        """As typed in the data folder."""
        return f"tap-plan {self.model}.onnx {shlex.join(self.options)}"

    @property
    def cluster(self) -> str:
        """The cluster that is asked for."""
        return self.options[self.options.index("--cluster") + 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one run of ``tap-plan`` said and wrote."""

    code: int
    said: str
    seconds: float
    cpu_s: float
    path: Path
    report: Path

    @property
    def plan(self) -> PlanDocument:
        """The plan that it wrote."""
        assert self.code == 0, self.said
        return _read(self.path)

    @property
    def decisions(self) -> Decisions:
        """All decisions of that plan."""
        return expand(self.plan)

    @property
    def ns(self) -> int:
        """Objective A of that plan."""
        return self.plan.certificate.objective_ns


@cache
def _read(path: Path) -> PlanDocument:
    return read_plan(path)


@dataclass(slots=True)
class Session:
    """Runs the command in one folder; the same request is not run twice."""

    data: Path
    folder: Path
    answers: dict[Request, Answer] = field(default_factory=dict)

    def ask(self, request: Request, name: str | None = None) -> Answer:
        """Run the command; the plan is called ``name`` in the folder, where options may name it."""
        if request not in self.answers:
            self.answers[request] = self._run(request, name or f"plan{len(self.answers)}")
        return self.answers[request]

    def _run(self, request: Request, name: str) -> Answer:
        path, report = self.folder / f"{name}.json", self.folder / f"{name}-report.json"
        files = ["-o", str(path), "--report", str(report), "--color", "never"]
        command = [str(TAP_PLAN), str(self.data / f"{request.model}.onnx"), *request.options, *files]
        started, spent = time.perf_counter(), _children_s()
        ran = subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        return Answer(
            code=ran.returncode,
            said=ran.stderr,
            seconds=time.perf_counter() - started,
            cpu_s=_children_s() - spent,
            path=path,
            report=report,
        )


def _children_s() -> float:
    """Processor time of all processes that have been waited for."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


Control = Callable[[Session], Iterator[Row]]


def row(name: str, request: Request, outcome: str, figure: str, answer: Answer) -> Row:
    """One line of the table."""
    return {
        "control": name,
        "command": request.command,
        "what came out": outcome,
        "figure": figure,
        "seconds": round(answer.seconds, 1),
        "cpu_s": round(answer.cpu_s, 1),
    }


# -- figures -----------------------------------------------------------------------------------------------------


def ms(ns: int) -> str:
    """Nanoseconds as milliseconds."""
    return f"{ns / 1e6:,.2f} ms"


def gib(num_bytes: int) -> str:
    """Bytes as GiB."""
    return f"{num_bytes / 2**30:.2f} GiB"


def percent(new: int, old: int) -> str:
    """By how much something has changed."""
    return f"{100 * (new - old) / old:+.2f} %"


def proven(plan: PlanDocument) -> str:
    """How far from the proven bound a plan is, in terms of what was to be least."""
    return f"proven gap {plan.certificate.gap_basis_points / 100:.2f} %"


def said_error(answer: Answer) -> str:
    """The line that says what is wrong."""
    return next(line for line in answer.said.splitlines() if line.startswith("error: "))


# -- controls ----------------------------------------------------------------------------------------------------


def stay_near(session: Session, request: Request, old: Sequence[str], new: Sequence[str]) -> Iterator[Row]:
    """Changes of the plan that stays near to an old one, and of the best one, counted from the files."""
    before = session.ask(request.plus(*old), "old")
    best = session.ask(request.plus(*new))
    asked = request.plus(*new, "--stay-near", "old.json", "--max-regret", "1%")
    near = session.ask(asked)
    fewer, most = changes(before.decisions, near.decisions), changes(before.decisions, best.decisions)
    claimed = near.plan.certificate.near
    assert claimed is not None and claimed.changes_of_best == most.total()
    assert fewer == Counter(
        microbatches=claimed.microbatches,
        operators=claimed.operators,
        parameters=claimed.parameters,
        regions=claimed.regions,
    )
    assert fewer.total() <= most.total() and 100 * near.ns <= 101 * best.ns
    kinds = ", ".join(f"{count} {kind}" for kind, count in fewer.items() if count)
    outcome = (
        f"the old plan is that of {' '.join(old)}; of {claimed.compared} decisions {fewer.total()} change "
        f"({kinds or 'none'}), in the best plan {most.total()}"
    )
    figure = f"{fewer.total()} changes in place of {most.total()} for {percent(near.ns, best.ns)} time"
    yield row("--stay-near", asked, outcome, figure, near)


def changes(old: Decisions, new: Decisions) -> Counter[str]:
    """Decisions of equal names that differ (docs/plan-format.md says what counts), for plans on one mesh."""
    assert old.axes == new.axes
    strategies = {operator.id: operator.strategy for operator in old.operators}
    stored = {parameter.name: _stored(parameter) for parameter in old.parameters}
    recompute = {name: region.recompute for region in old.regions for name in region.operators}
    return Counter(
        microbatches=int(old.microbatches != new.microbatches),
        operators=sum(operator.strategy != strategies[operator.id] for operator in new.operators),
        parameters=sum(_stored(parameter) != stored[parameter.name] for parameter in new.parameters),
        regions=sum({recompute[name] for name in r.operators} != {r.recompute} for r in new.regions),
    )


def _stored(parameter: ParameterDecision) -> tuple[object, ...]:
    return parameter.placement, parameter.zero_level, parameter.zero_axes


def alternatives(session: Session, request: Request, count: int) -> Iterator[Row]:
    """The best plans on other meshes, what they cost more, and what is proven of them."""
    asked = request.plus("--alternatives", str(count))
    answer = session.ask(asked)
    others = json.loads(answer.report.read_text(encoding="utf-8"))["alternatives"]
    assert len({other["mesh"] for other in others} | {_mesh(answer.plan)}) == len(others) + 1
    assert all(other["objective_ns"] >= answer.plan.certificate.bound_ns for other in others)
    listed = [f"{_mesh(answer.plan)}: {ms(answer.ns)}"]
    listed += [f"{o['mesh']}: {ms(o['objective_ns'])} (proven >= {ms(o['bound_ns'])})" for o in others]
    more = ", ".join(percent(other["objective_ns"], answer.ns) for other in others)
    yield row("--alternatives", asked, "; ".join(listed), f"{len(others)} other meshes: {more}", answer)


def _mesh(plan: PlanDocument) -> str:
    return mesh_text(plan.mesh.axes, plan.mesh.order)


def target(session: Session, request: Request, framework: str) -> Iterator[Row]:
    """The plan without a target has strategies that its rules exclude, and the one with it is dearer."""
    free = session.ask(request)
    asked = request.plus("--target", framework)
    bound = session.ask(asked)
    excluded = _excluded(session, asked, free.decisions, bound.plan)
    assert excluded and bound.ns > free.ns
    outcome = (
        f"{ms(bound.ns)} in place of {ms(free.ns)}; the target alone excludes what {excluded} of "
        f"{len(free.decisions.operators)} operators do in the plan without it"
    )
    yield row(f"--target {framework}", asked, outcome, f"{percent(bound.ns, free.ns)} time", bound)


def _excluded(session: Session, asked: Request, free: Decisions, bound: PlanDocument) -> int:
    """Operators whose strategy the target's rules exclude; of its parts of the space the one with fewest."""
    path = session.data / f"{asked.model}.onnx"
    prepared = prepare_search(PlanRequest(model=path, cluster=asked.cluster, options=bound.options))
    return min(_broken(part, free) for part in prepared.requests)


def _broken(part: SearchRequest, free: Decisions) -> int:
    (mesh,) = part.meshes
    graph = part.folded(free.microbatches).graph
    rules = part.constraints(mesh, graph)
    strategies = {operator.id: operator.strategy for operator in free.operators}
    return sum(
        not all(demand.is_kept(rules.axes, strategies[operator.id]) for demand in rules.demands(operator))
        for operator in graph.operators
    )


def objective(session: Session, request: Request, name: str) -> Iterator[Row]:
    """How much less is needed or sent than in the fastest plan, how much longer it takes, and what is proven."""
    fastest = session.ask(request)
    asked = request.plus("--objective", name)
    answer = session.ask(asked)
    measure = _memory if name == "memory" else _sent
    less, before = measure(answer.plan), measure(fastest.plan)
    assert less <= before and answer.ns >= fastest.plan.certificate.bound_ns
    what = "per device" if name == "memory" else "sent by a device in a step"
    outcome = f"{gib(less)} {what} in place of {gib(before)}, {ms(answer.ns)} in place of {ms(fastest.ns)}"
    figure = f"{percent(less, before)} bytes for {percent(answer.ns, fastest.ns)} time, {proven(answer.plan)}"
    yield row(f"--objective {name}", asked, outcome, figure, answer)


def _memory(plan: PlanDocument) -> int:
    return plan.predicted.total_memory_bytes


def _sent(plan: PlanDocument) -> int:
    return plan.sent_bytes


def rule(session: Session, request: Request, name: str, text: str) -> Iterator[Row]:
    """What one rule costs."""
    free = session.ask(request)
    asked = request.plus(name, text)
    kept = session.ask(asked)
    assert kept.ns >= free.plan.certificate.bound_ns
    outcome = f"{ms(kept.ns)} in place of {ms(free.ns)}, {proven(kept.plan)}"
    yield row(name, asked, outcome, f"{percent(kept.ns, free.ns)} time", kept)


def conflict(session: Session, request: Request, pair: tuple[str, str], innocent: str) -> Iterator[Row]:
    """Two of three rules exclude each other, and are the two that the message names."""
    asked = request.plus(*(part for text in (pair[0], innocent, pair[1]) for part in ("--fix", text)))
    answer = session.ask(asked)
    error = said_error(answer)
    first, second = (f"--fix '{text.replace(': ', ':')}'" for text in pair)
    assert answer.code == 2 and f"{first} and {second} exclude each other" in error
    assert innocent.replace(": ", ":") not in error
    yield row("rules in conflict", asked, f"`{error}`", "exit 2, 2 of 3 rules are named", answer)


def infeasible(session: Session, request: Request) -> Iterator[Row]:
    """The least memory that any plan needs, which another search attains, and each remedy planned again."""
    answer = session.ask(request)
    assert answer.code == 3, answer.said
    diagnosis = json.loads(answer.report.read_text(encoding="utf-8"))["diagnosis"]
    least, limit = diagnosis["least_memory_bytes"], diagnosis["limit_bytes"]
    remedies = [remedy for remedy in diagnosis["remedies"] if remedy["options"]]
    assert remedies and all(f"hint: {remedy['text']}" in answer.said for remedy in remedies)
    figure = f"exit 3, {gib(least)} needed, {gib(limit)} there"
    yield row("no plan fits", request, f"`{said_error(answer)}`", figure, answer)
    asked = request.plus("--max-memory", "none", "--objective", "memory")
    smallest = session.ask(asked)
    assert _memory(smallest.plan) == least
    yield row("its least memory", asked, "a plan that needs just that", f"{gib(least)}, equal", smallest)
    for remedy in remedies:
        again = request.plus(*remedy["options"])
        helped = session.ask(again)
        assert helped.ns <= remedy["objective_ns"]
        assert remedy["kind"] == "memory" or _memory(helped.plan) <= limit
        outcome = f"`hint: {remedy['text']}`: {ms(helped.ns)}, {gib(_memory(helped.plan))}"
        yield row("its remedy", again, outcome, "fits, as fast as promised", helped)


Split = Callable[[Decisions], str]
"""What is split in which way; empty where nothing is."""


def chosen(session: Session, name: str, request: Request, split: Split, forbidden: Sequence[str]) -> Iterator[Row]:
    """A kind of parallelism that the search has chosen, and the best plan without it."""
    best = session.ask(request)
    found = split(best.decisions)
    assert found, f"no {name} in {best.said}"
    yield row(name, request, f"{found}; {ms(best.ns)}, {proven(best.plan)}", "chosen", best)
    asked = request.plus(*(part for text in forbidden for part in ("--forbid", text)))
    without = session.ask(asked)
    assert not split(without.decisions) and without.ns > best.ns
    outcome = f"{ms(without.ns)} in place of {ms(best.ns)}, {proven(without.plan)}"
    yield row(f"{name}, forbidden", asked, outcome, f"{percent(without.ns, best.ns)} time", without)


def by_expert(decisions: Decisions) -> str:
    """Stacked weights of experts that are split along the dim of experts, which is the first."""
    experts = [parameter for parameter in decisions.parameters if fnmatchcase(parameter.name, "*.experts.*")]
    found = Counter(
        axis.name
        for parameter in experts
        for axis, placement in zip(decisions.axes, parameter.placement, strict=True)
        if str(placement) == "S(0)"
    )
    return ", ".join(
        f"{n} of {len(experts)} experts' weights split by expert along {axis}" for axis, n in found.items()
    )


def by_sequence(decisions: Decisions) -> str:
    """Attention split by queries, with keys and values gathered, or in a ring."""
    attention = [operator for operator in decisions.operators if operator.type == "Attention"]
    words = {"s": "by queries (keys and values gathered)", "ring": "in a ring"}
    found = Counter(
        (axis.name, choice)
        for operator in attention
        for axis, choice in zip(decisions.axes, operator.strategy, strict=True)
        if choice in words
    )
    parts = (f"{n} of {len(attention)} Attention {words[choice]} along {axis}" for (axis, choice), n in found.items())
    return ", ".join(parts)


def inference(session: Session, name: str, request: Request, batch: int, cache_bytes: int) -> Iterator[Row]:
    """Latency, throughput and the memory of the caches of one step of a decoder.

    Args:
        cache_bytes: of one sequence, over all devices, from the sizes of the model.
    """
    asked = request.plus("--batch", str(batch))
    answer = session.ask(asked)
    predicted, memory = answer.plan.predicted, answer.plan.predicted.memory_bytes
    devices = math.prod(axis.size for axis in answer.plan.mesh.axes)
    assert predicted.tokens == batch
    parts, rest = divmod(cache_bytes * batch, memory["caches"])  # all devices hold as much, one part or the same
    assert not rest and devices % parts == 0
    rate = batch * 1e9 / predicted.step_ns
    caches = f"{gib(memory['caches'])} caches (1 of {parts} parts)"
    outcome = (
        f"{_mesh(answer.plan)}: {caches} and {gib(memory['parameters'])} parameters per device, {proven(answer.plan)}"
    )
    yield row(name, asked, outcome, f"{ms(predicted.step_ns)} a step, {rate:,.0f} tokens/s", answer)


# -- cases -------------------------------------------------------------------------------------------------------

GPT3 = Request.of("hm_gpt3_175b", "--cluster 128x8:a100-sxm4-80gb --mesh dp=128,tp=8 --dim seq=2048 --loss mean")
LLAMA = Request.of(
    "hm_llama3_8b", "--cluster 2x8:h100-sxm5-80gb --batch 16 --dim seq=2048 --loss cross-entropy --mesh dp=4,tp=4"
)
ANY_MESH = Request.of("hm_llama3_8b", "--cluster 1x8:h100-sxm5-80gb --batch 16 --dim seq=2048 --loss cross-entropy")
DATA_PARALLEL = Request.of(
    "hm_llama3_8b",
    "--cluster 1x8:h100-sxm5-80gb --batch 8 --dim seq=2048 --loss cross-entropy --mesh dp=4,tp=2 --fix batch=dp",
)
TIGHT = Request.of(
    "hm_llama3_8b",
    "--cluster 1x2:h100-sxm5-80gb --batch 8 --dim seq=2048 --loss cross-entropy --mesh tp=2 "
    "--recompute none --microbatches 1",
)
MIXTRAL = Request.of(
    "hm_mixtral_8x7b",
    "--cluster 4x8:h100-sxm5-80gb --batch 16 --dim seq=1024 --loss cross-entropy --mesh dp=4,tp=8",
)
LONG = Request.of("hm_llama3_8b_fused", "--cluster 2x8:h100-sxm5-80gb --batch 1 --dim seq=32768 --loss cross-entropy")
DECODER = Request.of("hm_llama3_8b_decode_8l", "--cluster 1x8:h100-sxm5-80gb --mode infer --dim past=8191")
CACHE_BYTES = 2 * 8 * 8 * 8192 * 128 * 2
"""Keys and values, 8 layers, 8 heads, 8192 positions, 128 wide, bf16."""

CASES: Mapping[str, tuple[Control, ...]] = {
    "stay-near": (lambda s: stay_near(s, GPT3, ("--batch", "1536"), ("--batch", "1024")),),
    "alternatives": (lambda s: alternatives(s, ANY_MESH, 2),),
    "target": (
        lambda s: target(s, LLAMA, "torchtitan"),
        lambda s: target(s, LLAMA, "megatron"),
        lambda s: target(s, LLAMA, "deepspeed"),
        lambda s: target(s, LLAMA, "transformers"),
    ),
    "objective": (
        lambda s: objective(s, DATA_PARALLEL, "memory"),
        lambda s: objective(s, DATA_PARALLEL.plus("--max-memory", "24GiB"), "communication"),
    ),
    "rule": (
        lambda s: rule(s, LLAMA, "--fix", "layers.*.self_attn.*: tp=head"),
        lambda s: rule(s, LLAMA, "--forbid", "layers.*.mlp.*: tp"),
    ),
    "conflict": (lambda s: conflict(s, LLAMA, ("batch=tp", "layers.*.mlp.*: tp"), "layers.*: dp=batch"),),
    "infeasible": (lambda s: infeasible(s, TIGHT),),
    "expert": (
        lambda s: chosen(s, "expert parallelism", MIXTRAL, by_expert, ("experts.*: dp=expert", "experts.*: tp=expert")),
    ),
    "sequence": (
        lambda s: chosen(
            s, "context parallelism", LONG, by_sequence, ("Attention: dp=sequence", "Attention: tp=sequence")
        ),
    ),
    "inference": (
        lambda s: inference(s, "inference, latency", DECODER, 1, CACHE_BYTES),
        lambda s: inference(s, "inference, throughput", DECODER, 2048, CACHE_BYTES),
    ),
}


def shown(rows: Sequence[Row]) -> list[Row]:
    """The rows with commands as code, for Markdown."""
    return [line | {"command": f"`{line['command']}`"} for line in rows]


def main(arguments: Sequence[str] | None = None) -> list[Row]:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the ONNX files")
    parser.add_argument("--json", type=Path, help="write the figures here, after every row")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--markdown", action="store_true", help="print the table as Markdown")
    options = parser.parse_args(arguments)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        session = Session(options.data.resolve(), Path(folder))
        for name in options.cases:
            for control in CASES[name]:
                for line in control(session):
                    rows.append(line)
                    print(line, file=sys.stderr, flush=True)
                    write_json(options.json, rows)
    print(markdown(shown(rows)) if options.markdown else table(rows))
    return rows


if __name__ == "__main__":
    main()
