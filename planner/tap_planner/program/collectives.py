"""The list of collectives of a Program, counted instruction by instruction."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tap_planner.operators import rule_of
from tap_planner.program.types import (
    Collective,
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Redistribute,
    ReduceGradients,
)
from tap_planner.sharding import Placements, Step, apply_step, step_elements

CollectiveKey = tuple[Phase, str, tuple[int, ...], int, str]
"""(phase, kind, axes, elements, dtype)."""


def collectives(program: Program) -> tuple[Collective, ...]:
    """Every collective of one step on the rank at coordinate 0, equal ones counted together.

    Order: phase, kind, axes, elements.
    """
    counted: Counter[CollectiveKey] = Counter()
    for instruction in program.microbatch:
        for key in instruction_collectives(program, instruction):
            counted[key] += program.decisions.microbatches
    for instruction in program.step:
        counted.update(instruction_collectives(program, instruction))
    order = list(Phase)
    keys = sorted(counted, key=lambda key: (order.index(key[0]), *key[1:]))
    return tuple(
        Collective(phase=phase, kind=kind, axes=axes, elements=elements, dtype=dtype, count=counted[key])
        for key in keys
        for phase, kind, axes, elements, dtype in [key]
    )


def instruction_collectives(program: Program, instruction: Instruction) -> Iterator[CollectiveKey]:
    """The collectives that one instruction issues on the rank at coordinate 0."""
    match instruction:
        case Compute(phase=phase, operator=index) if phase is not Phase.BACKWARD:
            yield from _internal_collectives(program, phase, index)
        case Redistribute():
            yield from _redistribution_collectives(program, instruction)
        case GatherParameters(phase=phase, bucket=number):
            yield from _bucket_collective(program, phase, "all_gather", number)
        case ReduceGradients(bucket=number):
            level = program.decisions.buckets[number].zero_level
            kind = "reduce_scatter" if level else "all_reduce"
            yield from _bucket_collective(program, Phase.GRADIENT, kind, number)
        case GatherUpdated(bucket=number):
            yield from _bucket_collective(program, Phase.OPTIMIZER, "all_gather", number)
        case _:
            return


def _bucket_collective(program: Program, phase: Phase, kind: str, number: int) -> Iterator[CollectiveKey]:
    bucket = program.decisions.buckets[number]
    if bucket.elements:
        yield (phase, kind, bucket.axes, bucket.elements, bucket.dtype)


def _internal_collectives(program: Program, phase: Phase, index: int) -> Iterator[CollectiveKey]:
    operator = program.graph.operators[index]
    rule = rule_of(operator.signature)
    if not rule.collectives:
        return
    sizes = local_factor_sizes(program, index)
    strategy = program.decisions.operators[index].strategy
    for internal in rule.collectives:
        name = rule.factors[internal.factor].name
        axes = tuple(axis for axis, choice in enumerate(strategy) if choice.partition("[")[0] == name)
        if axes:
            elements = internal.multiplier
            for factor in internal.elements:
                elements *= sizes[factor]
            source = operator.signature.inputs[0]
            assert source is not None
            yield (phase, internal.kind, axes, elements, source.dtype)


def local_factor_sizes(program: Program, index: int) -> tuple[int, ...]:
    """Local size of every factor of an operator's rule on the rank at coordinate 0."""
    operator = program.graph.operators[index]
    rule = rule_of(operator.signature)
    shape = program.decisions.mesh_shape
    sizes = [factor.size for factor in rule.factors]
    for position, factor in enumerate(rule.factors):
        for axis, choice in enumerate(program.decisions.operators[index].strategy):
            name, _, blocks = choice.partition("[")
            if name == factor.name:
                parts = int(blocks.rstrip("]")) if blocks else 1
                sizes[position] = -(-(sizes[position] // parts) // shape[axis]) * parts
    return tuple(sizes)


def _redistribution_collectives(program: Program, instruction: Redistribute) -> Iterator[CollectiveKey]:
    decision = program.decisions.redistributions[instruction.redistribution]
    tensor = program.graph.tensors[decision.tensor]
    if instruction.phase is Phase.BACKWARD:
        assert decision.gradient is not None
        placements, steps = decision.gradient, decision.backward
    else:
        placements, steps = decision.source, decision.forward
    for kind, axis, elements in step_payloads(tensor.type.shape, placements, program.decisions.mesh_shape, steps):
        yield (instruction.phase, kind, (axis,), elements, tensor.type.dtype)


def step_payloads(
    shape: tuple[int, ...], placements: Placements, mesh_shape: tuple[int, ...], steps: tuple[Step, ...]
) -> Iterator[tuple[str, int, int]]:
    """(kind, axis, elements) of the steps that move data, on the rank at coordinate 0."""
    for step in steps:
        if not step.is_local:
            yield (step.kind, step.axis, step_elements(shape, placements, mesh_shape, step))
        placements = apply_step(placements, step)
