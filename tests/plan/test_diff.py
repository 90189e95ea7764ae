"""The typed diff."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tap_planner.plan import (
    ChangeKind,
    EntityChange,
    PlanDocument,
    ValueChange,
    Verdict,
    diff_plans,
    with_digests,
)
from tap_planner.plan.diff import fold_names
from tests.plan.plan_builders import make_decisions, make_document, make_stack


def _plan(columns: tuple[bool, ...], step_ns: int = 1_234_567) -> PlanDocument:
    stack = make_stack(len(columns), columns=columns)
    return make_document(make_decisions(stack), stack.reads, step_ns=step_ns)


def _change(changes: tuple[EntityChange, ...], name: str) -> EntityChange:
    return next(change for change in changes if change.name == name)


def test_identical_plans() -> None:
    """Equal plans have an empty diff."""
    diff = diff_plans(_plan((True,) * 4), _plan((True,) * 4))
    assert diff.verdict is Verdict.IDENTICAL
    assert (diff.model, diff.cluster, diff.options, diff.mesh, diff.operators, diff.collectives) == ((),) * 6
    assert all(quantity.delta == 0 for quantity in diff.predicted)


def test_same_decisions() -> None:
    """Another prediction is no other plan; the change in percent is exact."""
    diff = diff_plans(_plan((True,) * 2, step_ns=200_000), _plan((True,) * 2, step_ns=201_000))
    assert diff.verdict is Verdict.SAME_DECISIONS
    assert diff.quantity("step_ns").delta == 1_000
    assert diff.quantity("step_ns").basis_points == 50
    assert diff.quantity("communication_ns.recompute").basis_points is None
    assert not diff.operators


def test_changes_are_folded_over_the_occurrences() -> None:
    """Layers that changed alike are one change with the values of i; others are not named."""
    diff = diff_plans(_plan((True,) * 12), _plan((True, True, *(False,) * 9, True)))
    assert diff.verdict is Verdict.DECISIONS_CHANGED
    change = _change(diff.operators, "h.{i}.fc")
    assert (change.kind, change.values, change.count) == (ChangeKind.CHANGED, "2..10", 9)
    assert ValueChange(name="strategy.tp", old="n", new="none") in change.fields
    weight = _change(diff.parameters, "h.{i}.w1")
    assert ValueChange(name="placement", old="dp=R tp=S(1)", new="dp=R tp=R") in weight.fields
    removed = _change(diff.redistributions, "h.{i}.proj")
    assert (removed.kind, removed.values) == (ChangeKind.REMOVED, "2..10")
    assert "loss" not in {change.name for change in diff.operators}


def test_added_layers() -> None:
    """Operators that only one plan has are added or removed."""
    diff = diff_plans(_plan((True,) * 3), _plan((True,) * 5))
    added = _change(diff.operators, "h.{i}.act")
    assert (added.kind, added.values) == (ChangeKind.ADDED, "3,4")
    assert _change(diff_plans(_plan((True,) * 5), _plan((True,) * 3)).operators, "h.{i}.act").kind is ChangeKind.REMOVED


def test_inputs_and_collectives() -> None:
    """Model, cluster, options and collectives are compared key by key."""
    old = _plan((True,) * 2)
    first = old.collectives[0]
    new = with_digests(
        replace(
            old,
            model=replace(old.model, batch=16),
            cluster=old.cluster | {"name": "other"} if isinstance(old.cluster, dict) else {},
            options=replace(old.options, zero=2),
            collectives=(replace(first, count=5), *old.collectives[1:]),
        )
    )
    diff = diff_plans(old, new)
    assert diff.model == (ValueChange(name="batch", old=8, new=16),)
    assert diff.cluster == (ValueChange(name="name", old="2x2-cpu", new="other"),)
    assert diff.options == (ValueChange(name="zero", old="auto", new=2),)
    (change,) = diff.collectives
    assert (change.old_count, change.new_count) == (first.count, 5)
    assert change.new_ns == 5 * first.time_ns


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a"], [("a", "", 1)]),
        ([f"h.{i}.fc" for i in range(4)], [("h.{i}.fc", "0..3", 4)]),
        (
            [f"h.{i}.w{j}" for i in range(12) for j in (1, 2)],
            [("h.{i}.w1", "0..11", 12), ("h.{i}.w2", "0..11", 12)],
        ),
        (
            [f"h.{i}/MatMul_{31 * i + j}" for i in range(12) for j in (14, 16)],
            [("h.{i}/MatMul_{j}", "0..11;14..355/31", 12), ("h.{i}/MatMul_{j}", "0..11;16..357/31", 12)],
        ),
    ],
)
def test_names_are_folded_into_families(names: list[str], folded: list[tuple[str, str, int]]) -> None:
    """Like names of a layer are kept apart, and each is followed through the layers."""
    assert list(fold_names(names)) == folded


@pytest.mark.parametrize("levels", [(1, 1), (1, 2)], ids=["buckets only", "with a ZeRO level"])
def test_buckets_are_listed_only_where_nothing_else_differs(levels: tuple[int, int]) -> None:
    """Buckets follow from the other decisions: their numbers would tear apart layers that changed alike."""
    stack = make_stack(4)
    whole, apart = (0,) * 8, (0, 0, 0, 1, 1, 1, 2, 2)
    old, new = (
        make_document(make_decisions(stack, bucket_of=buckets, zero_level=level), stack.reads)
        for buckets, level in zip((whole, apart), levels, strict=True)
    )
    diff = diff_plans(old, new)
    assert diff.verdict is Verdict.DECISIONS_CHANGED
    fields = {field.name for change in diff.parameters for field in change.fields}
    assert fields == ({"bucket"} if levels[0] == levels[1] else {"zero"})
    if fields == {"zero"}:
        assert [(change.name, change.count) for change in diff.parameters] == [("h.{i}.w{j}", 8)]
