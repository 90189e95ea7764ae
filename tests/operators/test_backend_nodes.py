"""ONNX's own node tests pass, but for those listed here with the reason."""

from __future__ import annotations

import re

import pytest

from tap_planner.graph.upgrade import MAX_OPSET
from tests.operators.backend_nodes import backend_cases, holds_tensors, opset_of, run_case

EXCLUDED: dict[str, str] = {
    r"ai_onnx_ml_": "the domain ai.onnx.ml (trees, encoders) is not planned",
    r"(adagrad|adam|momentum|nesterov_momentum)(_multiple)?$": "optimizer steps; training is ours",
    r"flexattention(?!.*expanded)": "a preview domain, no operator set",
    r"bernoulli|training_dropout(_default)?(_mask)?$": "random numbers of another generator",
    r"string_|strnorm|regex_full|equal_string|tfidfvectorizer_.*string|image_decoder": "texts and encoded images",
    r"dynamicquantizelinear(_expanded)?$": "in float32 a value falls on a half, in float64 it does not",
    r"scan_sum$": "Scan of opset 8 has a batch; only the form of opset 9 is known",
    r"resize_downsample_scales_(linear|cubic)_align_corners$": (
        "expects length_resized to be a fraction; the text, onnxruntime and torch take the whole length"
    ),
}
"""Patterns of names (after ``test_``) that are left out, each with its reason."""


def _reason(name: str) -> str | None:
    return next((reason for pattern, reason in EXCLUDED.items() if re.match(pattern, name.removeprefix("test_"))), None)


def _failures(names: list[str]) -> dict[str, str]:
    """What went wrong, by name."""
    failed: dict[str, str] = {}
    for name in names:
        try:
            run_case(backend_cases()[name])
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
    return failed


def _wanted() -> list[str]:
    cases = backend_cases().items()
    newest = [name for name, case in cases if holds_tensors(case) and opset_of(case.model) <= MAX_OPSET]
    return [name for name in newest if _reason(name) is None]


def test_a_sample_of_the_node_tests_passes() -> None:
    """Every tenth of ONNX's node tests gives the expected outputs."""
    assert _failures(_wanted()[::10]) == {}


@pytest.mark.full
def test_every_node_test_passes() -> None:
    """All of ONNX's node tests that are not left out give the expected outputs; that is most of them."""
    wanted = _wanted()
    assert _failures(wanted) == {}
    assert len(wanted) > 0.8 * len(backend_cases())


@pytest.mark.full
def test_what_is_left_out_does_fail() -> None:
    """Every excluded pattern still leaves out a test that does not pass; one that passes is no exclusion."""
    names = [name for name, case in backend_cases().items() if holds_tensors(case) and _reason(name)]
    failed = {_reason(name) for name in _failures(names)}
    assert failed == set(EXCLUDED.values())
