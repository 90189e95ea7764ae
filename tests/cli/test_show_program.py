"""The Program of a pipeline as lines of text."""

from __future__ import annotations

from tap_planner_cli.show_program import describe
from tests.apply.pipelined import Pipelined


def test_instructions_of_a_pipeline_are_shown() -> None:
    """What is sent, received, split in two and summed over stages is told with the other stage."""
    program = Pipelined(schedule="zb-h1", mesh=()).program(1)
    lines = [line[7:] for line in describe(program, (*program.microbatch, *program.step))]
    sent = {line.split()[2] for line in lines if line.startswith("forward    send ") and line.endswith("to stage 1")}
    returned = {line.split()[2] for line in lines if line.startswith("backward   send ")}
    assert sent >= returned and returned
    assert all(f"forward    receive {name} from stage 0" in lines for name in sent)
    assert all(f"backward   send {name} to stage 0" in lines for name in returned)
    assert all(f"backward   receive {name} from stage 1" in lines for name in returned)
    assert any(line.endswith(", gradients of inputs") for line in lines)
    assert any(line.endswith(", gradients of parameters") for line in lines)
    assert "gradient   sum the gradient of m.lm_head.weight over the stages that hold it" in lines


def test_what_stays_in_a_stage_is_shown() -> None:
    """Chunks of one stage hand over, and nothing is sent."""
    program = Pipelined(schedule="interleaved", stages=1, chunks=2, mesh=()).program(1)
    lines = list(describe(program, program.microbatch))
    assert any(line.endswith(" within the stage") for line in lines)
    assert not any("to stage" in line for line in lines)
