"""Model files are untrusted: damaged ones end as a graph or as one line, in bounded time and memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from tap_planner.api import make_plan
from tap_planner.errors import InfeasibleError, ModelError, TapError
from tap_planner.graph import WeightReader, load_model
from tap_planner.graph.native import NativeCrashError, NativeError, isolated
from tap_planner.plan import PlanOptions, PlanRequest
from tests.graph.fuzz_mutators import make_mutation
from tests.graph.fuzz_seeds import load_seeds
from tests.graph.fuzzing import Importer, importer
from tests.graph.hostile_models import MODELS

COUNT = 500
SEED = 20
LEAST_REACHED = 0.5

SAYS = {
    "a range of 2^40 numbers decides a shape": "too large to be computed",
    "a constant of a negative size": "negative dim",
    "a constant of 100,000 dims": "100000 dims",
    "constants joined to themselves 60 times": "too large to be computed",
    "a long chain of large constants computed 400 times": "too large to be computed",
    "products of large integer matrices": "too large to be computed",
    "a split into 2^31 parts": "splits into 2147483648 parts",
    "a sequence of 2^40 items": "1099511627776 items",
    "a filter bank of 2^59 numbers": "too large to be computed",
    "a window of 2^40 numbers": "too large to be computed",
    "a weight of a negative size": "negative dim",
    "an unknown element type": "element type",
    "fewer bytes than a target's shape needs": "the file holds 5 bytes",
    "more bytes than a target's shape needs": "the file holds 16 bytes",
    "the same dim added twice": "adds a dim twice",
    "a Scan over -2^62 operands": "scans -4611686018427387904 of its 1 operands",
    "a ScatterND whose operands do not fit": "expected shapes that fit together",
    "integers added to a sum of floats": "adds int8 to a sum of floats",
    "a Relu of two operands": "2 operands, expected 1",
    "a cycle": "has a cycle",
    "a function that calls itself": "call themselves",
    "functions that call the next twice, 40 deep": "grows to",
    "messages nested 6000 deep": "nested too deeply",
    "an attribute that crashes onnx's own inference": "SVMRegressor is not known",
    "a pattern of exponential time": "too large to be computed",
}
"""Words of the refusal."""


@pytest.fixture(scope="module")
def child() -> Iterator[Importer]:
    """A process with limits that imports models."""
    with importer() as made:
        yield made


def test_fixed_mutations(child: Importer) -> None:
    """None of these damaged models leads to a traceback, a hang, a memory blow-up or a message of several lines."""
    groups = load_seeds(operator_tests=False)
    faults: list[str] = []
    reached = 0
    for index in range(COUNT):
        mutation = make_mutation(groups, SEED, index)
        found = child.run(mutation.data, plan=index % 10 == 0)
        reached += found.reached
        if found.fault:
            faults.append(f"{index} ({mutation.seed}: {' '.join(mutation.steps)}): {found.fault}")
    assert not faults
    assert reached >= LEAST_REACHED * COUNT


def test_mutations_are_deterministic() -> None:
    """A fault is found again by its number."""
    groups = load_seeds(operator_tests=False)
    assert [make_mutation(groups, 5, index).data for index in range(40)] == [
        make_mutation(groups, 5, index).data for index in range(40)
    ]


@pytest.mark.parametrize("name", MODELS)
def test_hostile_model(name: str, child: Importer) -> None:
    """Each kind of fault that fuzzing found, and others of the sort: refused or planned, never more."""
    found = child.run(MODELS[name](), plan="20 loops" not in name)
    assert not found.fault
    if name in SAYS:
        assert SAYS[name] in found.message


@pytest.mark.parametrize("name", [name for name in MODELS if "external data" in name])
def test_hostile_external_data(name: str, tmp_path: Path) -> None:
    """Weights are read from plain files beside the model alone, as long as their shape says."""
    (tmp_path / "w.bin").write_bytes(bytes(16))
    path = tmp_path / "model.onnx"
    path.write_bytes(MODELS[name]())
    with pytest.raises(ModelError, match="'t'"):
        WeightReader(load_model(path)).read("t")


def test_harness_sees_faults(child: Importer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that dies is a fault, and the next input gets a new one."""
    model = MODELS["a cycle"]()
    child.run(model)
    starts = child.starts
    assert child._child is not None
    child._child.send_signal(signal.SIGSTOP)
    monkeypatch.setattr("tests.graph.fuzzing.WALL_LIMIT_S", 0.2)
    hung = child.run(model)
    monkeypatch.undo()
    assert hung.outcome == "hang"
    assert hung.fault
    assert not child.run(model).fault
    assert child.starts == starts + 1


def test_native_code_is_isolated() -> None:
    """Native code gives bytes, or an error in one line, whatever it does."""

    def raises() -> bytes:
        raise RuntimeError("first line\nsecond line")

    def crashes() -> bytes:
        os.kill(os.getpid(), signal.SIGSEGV)
        return b""

    def hangs() -> bytes:
        while True:
            pass

    assert isolated(lambda: b"answer" * 100_000) == b"answer" * 100_000
    with pytest.raises(NativeError, match=r"^first line$"):
        isolated(raises)
    with pytest.raises(NativeCrashError, match="Segmentation fault"):
        isolated(crashes)
    with pytest.raises(NativeCrashError):
        isolated(hangs)


def test_messages_are_one_printable_line() -> None:
    """Names from a file can neither break a line, nor command a terminal, nor fill a screen."""
    error = TapError("a\nb\x1b[2J\u202ec" + "n" * 10_000, hint="x\r\ny")
    assert error.message.isprintable()
    assert error.message.startswith("a b\\x1b[2J\\u202ec")
    assert len(error.message) < 2000
    assert error.hint == "x y"
    assert str(InfeasibleError("a\nb", least_memory_bytes=1, limit_bytes=1)) == "a b"


def test_kept_outputs_that_nobody_reads_are_priced(tmp_path: Path) -> None:
    """An LSTM keeps all its states for backward, also where only the last one is read: search and program agree.

    (``make_plan`` raises where their prices differ by a byte.)
    """
    nodes: list[onnx.NodeProto] = []
    stored: list[TensorProto] = []
    current = "x"
    for layer in range(3):
        for name, shape in (("w", (1, 32, 8)), ("r", (1, 32, 8))):
            stored.append(numpy_helper.from_array(np.zeros(shape, np.float32), f"{name}{layer}"))
        nodes.append(
            helper.make_node(
                "LSTM", [current, f"w{layer}", f"r{layer}"], [f"all{layer}", f"last{layer}"], hidden_size=8
            )
        )
        nodes.append(helper.make_node("Add", [current, f"last{layer}"], [f"sum{layer}"]))
        nodes.append(helper.make_node("Relu", [f"sum{layer}"], [f"x{layer}"]))
        current = f"x{layer}"
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, [6, 4, 8])] for name in ("x", current)]
    graph = helper.make_graph(nodes, "g", *ends, stored)
    path = tmp_path / "lstm.onnx"
    path.write_bytes(
        helper.make_model(graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17)]).SerializeToString()
    )
    options = PlanOptions(precision="fp32", loss="mean", microbatches=1)
    plan = make_plan(PlanRequest(model=path, cluster="1x2:cpu-core", options=options))
    states = 6 * 4 * 8 * 4
    assert plan.predicted.memory_bytes["activations"] >= 3 * states // 2
