"""Random operators: the numbers have the distribution they should, and are a function of seed, step and position."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from tap_planner.apply.operators import OperatorContext, run_operator
from tap_planner.graph import BindOptions, Graph, ModelFile, bind
from tap_planner.operators import OperatorSignature
from tap_planner.sharding import REPLICATE, map_batch
from tests.operators.operator_reference import signature, tensor

_WHOLE = (REPLICATE,)


def _drawn(sig: OperatorSignature, *operands: np.ndarray, id: str = "r", step: int = 0) -> np.ndarray:
    context = OperatorContext(
        signature=sig,
        inputs=(_WHOLE,) * len(sig.inputs),
        outputs=(_WHOLE,) * len(sig.outputs),
        mesh_shape=(1,),
        coordinates=(0,),
        dtype=torch.float64,
        id=id,
        step=step,
    )
    return run_operator(context, [torch.from_numpy(value) for value in operands])[0].numpy()


def _normal(**attributes: Any) -> OperatorSignature:
    return signature("RandomNormal", shape=(300, 400), dtype="float64", mean=2.0, scale=0.5, **attributes)


def test_normal_numbers_have_their_moments() -> None:
    """Mean, deviation, skewness and kurtosis of a normal distribution, within five standard errors."""
    value = (_drawn(_normal()) - 2.0) / 0.5
    error = 1 / np.sqrt(value.size)
    assert abs(value.mean()) < 5 * error
    assert abs((value**2).mean() - 1) < 5 * np.sqrt(2) * error
    assert abs((value**3).mean()) < 5 * np.sqrt(15) * error
    assert abs((value**4).mean() - 3) < 5 * np.sqrt(96) * error


def test_uniform_numbers_fill_their_range_evenly() -> None:
    """Counts in 16 equal bins, within five standard errors; neighbours are not correlated."""
    value = _drawn(signature("RandomUniform", shape=(160, 500), dtype="float64", low=-1.0, high=3.0))
    assert value.min() >= -1.0
    assert value.max() < 3.0
    counts = np.histogram(value, 16, (-1.0, 3.0))[0]
    assert np.abs(counts - 5000).max() < 5 * np.sqrt(5000)
    assert abs(np.corrcoef(value[:, :-1].reshape(-1), value[:, 1:].reshape(-1))[0, 1]) < 5 / np.sqrt(value.size)


def test_bernoulli_and_multinomial_hit_their_odds() -> None:
    """Frequencies within five standard errors of the odds."""
    odds = np.full((200, 250), 0.3)
    drawn = _drawn(signature("Bernoulli", tensor(200, 250), dtype="float64"), odds)
    assert abs(drawn.mean() - 0.3) < 5 * np.sqrt(0.21 / drawn.size)
    logits = np.log(np.tile([1.0, 2.0, 5.0], (10, 1)))
    picked = _drawn(signature("Multinomial", tensor(10, 3), dtype="int64", sample_size=5000), logits)
    shares = np.bincount(picked.reshape(-1), minlength=3) / picked.size
    assert np.abs(shares - np.array([1, 2, 5]) / 8).max() < 5 * np.sqrt(0.25 / picked.size)


def test_dropout_keeps_the_mean() -> None:
    """What is dropped is zero, what is kept grows, and the mean stays."""
    value = _drawn(signature("Dropout", tensor(200, 300), ratio=0.4, training_mode=1), np.ones((200, 300)))
    assert set(np.unique(value)) == {0.0, 1.0 / 0.6}
    assert abs(value.mean() - 1) < 5 * np.sqrt(0.4 / 0.6 / value.size)


def test_seed_operator_and_step_tell_numbers_apart() -> None:
    """A seed gives the same numbers wherever it stands; without one each operator has its own; steps differ."""
    assert np.array_equal(_drawn(_normal(seed=3), id="a"), _drawn(_normal(seed=3), id="b"))
    for other in (_drawn(_normal(), id="b"), _drawn(_normal(), id="a", step=1), _drawn(_normal(seed=3), id="a")):
        correlation = np.corrcoef(_drawn(_normal(), id="a").reshape(-1), other.reshape(-1))[0, 1]
        assert abs(correlation) < 5 / np.sqrt(other.size)


def _bound(text: str, **options: Any) -> Graph:
    proto = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    file = ModelFile(path=Path("random.onnx"), proto=proto, sha256="0" * 64, opset=17)
    return bind(file, BindOptions(training=False, **options))


_TEXT = """g (float[batch, 4] x) => (float[batch, 4] y)
<float ratio = {0.5}, bool training = {1}>
{ d = Dropout <seed: int = 1> (x, ratio, training)
  n = RandomNormalLike <seed: float = 2.5> (d)
  y = Add (d, n) }"""


def test_random_operators_are_named_and_forbid_microbatches() -> None:
    """The user is told which operators draw numbers; a microbatch would draw those of another position."""
    graph = _bound(_TEXT, dims={"batch": 8})
    (warning,) = [text for text in graph.warnings if "random" in text]
    assert "d, n" in warning
    assert map_batch(graph).obstacles == ("d", "n")
    assert [operator.signature.attribute("seed") for operator in graph.operators[:2]] == [1, 4612811918334230528]


def test_dropout_without_training_is_nothing() -> None:
    """Inference drops nothing; a mask that somebody reads is all true."""
    plain = _bound(_TEXT.replace("training = {1}", "training = {0}"), dims={"batch": 8})
    assert [operator.type for operator in plain.operators] == ["RandomNormalLike", "Add"]
    masked = _bound("g (float[3, 4] x) => (float[3, 4] y, bool[3, 4] m) { y, m = Dropout (x) }")
    (kept,) = masked.operators
    assert _drawn(replace(kept.signature, outputs=kept.signature.outputs[:1]), np.ones((3, 4))).all()
