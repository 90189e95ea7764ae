"""Random parts agree with the whole that never exists; inputs fit the graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.apply import RandomWeights, load_inputs, random_part, synthetic_inputs
from tap_planner.errors import ApplyError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tests.graph.models import data_model


@pytest.fixture(scope="module")
def graph() -> Graph:
    """GPT-2 with cross-entropy."""
    options = BindOptions(batch=4, dims={"seq": 8}, training=True, loss=LossOptions(kind="cross-entropy"))
    return bind(data_model("gpt2_tiny"), options)


@given(st.lists(st.integers(1, 7), max_size=3), st.integers(0, 2**40), st.data())
def test_parts_agree(shape: list[int], seed: int, data: st.DataObject) -> None:
    """Any part equals the same part of the whole."""
    whole = random_part("w", tuple(shape), [np.arange(size) for size in shape], seed)
    held = [np.array(sorted(data.draw(st.sets(st.integers(0, size - 1)))), np.int64) for size in shape]
    part = random_part("w", tuple(shape), held, seed)
    np.testing.assert_array_equal(part, whole[np.ix_(*held)] if shape else whole)


def test_uniform_and_independent() -> None:
    """The numbers are uniform in [0, 1) and differ by name and seed."""
    positions = [np.arange(100_000)]
    first = random_part("a", (100_000,), positions, 1)
    assert first.min() >= 0.0 and first.max() < 1.0
    assert abs(first.mean() - 0.5) < 5e-3 and abs(first.var() - 1 / 12) < 2e-3
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 2e-2
    for name, seed in (("b", 1), ("a", 2)):
        assert abs(np.corrcoef(first, random_part(name, (100_000,), positions, seed))[0, 1]) < 2e-2


def test_scales_lie_around_one(graph: Graph) -> None:
    """Scales of normalisations are near 1, matrices near 0."""
    weights = RandomWeights(graph)
    by_name = {parameter.name: parameter for parameter in graph.parameters}

    def value(name: str) -> np.ndarray:
        parameter = by_name[name]
        return weights.part(parameter, [np.arange(size) for size in parameter.type.shape])

    scale = next(name for name in by_name if name.endswith("ln_f.weight"))
    matrix = next(name for name in by_name if "c_fc.weight" in name)
    assert abs(value(scale).mean() - 1.0) < 0.1
    assert abs(value(matrix).mean()) < 0.05 and 0.5 < value(matrix).std() * by_name[matrix].type.shape[0] ** 0.5 < 2.0


def test_inputs_index_inside_their_tables(graph: Graph) -> None:
    """Token numbers and labels lie inside the vocabulary; the same seed gives the same inputs."""
    inputs = synthetic_inputs(graph, 3)
    assert set(inputs) == {"input_ids", "labels"}
    for value in inputs.values():
        assert value.min() >= 0 and value.max() < 101 and len(np.unique(value)) > 5
    for name, value in synthetic_inputs(graph, 3).items():
        np.testing.assert_array_equal(value, inputs[name])


def test_inputs_from_a_file(graph: Graph, tmp_path: Path) -> None:
    """A file's inputs are taken as they are; a missing name or a wrong shape is an error that says so."""
    inputs = synthetic_inputs(graph)
    np.savez(tmp_path / "good.npz", **inputs)  # type: ignore[arg-type]
    np.testing.assert_array_equal(load_inputs(tmp_path / "good.npz", graph)["labels"], inputs["labels"])
    np.savez(tmp_path / "missing.npz", input_ids=inputs["input_ids"])
    with pytest.raises(ApplyError, match="lack 'labels'"):
        load_inputs(tmp_path / "missing.npz", graph)
    np.savez(tmp_path / "shape.npz", input_ids=inputs["input_ids"][:2], labels=inputs["labels"])
    with pytest.raises(ApplyError, match=r"\[2, 8\], expected \[4, 8\]"):
        load_inputs(tmp_path / "shape.npz", graph)
    with pytest.raises(ApplyError, match="cannot be read"):
        load_inputs(tmp_path / "absent.npz", graph)
