"""JSON values -> plan document; the inverse of ``encode``. Keys that are not known are ignored (a newer minor)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields

from tap_planner.cluster import rank_positions
from tap_planner.plan.certificate import PROOF_KINDS, Certificate, Nearness, ProofEntry, ShareEntry
from tap_planner.plan.decisions import (
    AxisDecision,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    RedistributionDecision,
)
from tap_planner.plan.decode_options import options_from_json
from tap_planner.plan.document import (
    PHASES,
    BlockEntry,
    BucketEntry,
    CollectiveEntry,
    Digests,
    FoldedDecisions,
    IdleDevices,
    IdlePlaces,
    MeshSection,
    ModelInput,
    ParameterEntry,
    PipelineSection,
    PlanDocument,
    Predicted,
    Producer,
    RedistributionEntry,
    RepeatEntry,
    Stage,
    row_major_ranks,
)
from tap_planner.plan.names import MAX_SERIES, NameFamily, NameItem, decode_list, decode_names
from tap_planner.plan.optimizer_states import decided_states, states_from_json
from tap_planner.plan.options import RECOMPUTES
from tap_planner.plan.placement import placement_from_json
from tap_planner.plan.reader import Value, fail
from tap_planner.sharding import Placements, Step

_STATUSES = ("optimal", "feasible")


def document_from_json(root: Value) -> PlanDocument:
    """Read a plan whose kind and version have been checked.

    Raises:
        PlanFormatError: a value is not what it must be; the message names place, value and remedy.
    """
    pipeline = _pipeline(root["pipeline"])
    mesh = _mesh(root["mesh"], pipeline.num_stages)
    axes = tuple(axis.name for axis in mesh.axes)
    producer = root["producer"]
    digests = root.get("digests")
    idle = root.get("idle")
    cluster = {key: value.data for key, value in root["inputs"]["cluster"].entries()}
    options = options_from_json(root["options"])
    return PlanDocument(
        format_version=root["format_version"].text(),
        producer=Producer(
            name=producer["name"].text(), version=producer["version"].text(), ortools=producer["ortools"].text()
        ),
        model=_model(root["inputs"]["model"]),
        cluster=cluster,
        options=options,
        mesh=mesh,
        pipeline=pipeline,
        optimizer_states=decided_states(root.get("optimizer")),
        folded=FoldedDecisions(
            parameters=root["parameters"].each(lambda value: _parameter(value, axes)),
            blocks=root["blocks"].each(lambda value: _block(value, axes)),
            repeats=root["repeats"].each(_repeat),
            redistributions=root["redistributions"].each(lambda value: _redistribution(value, axes)),
            buckets=root["buckets"].each(lambda value: _bucket(value, axes)),
        ),
        collectives=root["collectives"].each(lambda value: _collective(value, axes)),
        idle=() if idle is None else idle.each(lambda value: _idle(value, mesh)),
        placement=None if (placement := root.get("placement")) is None else placement_from_json(placement),
        predicted=_predicted(root["predicted"]),
        certificate=_certificate(root["certificate"], options.objective),
        digests=digests and Digests(decisions=digests["decisions"].text(), plan=digests["plan"].text()),
    )


def _model(value: Value) -> ModelInput:
    return ModelInput(
        name=value["name"].text(),
        file_sha256=value["file_sha256"].text(),
        graph_digest=value["graph_digest"].text(),
        dims=value["dims"].counts(),
        batch=value["batch"].integer(1),
    )


def _mesh(value: Value, num_stages: int) -> MeshSection:
    axes = value["axes"].each(
        lambda axis: AxisDecision(name=axis["name"].text(), size=axis["size"].integer(1), levels=axis["levels"].texts())
    )
    if len({axis.name for axis in axes}) != len(axes):
        fail(f"{value.place}.axes", [axis.name for axis in axes], "axes of different names")
    order = _order(value.get("device_order"), [axis.name for axis in axes])
    ranks = _ranks(value["ranks"], [axis.size for axis in axes], order)
    devices = num_stages * math.prod(axis.size for axis in axes)
    if len(ranks) != devices:
        of_stages = f" and of {num_stages} stages" if num_stages > 1 else ""
        fail(f"{value.place}.ranks", len(ranks), f"{devices} ranks, the product of the axes{of_stages}")
    left_out = value.get("idle_devices")
    idle_devices = () if left_out is None else left_out.each(_idle_places)
    return MeshSection(axes=axes, order=order, ranks=ranks, idle_devices=idle_devices)


def _order(value: Value | None, names: list[str]) -> tuple[int, ...]:
    if value is None:
        return ()
    listed = list(value.texts())
    if sorted(listed) != sorted(names) or listed == names:
        fail(value.place, listed, f"the axes {', '.join(names)}, each once and in another order")
    return tuple(names.index(name) for name in listed)


def _idle_places(value: Value) -> IdlePlaces:
    first, last = value["first"].integers(), value["last"].integers()
    if len(first) != len(last) or any(low > high for low, high in zip(first, last, strict=True)):
        fail(f"{value.place}.last", list(last), f"a place from {list(first)} on")
    return IdlePlaces(first=first, last=last)


def _idle(value: Value, mesh: MeshSection) -> IdleDevices:
    sizes = {axis.name: axis.size for axis in mesh.axes}
    name = value["axis"].text(tuple(sizes))
    end = value["end"].integer(1, sizes[name])
    return IdleDevices(axis=name, first=value["first"].integer(1, end), end=end)


def _ranks(value: Value, sizes: Sequence[int], order: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    if not isinstance(value.data, dict):
        return value.each(Value.integers)
    value["order"].text(("row-major",))
    shape = value["shape"].integers()
    total = 1
    for size in shape:
        total *= size
    if total > MAX_SERIES:
        fail(value.place, list(shape), f"at most {MAX_SERIES} ranks")
    places = row_major_ranks(shape)
    stages, rest = divmod(total, math.prod(sizes))
    return tuple(places[position] for position in rank_positions(sizes, order, stages).tolist()) if not rest else places


def _pipeline(value: Value) -> PipelineSection:
    order, scatter = value.get("order"), value.get("scatter")
    return PipelineSection(
        stages=value["stages"].each(_stage),
        schedule=value["schedule"].text(),
        microbatches=value["microbatches"].integer(1),
        order=() if order is None else order.each(lambda line: line.text()),
        scatter=() if scatter is None else scatter.each(lambda axis: axis.text()),
    )


def _stage(value: Value) -> Stage:
    number = value.get("stage")
    return Stage(
        first=value["first"].text(), last=value["last"].text(), stage=0 if number is None else number.integer(0)
    )


def _optional(value: Value | None, axes: Sequence[str]) -> Placements | None:
    return None if value is None else value.placements(axes)


def _owner(value: Value) -> tuple[str | None, int]:
    block = value.get("block")
    return (None, 0) if block is None else (block.text(), value["variant"].integer())


def _parameter(value: Value, axes: Sequence[str]) -> ParameterEntry:
    name = value["name"].text()
    tensors = value.get("tensors")
    block, variant = _owner(value)
    buckets = decode_runs(value["bucket"])
    if block is None and len(buckets) != 1:
        fail(f"{value.place}.bucket", value["bucket"].data, "one value for a parameter outside blocks")
    return ParameterEntry(
        block=block,
        variant=variant,
        tensors=(name,) if tensors is None else tensors.texts(),
        decision=ParameterDecision(
            name=name,
            shape=value["shape"].integers(),
            dtype=value["dtype"].text(),
            trainable=value["trainable"].flag(),
            placement=value["placement"].placements(axes),
            gradient=_optional(value.get("gradient"), axes),
            zero_level=value["zero"]["level"].integer(most=3),
            zero_axes=value["zero"]["axes"].axes(axes),
            bucket=None,
        ),
        buckets=buckets,
    )


def decode_runs(value: Value) -> tuple[int | None, ...]:
    """Inverse of ``encode.encode_runs``."""
    values: list[int | None] = []
    for item in value.items():
        if not isinstance(item.data, list):
            values.append(None if item.is_null else item.integer())
            continue
        parts = [Value(part, item.place) for part in item.data]
        if len(parts) not in (2, 3) or (len(parts) == 3 and parts[0].is_null):
            fail(item.place, item.data, "[value, count] or [first, count, step]")
        first = None if parts[0].is_null else parts[0].integer()
        count = parts[1].integer(1)
        step = parts[2].integer(1) if len(parts) == 3 else 0
        if len(values) + count > MAX_SERIES:
            fail(item.place, count, f"at most {MAX_SERIES} values")
        values.extend(None if first is None else first + step * index for index in range(count))
    return tuple(values)


def _block(value: Value, axes: Sequence[str]) -> BlockEntry:
    return BlockEntry(
        id=value["id"].text(),
        variant=value["variant"].integer(),
        operators=value["operators"].each(lambda operator: _operator(operator, axes)),
    )


def _operator(value: Value, axes: Sequence[str]) -> OperatorDecision:
    strategy = {axis: choice.text() for axis, choice in value["strategy"].entries()}
    if sorted(strategy) != sorted(axes):
        fail(f"{value.place}.strategy", list(strategy), f"the axes {', '.join(axes)}")
    return OperatorDecision(
        id=value["id"].text(),
        name=value["name"].text(),
        type=value["type"].text(),
        strategy=tuple(strategy[axis] for axis in axes),
        inputs=value["inputs"].each(lambda operand: _operand(operand, axes)),
        outputs=value["outputs"].each(
            lambda output: OutputDecision(
                tensor=output["tensor"].text(),
                shape=output["shape"].integers(),
                placement=output["placement"].placements(axes),
            )
        ),
    )


def _operand(value: Value, axes: Sequence[str]) -> OperandDecision | None:
    if value.is_null:
        return None
    return OperandDecision(
        tensor=value["tensor"].text(),
        placement=value["placement"].placements(axes),
        gradient=_optional(value.get("gradient"), axes),
    )


def _name_table(value: Value, count: int) -> dict[str, tuple[str, ...]]:
    return {name: _names(family, count) for name, family in value.entries()}


def _names(value: Value, count: int) -> tuple[str, ...]:
    family: NameFamily
    if isinstance(value.data, str):
        family = value.text()
    elif isinstance(value.data, list):
        family = list(value.each(_name_item))
    else:
        family = _name_item(value)
    try:
        return decode_names(family, count)
    except ValueError as error:
        return fail(value.place, value.data, f"{count} names: {error}")


def _name_item(value: Value) -> NameItem:
    if isinstance(value.data, str):
        return value.text()
    return {"pattern": value["pattern"].text(), "values": value["values"].text()}


def _name_list(value: Value) -> tuple[str, ...]:
    try:
        return decode_list(value.each(_name_item))
    except ValueError as error:
        return fail(value.place, value.data, f"names: {error}")


def _repeat(value: Value) -> RepeatEntry:
    count = value["count"].integer(1)
    if count > MAX_SERIES:
        fail(f"{value.place}.count", count, f"at most {MAX_SERIES}")
    run, labels = value.get("run"), value.get("labels")
    return RepeatEntry(
        block=value["block"].text(),
        variant=value["variant"].integer(),
        run=None if run is None else run.integer(),
        count=count,
        recompute=value["recompute"].text(RECOMPUTES),
        names=_name_table(value["names"], count),
        labels={} if labels is None else _name_table(labels, count),
    )


def _redistribution(value: Value, axes: Sequence[str]) -> RedistributionEntry:
    block, variant = _owner(value)
    given = value.get("count")
    count = 1 if given is None else given.integer(2)
    return RedistributionEntry(
        block=block,
        variant=variant,
        decision=RedistributionDecision(
            tensor=value["tensor"].text(),
            source=value["from"].placements(axes),
            to=value["to"].placements(axes),
            gradient=_optional(value.get("gradient"), axes),
            forward=value["forward"].each(lambda step: _step(step, axes)),
            backward=value["backward"].each(lambda step: _step(step, axes)),
            consumers=_name_list(value["consumers"]),
        ),
        count=count,
        names={} if count == 1 else _name_table(value["names"], count),
    )


def _step(value: Value, axes: Sequence[str]) -> Step:
    split = value["axes"].axes(axes)
    if len(split) != 1:
        fail(f"{value.place}.axes", value["axes"].data, "one axis")
    return Step(
        kind=value["kind"].text(),
        axis=split[0],
        source=value["from"].placement(),
        target=value["to"].placement(),
    )


def _bucket(value: Value, axes: Sequence[str]) -> BucketEntry:
    count, step = value.get("count"), value.get("step")
    data_axes, level, given = value["axes"].axes(axes), value["zero"].integer(most=3), value.get("zero_axes")
    zero_axes = data_axes if given is None else given.axes(axes)
    if not set(zero_axes) <= set(data_axes):
        fail(f"{value.place}.zero_axes", [axes[axis] for axis in zero_axes], "some of the bucket's axes")
    return BucketEntry(
        id=value["id"].integer(),
        count=1 if count is None else count.integer(1, MAX_SERIES),
        step=1 if step is None else step.integer(1),
        axes=data_axes,
        dtype=value["dtype"].text(),
        zero_level=level,
        zero_axes=zero_axes if level else (),
        elements=value["elements"].integer(),
    )


def _collective(value: Value, axes: Sequence[str]) -> CollectiveEntry:
    return CollectiveEntry(
        phase=value["phase"].text(PHASES),
        kind=value["kind"].text(),
        axes=tuple(axes[axis] for axis in value["axes"].axes(axes)),
        algorithm=value["algorithm"].text(),
        elements=value["elements"].integer(),
        bytes=value["bytes"].integer(),
        count=value["count"].integer(),
        time_ns=value["time_ns"].integer(),
    )


def _predicted(value: Value) -> Predicted:
    return Predicted(
        step_ns=value["step_ns"].integer(),
        compute_ns=value["compute_ns"].integer(),
        communication_ns=value["communication_ns"].integer(),
        hidden_ns=value["hidden_ns"].integer(),
        memory_bytes=value["memory_bytes"].counts(),
        stage_memory_bytes=() if (stages := value.get("stage_memory_bytes")) is None else stages.integers(),
        tokens=None if value.get("tokens") is None else value["tokens"].integer(),
    )


def _certificate(value: Value, objective: str) -> Certificate:
    def number(key: str) -> int | None:
        return None if (found := value.get(key)) is None else found.integer()

    sent = objective == "communication"
    memory = value.get("memory_proof")
    return Certificate(
        objective_ns=value["objective_ns"].integer(),
        bound_ns=0 if sent else value["bound_ns"].integer(),
        objective_bytes=None if objective == "time" else value["objective_bytes"].integer(),
        bound_bytes=None if objective == "time" else value["bound_bytes"].integer(),
        lagrangian_bound_bytes=number("lagrangian_bound_bytes"),
        time_gap_basis_points=number("time_gap_basis_points"),
        memory_proof=() if memory is None else memory.each(lambda entry: _proof(entry, "bytes")),
        gap_basis_points=value["gap_basis_points"].integer(),
        status=value["status"].text(_STATUSES),
        space=value["space"].counts(),
        not_in_objective=value["not_in_objective"].texts(),
        near=None if (near := value.get("near")) is None else _near(near),
        states=None if (states := value.get("optimizer_states")) is None else states_from_json(states),
        lagrangian_bound_ns=number("lagrangian_bound_ns"),
        simple_bound_ns=number("simple_bound_ns"),
        proof=()
        if (proof := value.get("proof")) is None
        else proof.each(lambda entry: _proof(entry, "bytes" if sent else "ns")),
    )


def _proof(value: Value, unit: str) -> ProofEntry:
    def number(key: str) -> int | None:
        return None if (found := value.get(key)) is None else found.integer()

    def flag(key: str) -> bool:
        return (found := value.get(key)) is not None and found.flag()

    multiplier = (0, 1) if (given := value.get("multiplier")) is None else _fraction(given)
    shares = () if (found := value.get("shares")) is None else tuple(_shares(found))
    counts = value["microbatches"].each(lambda count: count.integer(1))
    return ProofEntry(
        mesh=value["mesh"].text(),
        part=number("part") or 0,
        setting=number("setting") or 0,
        room=number("room"),
        microbatches=counts,
        and_more=flag("and_more"),
        and_multiples=flag("and_multiples"),
        by=value["by"].text(PROOF_KINDS),
        bound_ns=number(f"bound_{unit}") or 0,
        multiplier=multiplier,
        shares=shares,
        loose=() if (found := value.get("loose")) is None else _loose(found),
        graph_of=number("graph_of"),
        solver_ns=number(f"solver_{unit}"),
    )


def _loose(value: Value) -> tuple[int, ...] | None:
    return None if value.data == "all" else value.each(lambda number: number.integer(-1))


def _shares(value: Value) -> Iterator[ShareEntry]:
    for tensor, rows in value.entries():
        for row in rows.items():
            items = tuple(row.items())
            if len(items) != 2:
                fail(row.place, row.data, "key and parts")
            key = items[0].each(lambda number: number.integer(-1))
            if len(key) not in (1, 2):
                fail(items[0].place, list(key), "destination and gradient, or a state")
            yield ShareEntry(tensor=tensor, key=key, parts=items[1].integers())


def _fraction(value: Value) -> tuple[int, int]:
    parts = value.integers()
    if len(parts) != 2 or not parts[1]:
        fail(value.place, list(parts), "numerator and denominator")
    return parts[0], parts[1]


def _near(value: Value) -> Nearness:
    return Nearness(**{field.name: value[field.name].integer() for field in fields(Nearness)})
