"""Hand-made plans: a stack of two-matrix layers with a residual, a shared mask and a loss, on a 2x2 mesh."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from tap_planner.plan import (
    AxisDecision,
    BucketDecision,
    Certificate,
    CollectiveEntry,
    Decisions,
    LossDecision,
    ModelInput,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    PlanDocument,
    PlanOptions,
    Predicted,
    Producer,
    RedistributionDecision,
    Region,
    build_document,
    row_major_ranks,
)
from tap_planner.sharding import PARTIAL, REPLICATE, Placements, Step, shard

BATCH = (shard(0), REPLICATE)
COLUMN = (shard(0), shard(1))
SUM = (shard(0), PARTIAL)
WEIGHT_COLUMN = (REPLICATE, shard(1))
WEIGHT_ROW = (REPLICATE, shard(0))
WHOLE = (REPLICATE, REPLICATE)
DATA_GRADIENT_COLUMN = (PARTIAL, shard(1))
DATA_GRADIENT_ROW = (PARTIAL, shard(0))
AXES = (
    AxisDecision(name="dp", size=2, levels=("network",)),
    AxisDecision(name="tp", size=2, levels=("node",)),
)


def operator(
    id: str,
    type: str,
    strategy: tuple[str, ...],
    inputs: Iterable[tuple[str, Placements, Placements | None] | None],
    outputs: Iterable[tuple[str, tuple[int, ...], Placements]],
    name: str = "",
) -> OperatorDecision:
    """An operator decision from plain tuples."""
    return OperatorDecision(
        id=id,
        name=name,
        type=type,
        strategy=strategy,
        inputs=tuple(i and OperandDecision(tensor=i[0], placement=i[1], gradient=i[2]) for i in inputs),
        outputs=tuple(OutputDecision(tensor=o[0], shape=o[1], placement=o[2]) for o in outputs),
    )


@dataclass
class Stack:
    """Collects the decisions of a stack of layers."""

    operators: list[OperatorDecision] = field(default_factory=list)
    parameters: list[ParameterDecision] = field(default_factory=list)
    redistributions: list[RedistributionDecision] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)
    reads: dict[str, str] = field(default_factory=dict)


def _parameter(name: str, shape: tuple[int, ...], placement: Placements, gradient: Placements) -> ParameterDecision:
    return ParameterDecision(
        name=name,
        shape=shape,
        dtype="float32",
        trainable=True,
        placement=placement,
        gradient=gradient,
        zero_level=1,
        zero_axes=(0,),
        bucket=0,
    )


def _all_reduce(tensor: str, consumers: tuple[str, ...]) -> RedistributionDecision:
    return RedistributionDecision(
        tensor=tensor,
        source=SUM,
        to=BATCH,
        gradient=BATCH,
        forward=(Step(kind="all_reduce", axis=1, source=PARTIAL, target=REPLICATE),),
        backward=(),
        consumers=consumers,
    )


def add_layer(stack: Stack, index: int, source: str, *, column: bool, run: int | None, recompute: str = "none") -> str:
    """One layer ``x + relu(x w1 + mask) w2``: tensor parallel where ``column``, else replicated on tp."""
    first, fc, act, proj, out = (f"h.{index}.{part}" for part in ("w1", "fc", "act", "proj", "out"))
    second_t = f"h.{index}.w2_t"
    inner = COLUMN if column else BATCH
    name = "fc" if index % 2 else f"fc{index}"
    stack.operators += [
        operator(
            fc,
            "MatMul",
            ("m", "n" if column else "none"),
            [
                (source, BATCH, (shard(0), PARTIAL) if column else BATCH),
                (first, WEIGHT_COLUMN if column else WHOLE, DATA_GRADIENT_COLUMN if column else (PARTIAL, REPLICATE)),
            ],
            [(fc, (8, 16), inner)],
            name=name,
        ),
        operator(
            act,
            "Add",
            ("d0", "d1" if column else "none"),
            [(fc, inner, inner), ("mask", inner, None), None],
            [(act, (8, 16), inner)],
        ),
        operator(
            proj,
            "MatMul",
            ("m", "k" if column else "none"),
            [
                (act, inner, inner),
                (
                    second_t,
                    WEIGHT_ROW if column else WHOLE,
                    DATA_GRADIENT_ROW if column else (PARTIAL, REPLICATE),
                ),
            ],
            [(proj, (8, 8), SUM if column else BATCH)],
        ),
        operator(out, "Add", ("d0", "none"), [(source, BATCH, BATCH), (proj, BATCH, BATCH)], [(out, (8, 8), BATCH)]),
    ]
    stack.reads[first] = first
    stack.reads[second_t] = f"h.{index}.w2"
    stack.parameters += [
        _parameter(
            first,
            (8, 16),
            WEIGHT_COLUMN if column else WHOLE,
            DATA_GRADIENT_COLUMN if column else (PARTIAL, REPLICATE),
        ),
        _parameter(
            f"h.{index}.w2",
            (8, 16),
            (REPLICATE, shard(1)) if column else WHOLE,
            (PARTIAL, shard(1)) if column else (PARTIAL, REPLICATE),
        ),
    ]
    if column:
        stack.redistributions.append(_all_reduce(proj, (out,)))
    stack.regions.append(
        Region(operators=(fc, act, proj, out), run=run, occurrence=len(stack.regions), recompute=recompute)
    )
    return out


def add_loss(stack: Stack, source: str, run_index: int | None = None) -> None:
    """The loss after the last layer."""
    stack.operators.append(
        operator("loss", "Loss", ("d0", "none"), [(source, BATCH, BATCH)], [("loss", (), (PARTIAL, REPLICATE))])
    )
    stack.regions.append(Region(operators=("loss",), run=run_index, occurrence=0, recompute="none"))


def add_shared(stack: Stack) -> None:
    """A redistribution of the mask that every layer reads, and a parameter that all layers read."""
    consumers = tuple(o.id for o in stack.operators if o.id.endswith(".act"))
    column = next(o for o in stack.operators if o.id == consumers[0]).inputs[1]
    assert column is not None
    stack.redistributions.append(
        RedistributionDecision(
            tensor="mask",
            source=WHOLE,
            to=column.placement,
            gradient=None,
            forward=(Step(kind="slice", axis=0, source=REPLICATE, target=shard(0)),),
            backward=(),
            consumers=consumers,
        )
    )


def make_decisions(
    stack: Stack, *, bucket_of: tuple[int, ...] | None = None, zero_level: int = 1, microbatches: int = 1
) -> Decisions:
    """Decisions over what the stack holds; ``bucket_of`` gives the bucket of every parameter."""
    numbers = bucket_of or (0,) * len(stack.parameters)
    parameters = tuple(
        replace(parameter, bucket=number, zero_level=zero_level)
        for parameter, number in zip(stack.parameters, numbers, strict=True)
    )
    buckets = tuple(
        BucketDecision(
            id=number,
            axes=(0,),
            dtype="float32",
            zero_level=zero_level,
            zero_axes=(0,) if zero_level else (),
            parameters=tuple(p.name for p in parameters if p.bucket == number),
            elements=64 * sum(p.bucket == number for p in parameters),
        )
        for number in sorted(set(numbers))
    )
    return Decisions(
        mode="train",
        precision="fp32",
        optimizer="adamw",
        loss=LossDecision(kind="mean", output="y"),
        microbatches=microbatches,
        axes=AXES,
        operators=tuple(stack.operators),
        parameters=parameters,
        redistributions=tuple(stack.redistributions),
        buckets=buckets,
        regions=tuple(stack.regions),
    )


def make_stack(
    layers: int, *, columns: tuple[bool, ...] | None = None, recompute: tuple[str, ...] | None = None
) -> Stack:
    """A stack of ``layers`` layers in one run, and a loss."""
    stack = Stack()
    tensor = "x"
    for index in range(layers):
        tensor = add_layer(
            stack,
            index,
            tensor,
            column=columns[index] if columns else True,
            run=0 if layers > 1 else None,
            recompute=recompute[index] if recompute else "none",
        )
    add_loss(stack, tensor)
    return stack


CLUSTER: dict[str, object] = {
    "name": "2x2-cpu",
    "library": "gloo",
    "device": {
        "name": "cpu-core",
        "memory_bytes": 4294967296,
        "memory_bandwidth_bytes_per_s": 10000000000,
        "peak_flops": {"float32": 50000000000},
    },
    "levels": [
        {"name": "node", "size": 2, "kind": "pcie", "bandwidth_bytes_per_s": 2000000000, "latency_ns": 50000},
        {
            "name": "network",
            "size": 2,
            "kind": "switch",
            "nics": 1,
            "bandwidth_bytes_per_s": 12500000,
            "latency_ns": 200000,
        },
    ],
}


def make_document(decisions: Decisions, reads: dict[str, str], *, step_ns: int = 1_234_567) -> PlanDocument:
    """A complete document around the decisions, with illustrative numbers."""
    return build_document(
        producer=Producer(version="0.1.0", ortools="9.15.6755"),
        model=ModelInput(name="mlp.onnx", file_sha256="9f0c", graph_digest="1b7e", dims={"batch": 8}, batch=8),
        cluster=CLUSTER,
        options=PlanOptions(precision="fp32", mesh="dp=2,tp=2"),
        decisions=decisions,
        reads=reads,
        ranks=row_major_ranks((2, 2)),
        collectives=(
            CollectiveEntry(
                phase="forward",
                kind="all_reduce",
                axes=("tp",),
                algorithm="ring",
                elements=32,
                bytes=128,
                count=max(1, len(decisions.redistributions)),
                time_ns=150_000,
            ),
            CollectiveEntry(
                phase="gradient",
                kind="reduce_scatter",
                axes=("dp",),
                algorithm="ring",
                elements=128,
                bytes=512,
                count=len(decisions.buckets),
                time_ns=440_960,
            ),
        ),
        predicted=Predicted(
            step_ns=step_ns,
            compute_ns=1_000,
            communication_ns=step_ns - 1_000,
            hidden_ns=0,
            memory_bytes={
                "parameters": 512,
                "gradients": 512,
                "optimizer": 512,
                "activations": 384,
                "workspace": 0,
            },
        ),
        certificate=Certificate(
            objective_ns=step_ns,
            bound_ns=step_ns,
            gap_basis_points=0,
            status="optimal",
            space={"meshes": 4, "strategies": 61},
            not_in_objective=("overlap", "transient memory"),
        ),
    )
