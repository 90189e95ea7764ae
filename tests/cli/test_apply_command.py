"""tap-apply: options and outcome."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner.errors import ApplyError, VerificationError
from tap_planner.plan import ApplyRequest
from tap_planner_cli.apply import command
from tap_planner_cli.errors import invoke
from tests.cli.fake_api import FakeApi

Capture = pytest.CaptureFixture[str]


def _run(*arguments: str) -> int:
    return invoke(command, "tap-apply", arguments)


def test_options(api: FakeApi, old: str, capsys: Capture) -> None:
    """Every option reaches the request; the outcome is data."""
    arguments = "--model m.onnx --nproc 4 --inputs x.npz --seed 3 --steps 2 --init random --verify --backend gloo"
    assert _run(old, *arguments.split()) == 0
    assert api.requests == [
        ApplyRequest(
            plan=Path(old),
            model=Path("m.onnx"),
            nproc=4,
            inputs=Path("x.npz"),
            seed=3,
            steps=2,
            init_random=True,
            verify=True,
            backend="gloo",
        )
    ]
    assert capsys.readouterr().out == "output: 1 of 1 equal\n"


def test_the_model_is_found_beside_the_plan(api: FakeApi, old: str) -> None:
    """Without --model the file of that name beside the plan is taken."""
    beside = Path(old).parent / "mlp.onnx"
    beside.touch()
    assert _run(old) == 0
    (request,) = api.requests
    assert isinstance(request, ApplyRequest)
    assert request.model == beside


def test_the_model_is_nowhere(api: FakeApi, old: str, capsys: Capture) -> None:
    """A model that cannot be found is named, with the option that helps."""
    assert _run(old) == 2
    err = capsys.readouterr().err
    assert "'mlp.onnx'" in err
    assert "--model" in err


def test_mismatch(api: FakeApi, old: str) -> None:
    """A verification that finds a difference exits with 1."""
    api.passed = False
    assert _run(old, "--model", "m.onnx", "--verify") == 1


@pytest.mark.parametrize(("error", "code"), [(ApplyError("refused"), 5), (VerificationError("differs"), 1)])
def test_failures(api: FakeApi, old: str, error: Exception, code: int, capsys: Capture) -> None:
    """Refusal is 5, a mismatch 1."""
    api.error = error
    assert _run(old, "--model", "m.onnx") == code
    assert capsys.readouterr().err.startswith(f"error: {error}")
