"""The pipeline of a plan: from decisions to the section of the document, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NoReturn

from tap_planner.errors import PlanFormatError, UsageError
from tap_planner.operators import TRANSFER
from tap_planner.plan.decisions import Decisions, OperatorDecision, PipelineDecision
from tap_planner.plan.document import PipelineSection, Stage
from tap_planner.schedule import SCHEDULES, PipelineSchedule, make_schedule, parse_order, to_text

__all__ = ["expand_pipeline", "pipeline_section", "stage_starts"]

_HINT = "The plan was edited or damaged; write it again with tap-plan."


def pipeline_section(decisions: Decisions) -> PipelineSection:
    """What the document says of stages and schedule; without a pipeline all operators are one stage."""
    operators, pipeline = decisions.operators, decisions.pipeline
    if pipeline is None:
        stages = (Stage(first=operators[0].id, last=operators[-1].id),) if operators else ()
        return PipelineSection(stages=stages, microbatches=decisions.microbatches)
    schedule = pipeline.schedule
    return PipelineSection(
        stages=tuple(_stages(operators, pipeline)),
        schedule=schedule.name,
        microbatches=decisions.microbatches,
        order=() if _is_named(schedule) else tuple(to_text(schedule).splitlines()),
        scatter=tuple(decisions.axes[axis].name for axis in pipeline.scatter_axes),
    )


def _stages(operators: Sequence[OperatorDecision], pipeline: PipelineDecision) -> Iterator[Stage]:
    ends = (*pipeline.chunks[1:], len(operators))
    for chunk, (first, end) in enumerate(zip(pipeline.chunks, ends, strict=True)):
        own = [operator.id for operator in operators[first:end] if operator.type != TRANSFER]
        yield Stage(first=own[0], last=own[-1], stage=pipeline.stage_of(chunk))


def _is_named(schedule: PipelineSchedule) -> bool:
    """Whether its name says all of it."""
    if schedule.name not in SCHEDULES:
        return False
    return schedule == make_schedule(schedule.name, schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)


def stage_starts(section: PipelineSection) -> tuple[str, ...]:
    """Where the model is cut (``graph.cut_in_stages``): the first operator of every chunk; empty without a pipeline."""
    return tuple(stage.first for stage in section.stages) if section.num_stages > 1 else ()


def expand_pipeline(
    section: PipelineSection, operators: Sequence[OperatorDecision], axes: Sequence[str]
) -> PipelineDecision | None:
    """The pipeline of a plan; None where there is one stage.

    Args:
        section: of the document.
        operators: of the plan, transfers among them.
        axes: names of the mesh's axes.

    Raises:
        PlanFormatError: stages, schedule and operators do not fit together.
    """
    if section.num_stages == 1:
        return None
    schedule = _schedule(section)
    for chunk, stage in enumerate(section.stages):
        if schedule.rank_and_chunk(chunk)[0] != stage.stage:
            raise PlanFormatError(
                f"pipeline.stages[{chunk}].stage: {stage.stage}, expected {schedule.rank_and_chunk(chunk)[0]} by the "
                f"schedule {section.schedule!r}",
                hint=_HINT,
            )
    return PipelineDecision(
        chunks=_chunks(section, operators), schedule=schedule, scatter_axes=_scatter_axes(section, axes)
    )


def _scatter_axes(section: PipelineSection, axes: Sequence[str]) -> tuple[int, ...]:
    for name in section.scatter:
        if name not in axes:
            raise PlanFormatError(f"pipeline.scatter: {name!r}, expected one of {', '.join(axes)}", hint=_HINT)
    return tuple(axis for axis, name in enumerate(axes) if name in section.scatter)


def _schedule(section: PipelineSection) -> PipelineSchedule:
    """The schedule by its name, or by its order."""
    stages, count = section.num_stages, len(section.stages)
    chunks, rest = divmod(count, stages)
    try:
        if section.order:
            own = parse_order("\n".join(section.order), "pipeline.order")
            if own.num_virtual_stages != count:
                _wrong_count(count, f"{own.num_virtual_stages} by pipeline.order")
            return own
        if rest:
            _wrong_count(count, f"a multiple of {stages} stages")
        return make_schedule(section.schedule, stages, section.microbatches, chunks)
    except UsageError as error:
        raise PlanFormatError(f"pipeline: {error.message}", hint=_HINT) from error


def _wrong_count(count: int, expected: str) -> NoReturn:
    raise PlanFormatError(f"pipeline.stages: {count} entries, expected {expected}", hint=_HINT)


def _chunks(section: PipelineSection, operators: Sequence[OperatorDecision]) -> tuple[int, ...]:
    """Where chunks begin: with the transfers before their first operator."""
    place = {operator.id: index for index, operator in enumerate(operators)}
    chunks: list[int] = []
    for number, stage in enumerate(section.stages):
        for key, name in (("first", stage.first), ("last", stage.last)):
            if name not in place:
                raise PlanFormatError(f"pipeline.stages[{number}].{key}: no operator is called {name!r}", hint=_HINT)
        first = place[stage.first]
        while first and operators[first - 1].type == TRANSFER:
            first -= 1
        end = place[section.stages[number - 1].last] + 1 if number else 0
        if first != end or place[stage.last] < place[stage.first]:
            raise PlanFormatError(
                f"pipeline.stages[{number}]: from {stage.first!r} to {stage.last!r}, expected all that follows the "
                "stage before, in order",
                hint=_HINT,
            )
        chunks.append(first)
    if section.stages and place[section.stages[-1].last] != len(operators) - 1:
        raise PlanFormatError(
            f"pipeline.stages: the last ends at {section.stages[-1].last!r}, not at the end", hint=_HINT
        )
    return tuple(chunks)
