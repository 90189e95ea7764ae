"""Redistribution tables against single steps, added up until nothing gets cheaper."""

from __future__ import annotations

from hypothesis import given, settings

from tap_planner.cost import ComputeModel
from tap_planner.cost.prices import VolumeModel
from tap_planner.operators import TensorType
from tap_planner.search.redistributions import INFINITE, RedistributionTable
from tap_planner.sharding import REPLICATE, Placements, apply_step, make_step, step_elements
from tests.search.building import cluster_of
from tests.sharding.index_sets import Case, placement_options, random_cases

COMPUTE = ComputeModel(cluster_of((2,)).device, "fp32")


def table_of(case: Case) -> RedistributionTable:
    """The table of the case's tensor; a step costs the bytes that it sends."""
    options = placement_options(case.shape)
    tensor = TensorType(dtype="float32", shape=case.shape)
    return RedistributionTable(tensor, case.mesh, options, VolumeModel(case.mesh), COMPUTE)


def bytes_sent(case: Case, source: Placements) -> dict[Placements, tuple[int, int]]:
    """(least bytes, steps of the shortest way that sends no more) to every placement that can be reached."""
    prices, targets = VolumeModel(case.mesh), dict.fromkeys(placement_options(case.shape))
    found, waiting = {source: (0, 0)}, [source]
    while waiting:
        state = waiting.pop()
        for axis, target in ((axis, target) for axis in range(len(case.mesh)) for target in targets):
            step = make_step(case.shape, state, case.mesh, axis, target)
            if step is None:
                continue
            payload = 4 * step_elements(case.shape, state, case.mesh, step)
            sent = 0 if step.is_local else prices.cost(step.kind, (axis,), payload).ns
            reached, cost = apply_step(state, step), (found[state][0] + sent, found[state][1] + 1)
            if reached not in found or cost < found[reached]:
                found[reached] = cost
                waiting.append(reached)
    return found


@given(random_cases(2))
@settings(max_examples=25, deadline=None)
def test_cheapest_sequences(case: Case) -> None:
    """From a placement to every other one: the least bytes, by a sequence that sends so many, in the fewest steps."""
    table = table_of(case)
    reachable = bytes_sent(case, case.placements)
    row = table.cost_ns[table.index[case.placements]]
    for number, target in enumerate(table.states):
        if target not in reachable:
            assert row[number] == INFINITE
            continue
        least, num_steps = reachable[target]
        assert (int(row[number]), len(table.sequence(case.placements, target))) == (least, num_steps)


@given(random_cases())
@settings(max_examples=25, deadline=None)
def test_all_single_steps(case: Case) -> None:
    """A sequence of the table is made of steps that ``make_step`` allows, and they cost what the table says."""
    table, prices = table_of(case), VolumeModel(case.mesh)
    source = table.index[case.placements]
    for target, cost in zip(table.states, table.cost_ns[source].tolist(), strict=True):
        if cost >= INFINITE:
            continue
        state, total = case.placements, 0
        for step in table.sequence(case.placements, target):
            assert make_step(case.shape, state, case.mesh, step.axis, step.target) == step
            payload = 4 * step_elements(case.shape, state, case.mesh, step)
            total += 0 if step.is_local else prices.cost(step.kind, (step.axis,), payload).ns
            state = apply_step(state, step)
        assert (state, total) == (target, cost)


def test_a_table_of_one_state() -> None:
    """Integers that nothing splits are replicated, and there is nothing to do."""
    tensor, mesh = TensorType(dtype="int64", shape=(8,)), (2, 2)
    table = RedistributionTable(tensor, mesh, (), VolumeModel(mesh), COMPUTE)
    assert (table.states, table.cost_ns.tolist()) == (((REPLICATE, REPLICATE),), [[0]])
    assert table.sequence(table.states[0], table.states[0]) == ()
