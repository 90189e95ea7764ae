"""From a placement to the plan document: what each device does, holds and sends, and how good it is."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tap_planner.documents import model_input, new_tokens, producer
from tap_planner.placements import FoundPlacement, Placed, outcomes_of
from tap_planner.plan import (
    Certificate,
    CollectiveEntry,
    DeviceLoad,
    IdlePlaces,
    PlacementSection,
    PlanDocument,
    Predicted,
    build_document,
    gap_basis_points,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tap_planner.program import Send

__all__ = ["device_loads", "placement_document", "predicted_of"]

NOT_IN_MAKESPAN = ("gradients summed before they are sent", "live activations", "updates at the end of the step")
"""What the objective and the memory of a placement leave out; docs/traversal-order.md says more."""
NOT_IN_MAKESPAN_OF_INFERENCE = ("live activations",)
"""The same in inference."""


def placement_document(found: FoundPlacement) -> PlanDocument:
    """The document of the best placement."""
    from tap_planner.cluster import cluster_to_json, unused_boxes

    placed = found.best
    read, plan, graph = placed.read, placed.plan, placed.plan.graph
    places, loads = read.cluster.places(), device_loads(placed)
    return build_document(
        producer=producer(),
        model=model_input(read.graph),
        cluster=cluster_to_json(read.cluster),
        options=read.options,
        decisions=plan.decisions,
        reads={name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None},
        ranks=tuple(places[device] for device in plan.devices),
        left_out=tuple(IdlePlaces(first=f, last=last) for f, last in unused_boxes(read.cluster, plan.devices)),
        collectives=_transfers(placed),
        predicted=predicted_of(placed, loads),
        certificate=_certificate(found),
        placement=PlacementSection(
            order=placed.order, placer=placed.placer, devices=loads, orders=outcomes_of(found.placing)
        ),
    )


def device_loads(placed: Placed) -> tuple[DeviceLoad, ...]:
    """By stage what its device does, holds and sends."""
    built, read, plan = placed.built, placed.read, placed.plan
    group_ns = built.problem.group_ns()
    held = built.memory_by_kind(placed.placement)
    sent = Counter[int]()
    for stage, _, instruction in _sends(placed):
        sent[stage] += placed.durations.transfer_bytes(instruction)
    limits = None if read.options.max_memory_bytes == "none" else built.problem.capacity_bytes.tolist()
    buffers = placed.buffers_bytes
    loads: list[DeviceLoad] = []
    for stage, device in enumerate(plan.devices):
        groups = [group for group, on in enumerate(placed.placement) if on == device]
        memory = held[device] | ({"workspace": buffers} if buffers or read.options.mode == "train" else {})
        loads.append(
            DeviceLoad(
                place=built.devices[device].place,
                kind=built.devices[device].device.name,
                operators=sum(len(built.operators[group]) for group in groups),
                compute_ns=int(group_ns[groups, device].sum()),
                sent_bytes=sent[stage],
                memory_bytes=memory,
                limit_bytes=None if limits is None else limits[device] + placed.reserved_buffers_bytes,
            )
        )
    return tuple(loads)


def _sends(placed: Placed) -> Iterator[tuple[int, int, Send]]:
    """Everything that is sent to another stage: from where, to where, and the instruction."""
    from tap_planner.program import Send

    program = placed.program
    for number, chunk in enumerate(program.chunks):
        for instruction in (*chunk.forward, *chunk.backward):
            if isinstance(instruction, Send) and instruction.peer is not None:
                yield program.stage_of(number), instruction.peer, instruction


def _transfers(placed: Placed) -> tuple[CollectiveEntry, ...]:
    """As ``program.collectives`` lists them; the time of one is the mean of those that it stands for."""
    from tap_planner.program import collectives, instruction_collectives

    durations, program = placed.durations, placed.program
    spent = Counter[object]()
    for stage, peer, instruction in _sends(placed):
        (key,) = instruction_collectives(program, instruction)
        spent[key] += durations.transfer_ns(instruction, (stage, peer))
    entries: list[CollectiveEntry] = []
    for found in collectives(program):
        total = spent[found.phase, found.kind, found.axes, found.elements, found.dtype]
        entries.append(
            CollectiveEntry(
                phase=found.phase.value,
                kind=found.kind,
                axes=(),
                algorithm="direct",
                elements=found.elements,
                bytes=durations.compute.tensor_bytes(found.dtype, found.elements),
                count=found.count,
                time_ns=-(-total // found.count),
            )
        )
    return tuple(entries)


def predicted_of(placed: Placed, loads: Sequence[DeviceLoad]) -> Predicted:
    """Memory is that of the device which is nearest to its limit, or, without limits, holds most."""
    prediction = placed.prediction
    fullest = max(loads, key=lambda load: (load.total_memory_bytes / (load.limit_bytes or 1), load.total_memory_bytes))
    return Predicted(
        step_ns=prediction.step_ns,
        compute_ns=prediction.compute_ns,
        communication_ns=prediction.communication_ns,
        hidden_ns=prediction.hidden_ns,
        memory_bytes=fullest.memory_bytes,
        tokens=new_tokens(placed.program),
    )


def _certificate(found: FoundPlacement) -> Certificate:
    best, proof, problem = found.best, found.proof, found.best.built.problem
    objective, exact = best.objective_ns, proof.exact
    bound = min(proof.bound_ns, objective)
    tries = found.placing.tries
    return Certificate(
        objective_ns=objective,
        bound_ns=bound,
        simple_bound_ns=min(proof.simple_ns, objective),
        gap_basis_points=gap_basis_points(objective, bound),
        status="optimal" if objective == bound else "feasible",
        space={
            "devices": problem.num_devices,
            "groups": problem.num_groups,
            "orders": len({tried.order for tried in tries if tried.order}),
            "placements": len({tried.placement for tried in tries}),
            "simulated": found.simulated,
            "solved": int(exact is not None),
        },
        not_in_objective=NOT_IN_MAKESPAN if best.read.options.mode == "train" else NOT_IN_MAKESPAN_OF_INFERENCE,
    )
