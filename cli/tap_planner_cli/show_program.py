"""A Program as a list of instructions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rich.console import Console

from tap_planner_cli.errors import printable
from tap_planner_cli.show_text import optimizer_text
from tap_planner_cli.tables import heading

if TYPE_CHECKING:
    from tap_planner.program import Instruction, Phase, Program, Release


def print_program(console: Console, program: Program) -> None:
    """Print what every rank does: once per microbatch, then once per step; of a pipeline stage by stage, with the order
    of its schedule."""
    pipeline = program.decisions.pipeline
    count = program.decisions.microbatches
    if pipeline is None:
        _print_part(console, f"Program: per microbatch ({count} a step)", program, program.microbatch)
        _print_part(console, "Program: once per step", program, program.step)
        return
    schedule = pipeline.schedule
    for stage, step in enumerate(program.steps):
        heading(console, f"Program of stage {stage}: {schedule.name}, {count} microbatches")
        chunks = schedule.chunks_of(stage)
        several = len(chunks) > 1
        console.print(" ".join(map(schedule.slot_text, schedule.orders[stage])))
        for local, number in enumerate(chunks):
            chunk = program.chunks[number]
            back = "backward of inputs (I)" if chunk.weights else "backward (B)"
            parts = [
                ("forward (F)", chunk.forward),
                (back, chunk.backward),
                ("backward of parameters (W)", chunk.weights),
            ]
            for name, instructions in parts:
                if instructions:
                    of = f", part {local} of the stage" if several else ""
                    _print_part(console, f"Stage {stage}{of}: {name}", program, instructions)
        _print_part(console, f"Stage {stage}: once per step", program, step)


def _print_part(console: Console, title: str, program: Program, instructions: Iterable[Instruction]) -> None:
    heading(console, title)
    for line in describe(program, instructions):
        console.print(line, soft_wrap=True)


def describe(program: Program, instructions: Iterable[Instruction]) -> Iterable[str]:
    """One line per instruction."""
    from tap_planner.program import (
        Compute,
        ForgetParameters,
        GatherParameters,
        GatherUpdated,
        Part,
        Receive,
        Redistribute,
        ReduceGradients,
        ReduceShards,
        Release,
        Send,
        SumTied,
        UpdateParameters,
    )

    axes = tuple(axis.name for axis in program.decisions.axes)
    optimizer = optimizer_text(program.decisions.optimizer, program.decisions.optimizer_states)
    for number, instruction in enumerate(instructions):
        match instruction:
            case Compute(phase, index, part):
                operator = program.graph.operators[index]
                of = "" if part is Part.ALL else f", gradients of {part.value}"
                phase_name, text = phase.value, f"compute {operator.type} {operator.id}{of}"
            case Send(phase, index, peer):
                phase_name, text = phase.value, f"send {_transferred(program, phase, index, peer, _SENT)}"
            case Receive(phase, index, peer):
                phase_name, text = phase.value, f"receive {_transferred(program, phase, index, peer, _RECEIVED)}"
            case SumTied(parameter):
                phase_name, text = "gradient", f"sum the gradient of {parameter} over the stages that hold it"
            case Redistribute(phase, index):
                phase_name, text = phase.value, _redistribution(program, index, phase.value, axes)
            case GatherParameters(phase, bucket):
                phase_name, text = phase.value, f"gather parameters of bucket {bucket}"
            case ForgetParameters(bucket):
                phase_name, text = "", f"forget whole parameters of bucket {bucket}"
            case ReduceShards(bucket):
                phase_name, text = "gradient", f"reduce shards of gradients of bucket {bucket}"
            case ReduceGradients(bucket):
                phase_name, text = "gradient", f"reduce gradients of bucket {bucket}"
            case UpdateParameters():
                phase_name, text = "optimizer", f"update parameters with {optimizer}"
            case GatherUpdated(bucket):
                phase_name, text = "optimizer", f"gather updated parameters of bucket {bucket}"
            case Release():
                phase_name, text = "", f"release {', '.join(_released(program, instruction))}"
        yield printable(f"{number:5d}  {phase_name:<10} {text}")


def _released(program: Program, release: Release) -> Iterable[str]:
    yield from release.tensors
    yield from (name for name, _ in release.inputs)
    yield from (f"copy of {program.decisions.redistributions[index].tensor}" for index in release.redistributions)


_SENT, _RECEIVED = ("to", "shared out"), ("from", "gathered")
"""Which way something goes between stages, and what is done about it where each rank sends a share."""


def _transferred(program: Program, phase: Phase, index: int, peer: int | None, words: tuple[str, str]) -> str:
    from tap_planner.program import scattered_axes

    name = program.graph.operators[index].inputs[0]
    if peer is None:
        return f"{name} within the stage"
    way, how = words
    axes = [program.decisions.axes[axis].name for axis in scattered_axes(program, phase, index)]
    return f"{name} {way} stage {peer}" + (f", {how} over {', '.join(axes)}" if axes else "")


def _redistribution(program: Program, index: int, phase: str, axes: tuple[str, ...]) -> str:
    decision = program.decisions.redistributions[index]
    steps = decision.backward if phase == "backward" else decision.forward
    kinds = ", ".join(f"{step.kind}({axes[step.axis]})" for step in steps) or "nothing to do"
    return f"redistribute {decision.tensor}: {kinds}"
