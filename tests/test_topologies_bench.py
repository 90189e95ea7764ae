"""Worked cases: the plan changes with the cluster, for the reason that the case is about."""

from __future__ import annotations

import pytest

from tap_planner.plan import PlanDocument, expand
from tests.bench.topologies import CASES, Answer, answer, communicated

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """All cases, planned once."""
    return {name: answer(case) for name, case in CASES.items()}


def crossing(document: PlanDocument, *axes: str) -> int:
    """Payload of collectives over any of some axes."""
    return sum(size for what, size in communicated(document).items() if set(what.split()[1].split("+")) & set(axes))


@pytest.mark.parametrize("name", CASES)
def test_the_plan_changes_and_pays(name: str, answers: dict[str, Answer]) -> None:
    """Other decisions; and keeping those of the first cluster would be slower on the second, or does not fit there."""
    found = answers[name]
    assert expand(found.before) != expand(found.after)
    assert not found.kept_fits or found.kept_ns > found.after.certificate.objective_ns


def test_switches_that_sum_make_all_reduces_worth_while(answers: dict[str, Answer]) -> None:
    """Without them tensor parallelism gathers and scatters (sequence parallelism), with them it all-reduces."""
    before, after = communicated(answers["nvls"].before), communicated(answers["nvls"].after)
    assert before["all_gather tp"] > 4 * before["all_reduce tp"]
    assert after["all_reduce tp"] > 4 * after["all_gather tp"]
    algorithms = {entry.algorithm for entry in answers["nvls"].after.collectives if entry.kind == "all_reduce"}
    assert algorithms == {"nvls"}


def test_a_shared_host_makes_devices_repeat_work(answers: dict[str, Answer]) -> None:
    """All traffic through one host of 32 GB/s: a twentieth is sent."""
    before, after = (sum(communicated(one).values()) for one in (answers["pcie"].before, answers["pcie"].after))
    assert after < before / 20


def test_groups_of_a_cube_mesh_are_as_large_as_it_is(answers: dict[str, Answer]) -> None:
    """Two devices have one link of six: the plan with axes of 2 and 4 gives way to one axis of 8."""
    found = answers["cube mesh"]
    assert 2 in {axis.size for axis in found.before.mesh.axes}
    assert [axis.size for axis in found.after.mesh.axes] == [8]


def test_the_smallest_device_sets_the_room(answers: dict[str, Answer]) -> None:
    """Half of the devices have 40 GB: what fitted no longer does, so layers are recomputed."""
    found = answers["unlike nodes"]
    assert not found.kept_fits
    before, after = (
        sum(region.recompute != "none" for region in expand(one).regions) for one in (found.before, found.after)
    )
    assert before < after


def test_oversubscribed_racks_are_crossed_little(answers: dict[str, Answer]) -> None:
    """Axes end at racks (8 devices), and what crosses them falls to a tenth."""
    found = answers["racks"]
    assert [axis.size for axis in found.after.mesh.axes] == [2, 8]
    assert crossing(found.after, "dp") < crossing(found.before, "dp") / 10
