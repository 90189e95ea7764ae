"""The options section of a plan: JSON values -> options; the inverse of ``encode.options_to_json``."""

from __future__ import annotations

from typing import Literal, cast

from tap_planner.errors import PlanFormatError
from tap_planner.operators import ComputeKind, CustomRule, FactorKind, RuleProblemError, custom_rule
from tap_planner.plan.options import (
    COSTS,
    DEFAULT_SCHEDULE,
    LOSSES,
    METHODS,
    MODES,
    OBJECTIVES,
    OPTIMIZER_STATES,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    TARGETS,
    Auto,
    PlanOptions,
)
from tap_planner.plan.overlap import AS_LIBRARY, Overlap
from tap_planner.plan.place_rules import PlaceRule
from tap_planner.plan.reader import MAX_INTEGER, REMEDY, Value, fail
from tap_planner.plan.rules import Constraint
from tap_planner.schedule import SCHEDULES

_RULES = ("forbid", "require")
_OVERLAPS = tuple(overlap.value for overlap in Overlap)
_FACTOR_KINDS = tuple(kind.value for kind in FactorKind)
_COMPUTE_KINDS = tuple(kind.value for kind in ComputeKind)


def options_from_json(value: Value) -> PlanOptions:
    """Read the options section."""
    loss = value.get("loss")
    batch, mesh, batch_dim = value.get("batch"), value.get("mesh"), value.get("batch_dim")
    target = value.get("target")
    return PlanOptions(
        mode=value["mode"].text(MODES),
        batch=None if batch is None else batch.integer(1),
        precision=value["precision"].text(PRECISIONS),
        optimizer=value["optimizer"].text(OPTIMIZERS),
        optimizer_states=_optimizer_states(value.get("optimizer_states")),
        loss=loss and loss["kind"].text(LOSSES),
        loss_output=loss and loss["output"].text(),
        objective="time" if (objective := value.get("objective")) is None else objective.text(OBJECTIVES),
        method=METHODS[0] if (method := value.get("method")) is None else method.text(METHODS),
        traversal_order="auto" if (order := value.get("traversal_order")) is None else order.text(),
        places=() if (places := value.get("places")) is None else places.each(_place_rule),
        cost=value["cost"].text(COSTS),
        overlap=AS_LIBRARY if (overlap := value.get("overlap")) is None else overlap.text(_OVERLAPS),
        zero=_auto(value["zero"], most=3),
        microbatches=_auto(value["microbatches"], least=1),
        recompute=value["recompute"].text(("auto", *RECOMPUTES)),
        mesh=mesh and mesh.text(),
        max_axes=value["max_axes"].integer(1),
        allow_idle=(idle := value.get("allow_idle")) is not None and idle.flag(),
        stages=1 if (stages := value.get("stages")) is None else _auto(stages, least=1),
        schedule=_schedule(value.get("schedule"), lines := _order(value.get("order"))),
        order=lines,
        chunks=None if (chunks := value.get("chunks")) is None else chunks.integer(1),
        gap_basis_points=value["gap_basis_points"].integer(0),
        max_regret_basis_points=None if (most := value.get("max_regret_basis_points")) is None else most.integer(0),
        max_memory_bytes=_memory_limit(value["max_memory_bytes"]),
        constraints=value["constraints"].each(_constraint),
        target=target and target.text(TARGETS),
        dims=value["dims"].counts(),
        shapes={name: shape.integers() for name, shape in value["shapes"].entries()},
        values={name: _numbers(number) for name, number in value["values"].entries()},
        batch_dim=batch_dim and batch_dim.text(),
        freeze=value["freeze"].texts(),
        train=value["train"].texts(),
        custom_rules=value["custom_rules"].each(_custom_rule) if value.get("custom_rules") is not None else (),
    )


def _order(value: Value | None) -> tuple[str, ...]:
    return () if value is None else value.texts()


def _schedule(value: Value | None, order: tuple[str, ...]) -> str:
    if value is None:
        return DEFAULT_SCHEDULE
    return value.text() if order else value.text(("auto", *SCHEDULES))


def _optimizer_states(value: Value | None) -> str:
    return OPTIMIZER_STATES[0] if value is None else value.text(("auto", *OPTIMIZER_STATES))


def _custom_rule(value: Value) -> CustomRule:
    try:
        return custom_rule(
            type=value["type"].text(),
            inputs=value["inputs"].each(lambda item: None if item.is_null else item.text()),
            outputs=value["outputs"].texts(),
            factors={name: kind.text(_FACTOR_KINDS) for name, kind in value["factors"].entries()},
            sizes={name: _size(size) for name, size in value["sizes"].entries()},
            linear=value["linear"].each(Value.texts),
            additive=value["additive"].integers(),
            kind=value["kind"].text(_COMPUTE_KINDS),
            flops=value["flops"].integer(1),
            saved_inputs=value["saved_inputs"].integers(),
            saved_outputs=value["saved_outputs"].integers(),
            trainable=value["trainable"].integers(),
            differentiable=None if (given := value.get("differentiable")) is None else given.integers(),
            dtype=value["dtype"].each(lambda item: None if item.is_null else item.text()),
            override=value["override"].flag(),
        )
    except RuleProblemError as problem:
        raise PlanFormatError(f"{value.place}.{problem}", hint=REMEDY) from problem


def _size(value: Value) -> int | str:
    return value.text() if isinstance(value.data, str) else value.integer(1)


def _number(value: Value) -> int:
    return value.integer(-(1 << 63))


def _numbers(value: Value) -> int | tuple[int, ...]:
    return value.each(_number) if isinstance(value.data, list) else _number(value)


def _auto(value: Value, least: int = 0, most: int = MAX_INTEGER) -> int | Auto:
    if value.data == "auto":
        return "auto"
    if isinstance(value.data, str):
        fail(value.place, value.data, "auto or an integer")
    return value.integer(least, most)


def _memory_limit(value: Value) -> int | Literal["device", "none"]:
    if isinstance(value.data, str):
        return cast(Literal["device", "none"], value.text(("device", "none")))
    return value.integer(1)


def _place_rule(value: Value) -> PlaceRule:
    return PlaceRule(pattern=value["operators"].text(), where=value["where"].text())


def _constraint(value: Value) -> Constraint:
    kind = cast(Literal["batch", "operator", "replicate"], value["kind"].text(("batch", "operator", "replicate")))
    named = value.get("value")
    return Constraint(
        kind=kind,
        pattern="" if kind == "batch" else value["operators"].text(),
        axis="" if kind == "replicate" else value["axis"].text(),
        value=named.text() if kind == "operator" and named is not None else "",
        forbid=value["rule"].text(_RULES) == "forbid",
        origin="the plan's constraint",
    )
