"""Models that one search leaves for the next."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tap_planner.cluster import load_cluster
from tap_planner.plan import PlanOptions
from tap_planner.requests import PreparedSearch, lay_out, read_model
from tap_planner.search import Model, enumeration, models_kept, search_by_room
from tests.sweep.tiny_sweeps import CLUSTER, MODEL, OPTIONS


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Model]:
    """The models that are built."""
    found: list[Model] = []
    build = enumeration.build_model

    def counted(*arguments: object) -> Model:
        found.append(build(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(enumeration, "build_model", counted)
    return found


def _read() -> PreparedSearch:
    return read_model(MODEL, load_cluster(CLUSTER), replace(OPTIONS, mesh="dp=2,tp=2", microbatches=2))


def _found(read: PreparedSearch, options: PlanOptions) -> tuple[int, int, object]:
    result = search_by_room(lay_out(read, options).request, lambda cluster: cluster.usable_memory_bytes)
    return result.objective_ns, result.bound_ns, result.decisions


def test_searches_that_differ_in_settings_share_a_model(built: list[Model]) -> None:
    """One model serves searches with other ZeRO levels and recomputation, and finds what each finds by itself."""
    read = _read()
    asked = [replace(read.options, zero=zero, recompute=mode) for zero in (0, 3) for mode in ("none", "full")]
    alone = [_found(read, options) for options in asked]
    assert len({objective for objective, _, _ in alone}) > 1
    assert len(built) == 8, "one to search, one to write the decisions"
    built.clear()
    with models_kept(1):
        assert [_found(read, options) for options in asked] == alone
    assert len(built) == 1


def test_other_inputs_have_models_of_their_own(built: list[Model]) -> None:
    """Another mesh and another microbatch count are not answered by a model that is kept."""
    read = _read()
    asked = [
        read.options,
        replace(read.options, mesh="dp=4"),
        replace(read.options, microbatches=4),
    ]
    alone = [_found(read, options) for options in asked]
    built.clear()
    with models_kept(8):
        assert [_found(read, options) for options in asked] == alone
    assert len(built) == 3


def test_no_more_are_kept_than_asked_for(built: list[Model]) -> None:
    """The one that was used longest ago is built again."""
    read = _read()
    first, second = read.options, replace(read.options, mesh="dp=4")
    with models_kept(1):
        for options in (first, second, first):
            _found(read, options)
    assert len(built) == 3
