"""Plans near to an old one: few changes, within the regret, and what is counted is what differs."""

from __future__ import annotations

import logging
import math
import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tap_planner import api
from tap_planner.cluster import load_cluster, parse_mesh
from tap_planner.errors import UsageError
from tap_planner.plan import Decisions, PlanDocument, PlanOptions, PlanRequest, Verdict, expand, from_text, to_text
from tap_planner.search import (
    Assignment,
    CostedModel,
    Recompute,
    Settings,
    StrategyFilter,
    assemble,
    build_model,
    zero_settings,
)
from tap_planner.search.changes import OldPlan
from tap_planner.search.choices import fold_assignment
from tap_planner.search.configuration import Configuration
from tap_planner.search.distance import Distance, WidenedModel
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.penalties import ChangeTables, PenalisedModel
from tap_planner.search.pricing import price_choices
from tap_planner.sharding import block_hints
from tests.search.building import random_assignments

DATA = Path(__file__).parents[1] / "data"
CLUSTER = str(DATA / "clusters" / "quick-2x4.yaml")
PENALTY = 1 << 20


def request_of(model: str = "hm_gpt_tiny", cluster: str = CLUSTER, **options: Any) -> PlanRequest:
    """A small model on eight devices."""
    given = {"batch": 8, "dims": {"seq": 16}, "precision": "fp32", "loss": "mean", "gap_basis_points": 0}
    made = PlanOptions(**{**given, **options})
    return PlanRequest(model=DATA / f"{model}.onnx", cluster=cluster, options=made)


@cache
def planned(model: str = "hm_gpt_tiny", batch: int = 8, mesh: str | None = None) -> PlanDocument:
    """The plan that knows no old one."""
    return api.make_plan(request_of(model, batch=batch, mesh=mesh))


def near(old: PlanDocument, regret: int, **options: Any) -> PlanDocument:
    """A plan near to an old one."""
    model = old.model.name.removesuffix(".onnx")
    return api.make_plan(request_of(model, max_regret_basis_points=regret, **options), old)


def differences(old: Decisions, new: Decisions) -> int:
    """Changes, counted from the decisions one by one where both plans have the same names."""
    if [(axis.name, axis.size) for axis in old.axes] != [(axis.name, axis.size) for axis in new.axes]:
        return len(new.operators) + len(new.parameters) + len(new.regions) + (old.microbatches != new.microbatches)
    count = int(old.microbatches != new.microbatches)
    count += sum(a.strategy != b.strategy for a, b in zip(old.operators, new.operators, strict=True))
    for a, b in zip(old.parameters, new.parameters, strict=True):
        count += (a.placement, a.zero_level, a.zero_axes) != (b.placement, b.zero_level, b.zero_axes)
    return count + sum(a.recompute != b.recompute for a, b in zip(old.regions, new.regions, strict=True))


@pytest.mark.parametrize("model", ["hm_gpt_tiny", "hm_mixtral_tiny"])
@pytest.mark.parametrize("mesh", ["dp=2,tp=4", "dp=8"])
def test_another_batch_changes_little(model: str, mesh: str) -> None:
    """At twice the batch: no more changes than without, within the regret of the optimum, and what is said is true."""
    old, free = planned(model, 8, mesh), planned(model, 16, None)
    found = near(old, 200, batch=16)
    said = found.certificate.near
    assert said is not None
    assert said.changes == differences(expand(old), expand(found))
    assert said.changes <= said.changes_of_best == differences(expand(old), expand(free))
    best = free.certificate.objective_ns
    assert found.certificate.objective_ns <= best * 1.02
    assert said.regret_basis_points == -(-max(found.certificate.objective_ns - best, 0) * 10_000 // best)
    assert found.certificate.bound_ns == free.certificate.bound_ns


def test_another_mesh_is_kept_where_that_costs_little() -> None:
    """The old mesh is not the best one: with a large regret nothing changes, with none the optimum is taken."""
    best = planned(batch=16)
    shape = "dp=2,tp=4" if len(best.mesh.axes) == 1 else "dp=8"
    old = planned(batch=8, mesh=shape)
    slow = api.make_plan(request_of(batch=16, mesh=shape))
    assert slow.certificate.objective_ns > best.certificate.objective_ns
    generous = near(old, 1_000_000, batch=16)
    assert generous.certificate.near is not None and generous.certificate.near.changes == 0
    assert expand(generous).axes == expand(old).axes
    strict = near(old, 0, batch=16)
    assert strict.certificate.objective_ns == best.certificate.objective_ns
    assert strict.certificate.near is not None and strict.certificate.near.regret_basis_points == 0


def test_unchanged_inputs_change_nothing() -> None:
    """The same request with the old plan gives the old decisions, and so does a check of what that wrote."""
    old = planned()
    found = near(old, 100)
    assert found.certificate.near is not None and found.certificate.near.changes == 0
    assert found.digests is not None and old.digests is not None
    assert found.digests.decisions == old.digests.decisions
    assert api.check_plan(found, DATA / "hm_gpt_tiny.onnx", CLUSTER).verdict is not Verdict.DECISIONS_CHANGED


def test_a_check_takes_the_plan_itself_as_the_old_one() -> None:
    """A plan that is not the optimum, but was kept, is no drift."""
    shape = "dp=2,tp=4" if len(planned(batch=16).mesh.axes) == 1 else "dp=8"
    kept = near(planned(batch=8, mesh=shape), 1_000_000, batch=16)
    assert api.check_plan(kept, DATA / "hm_gpt_tiny.onnx", CLUSTER).verdict is not Verdict.DECISIONS_CHANGED
    forgetful = replace(kept, options=replace(kept.options, max_regret_basis_points=None))
    assert api.check_plan(forgetful, DATA / "hm_gpt_tiny.onnx", CLUSTER).verdict is Verdict.DECISIONS_CHANGED


def test_under_a_memory_limit() -> None:
    """The old plan no longer fits: what is kept of it does."""
    old = planned(batch=16, mesh="dp=2,tp=4")
    limit = old.predicted.total_memory_bytes * 7 // 10
    asked: dict[str, Any] = {
        "batch": 16,
        "max_memory_bytes": limit,
        "mesh": "dp=2,tp=4",
        "gap_basis_points": 100,
    }
    free = api.make_plan(request_of(**asked))
    found = near(old, 300, **asked)
    assert found.predicted.total_memory_bytes <= limit
    assert found.certificate.near is not None
    assert 0 < found.certificate.near.changes <= differences(expand(old), expand(free))
    assert found.certificate.objective_ns <= free.certificate.objective_ns * 1.03


def test_a_mesh_that_is_gone_changes_everything(caplog: pytest.LogCaptureFixture) -> None:
    """On half of the devices the old mesh does not exist."""
    old = planned(mesh="dp=2,tp=4")
    with caplog.at_level(logging.INFO, "tap_planner"):
        found = api.make_plan(request_of(cluster="1x4:a100-sxm4-80gb", max_regret_basis_points=100), old)
    said = found.certificate.near
    assert said is not None and said.changes == said.changes_of_best > 0
    assert "no plan on the old mesh dp=2,tp=4 is within the regret: everything changes" in caplog.text


def test_a_plan_of_another_model_is_refused() -> None:
    """Nothing to stay near to: both models are named."""
    old = planned("hm_mixtral_tiny", 8, "dp=8")
    with pytest.raises(
        UsageError, match=r"the old plan is of hm_mixtral_tiny.*none of its 150 operators.* of resnet_small"
    ) as caught:
        api.make_plan(request_of("resnet_small", dims={}, max_regret_basis_points=100), old)
    assert caught.value.exit_code == 2 and "leave --stay-near out" in caught.value.hint


def test_the_plan_holds_what_is_said() -> None:
    """Regret and changes survive writing and reading."""
    found = near(planned(), 100, batch=16)
    assert from_text(to_text(found)) == found


@pytest.mark.parametrize("seed", range(3))
def test_changes_cost_the_penalty(seed: int) -> None:
    """For assignments at random: an old one is found again from its decisions; what is counted is what differs in the
    decisions written out; and where the old occurrences are equal, the price exceeds the true one by just that many
    penalties."""
    request = request_of("hm_gpt_tiny", cluster="2x2:a100-sxm4-80gb")
    prepared = api.prepare_search(request).request
    folded, mesh = prepared.folded(1), parse_mesh("dp=2,tp=2", load_cluster(request.cluster))
    hints = dict(block_hints(folded.graph))
    model = build_model(GraphIndex(folded), prepared.cluster, mesh, "fp32", StrategyFilter(), hints)
    settings = Settings(
        recomputes=(Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL),
        zeros=zero_settings((0, 1, 2, 3), 2, hybrid=True),
        whole_level=3,
    )
    configuration = Configuration(settings=settings, microbatches=1, optimizer="adamw", precision="fp32", training=True)

    def written(assignment: Assignment) -> Decisions:
        return assemble(model, configuration, assignment, "logits")

    first, *others = random_assignments(model, seed, 4, per_class=False)
    (uniform,) = random_assignments(model, seed, 1, per_class=True)
    chance = random.Random(seed)
    plain = CostedModel(model, configuration)

    def with_settings(assignment: Assignment, *, equal: bool) -> Assignment:
        """Recompute and ZeRO at random, ``equal``: the same in all occurrences."""
        drawn: dict[object, int] = {}
        regions = [region for found in model.places.run_regions for region in found]
        classes = model.places.region_class
        recompute = {r: drawn.setdefault(classes[r] if equal else r, chance.randrange(3)) for r in regions}
        groups = Distance(
            WidenedModel(model, configuration, OldPlan(written(assignment))), OldPlan(written(assignment))
        )
        zero: dict[tuple[int, int], int] = {}
        for _, (_, mask), group in groups.parameters(assignment):
            key = ("zero", classes.get(group, group) if equal else group, mask)
            zero[group, mask] = drawn.setdefault(
                key, chance.choice(plain.zero_options(mask, inside=plain.lies_in_run(group)).tolist())
            )
        return replace(assignment, recompute=recompute, zero=zero)

    for before, exact in ((with_settings(uniform, equal=True), True), (with_settings(first, equal=False), False)):
        old = OldPlan(written(before))
        costed = WidenedModel(model, configuration, old)
        distance = Distance(costed, old)
        back = distance.assignment()
        assert back is not None and written(back) == old.decisions and distance.count(back) == 0
        penalty = PENALTY * math.prod(run.num_links for run in model.runs)
        penalised = PenalisedModel(ChangeTables(distance), penalty)
        for other in (with_settings(other, equal=False) for other in others):
            choices = fold_assignment(model, other)
            changes = differences(old.decisions, written(other))
            assert distance.count(other) == changes == old.changes(written(other)).total > 0
            if exact:
                extra = price_choices(penalised, choices).ns - price_choices(costed, choices).ns
                assert extra == penalty * changes
                assert price_choices(costed, choices) == price_choices(plain, choices)
