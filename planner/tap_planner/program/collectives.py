"""The list of collectives of a Program, counted instruction by instruction."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator

from tap_planner.errors import PlanFormatError
from tap_planner.operators import TensorType, rule_of
from tap_planner.program.reading import part_gradients
from tap_planner.program.types import (
    Collective,
    Compute,
    GatherParameters,
    GatherUpdated,
    Instruction,
    Phase,
    Program,
    Receive,
    Redistribute,
    ReduceGradients,
    ReduceShards,
    Send,
    SumTied,
)
from tap_planner.sharding import (
    Choice,
    Placements,
    Step,
    apply_step,
    local_elements,
    operand_passes,
    parse_choice,
    step_elements,
)

CollectiveKey = tuple[Phase, str, tuple[int, ...], int, str]
"""(phase, kind, axes, elements, dtype)."""


def collectives(program: Program, stage: int | None = None) -> tuple[Collective, ...]:
    """Every collective of one step on the rank at coordinate 0 of a stage, equal ones counted together.

    Args:
        program: the plan, lowered.
        stage: of the pipeline; None: the lists of all stages, added up.

    Returns:
        In the order phase, kind, axes, elements.
    """
    counted: Counter[CollectiveKey] = Counter()
    for number, chunk in enumerate(program.chunks):
        if stage in (None, program.stage_of(number)):
            for instruction in (*chunk.forward, *chunk.backward, *chunk.weights):
                for key in instruction_collectives(program, instruction):
                    counted[key] += program.decisions.microbatches
    for number, instructions in enumerate(program.steps):
        if stage in (None, number):
            for instruction in instructions:
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
        case Compute():
            yield from _internal_collectives(program, instruction)
        case Redistribute():
            yield from _redistribution_collectives(program, instruction)
        case Send(phase=phase, operator=index, peer=int()):
            tensor, _ = transferred(program, phase, index)
            yield (phase, "send_recv", (), sent_elements(program, phase, index), tensor.dtype)
        case Receive(phase=phase, operator=index, peer=int()):
            yield from _gathered(program, phase, index)
        case SumTied(parameter=name):
            (tied,) = (parameter for parameter in program.decisions.parameters if parameter.name == name)
            elements = local_elements(tied.shape, tied.placement, program.decisions.mesh_shape)
            yield (Phase.GRADIENT, "all_reduce", (), elements, tied.dtype)
        case GatherParameters(phase=phase, bucket=number):
            yield from _bucket_collective(program, phase, "all_gather", number)
        case ReduceGradients(bucket=number):
            level = program.decisions.buckets[number].zero_level
            kind = "reduce_scatter" if level else "all_reduce"
            yield from _bucket_collective(program, Phase.GRADIENT, kind, number)
        case ReduceShards(bucket=number):
            bucket = program.decisions.buckets[number]
            shards = math.prod(program.decisions.mesh_shape[axis] for axis in bucket.zero_axes)
            if bucket.elements:
                yield (Phase.GRADIENT, "all_reduce", bucket.rest_axes, bucket.elements // shards, bucket.dtype)
        case GatherUpdated(bucket=number):
            yield from _bucket_collective(program, Phase.OPTIMIZER, "all_gather", number)
        case _:
            return


def _bucket_collective(program: Program, phase: Phase, kind: str, number: int) -> Iterator[CollectiveKey]:
    bucket = program.decisions.buckets[number]
    if bucket.elements:
        axes = bucket.zero_axes if bucket.zero_level else bucket.axes
        yield (phase, kind, axes, bucket.elements, bucket.dtype)


def transferred(program: Program, phase: Phase, transfer: int) -> tuple[TensorType, Placements]:
    """What a ``Transfer`` (index of the operator) brings, or in phase BACKWARD takes back: its global type, and where
    its parts lie."""
    operand = program.decisions.operators[transfer].inputs[0]
    assert operand is not None
    placements = operand.gradient if phase is Phase.BACKWARD else operand.placement
    assert placements is not None
    return program.graph.tensors[operand.tensor].type, placements


def scattered_axes(program: Program, phase: Phase, transfer: int) -> tuple[int, ...]:
    """Axes along which a transfer to another stage is shared out: those of the plan on which all ranks hold the same
    of it."""
    pipeline = program.decisions.pipeline
    if pipeline is None or not pipeline.scatter_axes:
        return ()
    _, placements = transferred(program, phase, transfer)
    return tuple(axis for axis in pipeline.scatter_axes if placements[axis].is_replicate)


def sent_elements(program: Program, phase: Phase, transfer: int) -> int:
    """What the rank at coordinate 0 sends to another stage of a transfer; shares are equal, the last filled up."""
    tensor, placements = transferred(program, phase, transfer)
    mesh_shape = program.decisions.mesh_shape
    shares = math.prod(mesh_shape[axis] for axis in scattered_axes(program, phase, transfer))
    return -(-local_elements(tensor.shape, placements, mesh_shape) // shares)


def _gathered(program: Program, phase: Phase, transfer: int) -> Iterator[CollectiveKey]:
    """What ranks of a stage put together of their shares."""
    axes = scattered_axes(program, phase, transfer)
    if axes:
        tensor, _ = transferred(program, phase, transfer)
        shares = math.prod(program.decisions.mesh_shape[axis] for axis in axes)
        yield (phase, "all_gather", axes, shares * sent_elements(program, phase, transfer), tensor.dtype)


def _internal_collectives(program: Program, instruction: Compute) -> Iterator[CollectiveKey]:
    phase, index = instruction.phase, instruction.operator
    operator = program.graph.operators[index]
    rule = rule_of(operator.signature)
    if not rule.collectives:
        return
    sizes = local_factor_sizes(program, index)
    choices = _choices(program, index)
    spread = [choice.spreads(rule) for choice in choices]
    axes_of = [tuple(axis for axis, found in enumerate(spread) if found == f) for f in range(len(rule.factors))]
    ranks = [math.prod(program.decisions.mesh_shape[axis] for axis in axes) for axes in axes_of]
    issued = [internal for internal in rule.collectives if axes_of[internal.factor]]
    needed = None
    if phase is Phase.BACKWARD:
        needed = part_gradients(program.graph, program.decisions.operators[index], instruction.part)
    source = operator.signature.inputs[0]
    assert source is not None
    for internal in issued if needed is None else reversed(issued):
        key = (phase, internal.kind, axes_of[internal.factor], internal.num_elements(sizes, ranks), source.dtype)
        yield from itertools.repeat(key, internal.times(ranks, needed))


def _choices(program: Program, index: int) -> tuple[Choice, ...]:
    """What an operator does on each axis."""
    rule, decision = rule_of(program.graph.operators[index].signature), program.decisions.operators[index]
    try:
        return tuple(parse_choice(rule, name) for name in decision.strategy)
    except ValueError as error:
        raise PlanFormatError(
            f"strategy of operator {decision.id!r} ({decision.type}): {error}",
            hint="Write the plan again with tap-plan.",
        ) from error


def local_factor_sizes(program: Program, index: int) -> tuple[int, ...]:
    """Local size of every factor of an operator's rule on the rank at coordinate 0."""
    rule = rule_of(program.graph.operators[index].signature)
    sizes = [factor.size for factor in rule.factors]
    for axis, choice in enumerate(_choices(program, index)):
        position = choice.divides(rule)
        if position is not None:
            length = sizes[position] // choice.blocks
            sizes[position] = -(-length // program.decisions.mesh_shape[axis]) * choice.blocks
    return tuple(sizes)


def local_operands(program: Program, index: int) -> tuple[int, ...]:
    """Elements of each operand that an operator reads on the rank at coordinate 0: its own part, in a ring those of all
    others as well; 0 for an absent operand."""
    operator, decision = program.graph.operators[index], program.decisions.operators[index]
    shape = program.decisions.mesh_shape
    passes = operand_passes(rule_of(operator.signature), _choices(program, index), shape)
    return tuple(
        0 if operand is None or given is None else times * local_elements(operand.shape, given.placement, shape)
        for operand, given, times in zip(operator.signature.inputs, decision.inputs, passes, strict=True)
    )


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
