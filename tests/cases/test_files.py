"""Cases about files: what is no model, what is damaged, names, weights elsewhere, sizes beyond reason."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

import tap_planner.apply.runner
from tests.cases.running import (
    Case,
    assert_any_plan_runs_as_elsewhere,
    assert_equal_outputs,
    assert_runs_as_elsewhere,
    bound_graph,
    execute,
)

NO_MODELS = {
    "empty": ("an empty file, not a readable ONNX model",),
    "json": ("not a readable ONNX model",),
    "lfs_pointer": ("a git-lfs pointer, not a readable ONNX model", "git lfs pull"),
    "random": ("not a readable ONNX model",),
    "truncated": ("not a readable ONNX model",),
    "zip": ("not a readable ONNX model",),
}


@pytest.mark.parametrize("stem", NO_MODELS)
def test_files_that_are_no_models(stem: str, tmp_path: Path) -> None:
    """One line that names the file; a pointer is recognised; no plan is left (``attempt`` looks)."""
    done = Case("not_onnx_files").attempt(tmp_path, stem=stem)
    done.refused(2, f"{stem}.onnx: ", *NO_MODELS[stem])


@pytest.mark.parametrize(
    ("stem", "words"),
    [
        ("cycle", ("the graph has a cycle: ", "node 'p'")),
        ("double_def", ("node 'b' (Exp)", "value 'y' is made twice")),
        ("dangling_input", ("node 'a' (Relu)", "reads 'ghost', which no node, input or initializer makes")),
        ("dangling_output", ("graph output 'y' is made by no node",)),
    ],
)
def test_damaged_graphs(stem: str, words: tuple[str, ...], tmp_path: Path) -> None:
    """One line with the names."""
    Case("invalid_graphs").attempt(tmp_path, stem=stem).refused(2, *words)


def test_a_cycle_is_named_whole(tmp_path: Path) -> None:
    """The loop of the nodes p, q and s is told by its values a, b and c."""
    error = Case("invalid_graphs").attempt(tmp_path, stem="cycle").error
    loop = error.partition("cycle: ")[2].split(" -> ")
    assert loop[0] == loop[-1] and set(loop) == {"a", "b", "c"}


# -- opsets and domains ------------------------------------------------------------------------------------------

DOMAINS = Case("domain_and_opset_imports")


@pytest.mark.parametrize("stem", ["import_ai_onnx", "node_domain_ai_onnx"])
def test_ai_onnx_is_the_default_domain(stem: str, tmp_path: Path) -> None:
    """Whether the import or the nodes say ai.onnx, it is the domain without a name."""
    planned = DOMAINS.plan(tmp_path, "--batch", "4", stem=stem)
    assert [operator.type for operator in planned.operators] == ["MatMul", "Relu", "MatMul"]
    assert not planned.done.warnings


def test_a_domain_without_import_is_reported(tmp_path: Path) -> None:
    """com.microsoft is used and not imported: planned with a word about it, or refused with domain and operator."""
    done = DOMAINS.attempt(tmp_path, stem="missing_import")
    assert done.code in (0, 2)
    said = " ".join(done.warnings) if done.code == 0 else done.error
    assert "com.microsoft" in said and "BiasGelu" in said and ("version 1 is assumed" in said or done.code == 2)


@pytest.mark.parametrize("stem", ["no_import", "future_opset"])
def test_operator_sets_that_are_not_supported(stem: str, tmp_path: Path) -> None:
    """One line that says what is supported."""
    DOMAINS.attempt(tmp_path, "--batch", "4", stem=stem).refused(2, f"{stem}.onnx: ", "operator set", "expected")


OLD = Case("old_opsets_4_6_7")


@pytest.mark.parametrize("stem", ["opset4_reshape_attr", "opset7_bn_dropout"])
def test_old_operator_sets_run(stem: str, tmp_path: Path) -> None:
    """Reshape with a shape attribute, BatchNormalization and Dropout of old operator sets compute what they did."""
    planned = assert_runs_as_elsewhere(OLD, tmp_path, stem=stem)
    assert_any_plan_runs_as_elsewhere(OLD, planned, tmp_path, stem=stem)


def test_old_broadcasting(tmp_path: Path) -> None:
    """Opset 6 adds ``b`` along axis 1, and Dropout with is_test is the identity: x w + b."""
    planned = OLD.plan(tmp_path, "--precision", "fp32", stem="opset6_broadcast")
    weights = _initializers(OLD.model("opset6_broadcast"))
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    found = execute(planned.job(), tmp_path / "inputs.npz")
    assert_equal_outputs(found, {"y": x @ weights["w"] + weights["b"]})


def _initializers(path: Path) -> dict[str, np.ndarray]:
    model = onnx.load(path, load_external_data=False)
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}


# -- names -------------------------------------------------------------------------------------------------------

NAMES = Case("duplicate_and_odd_names")


def test_two_nodes_of_one_name(tmp_path: Path) -> None:
    """Each has an entry of its own, told by what it makes; the plan runs."""
    planned = NAMES.plan(tmp_path, "--precision", "fp32", stem="duplicate")
    model = onnx.load(NAMES.model("duplicate"))
    made = [(node.output[0], node.op_type, node.name) for node in model.graph.node]
    assert [(o.id, o.type, o.name) for o in planned.operators] == made
    names = [name for _, _, name in made]
    assert len(set(names)) < len(names), "the case has doubled names"
    weights = _initializers(NAMES.model("duplicate"))
    x = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    np.savez(tmp_path / "inputs.npz", x=x)
    expected = np.maximum(np.maximum(x @ weights["w1"], 0) @ weights["w2"], 0)
    assert_equal_outputs(execute(planned.job(), tmp_path / "inputs.npz"), {"y": expected})
    assert planned.apply("--verify").code == 0


def test_odd_names_survive(tmp_path: Path) -> None:
    """Spaces, colons, slashes and letters beyond ASCII stay as they are; a.b and a/b are two parameters."""
    planned = assert_runs_as_elsewhere(NAMES, tmp_path, stem="odd")
    assert [parameter.name for parameter in planned.decisions.parameters] == ["a.b", "a/b"]
    assert [operator.id for operator in planned.decisions.operators[-2:]] == ["层/输出", "层/输出__output"]
    (block,) = planned.json["blocks"]  # pyright: ignore[reportGeneralTypeIssues]
    assert block["operators"][0]["inputs"][0]["tensor"] == "in put:0"
    assert block["operators"][-2]["outputs"][0]["tensor"] == "层/输出"
    assert_any_plan_runs_as_elsewhere(NAMES, planned, tmp_path, stem="odd")


SHAPELESS = Case("nameless_and_shapeless")


def test_a_graph_without_name(tmp_path: Path) -> None:
    """An empty graph name is fine."""
    assert SHAPELESS.plan(tmp_path, "--batch", "4", stem="no_name").document.model.batch == 4


@pytest.mark.parametrize(
    ("stem", "words", "options"),
    [
        ("no_rank", ("input 'x'", "--shape x=4,8"), ("--shape", "x=4,8")),
        ("unnamed_dim", ("x.0", "--dim x.0=N"), ("--dim", "x.0=4")),
    ],
)
def test_inputs_without_shape(stem: str, words: tuple[str, ...], options: tuple[str, ...], tmp_path: Path) -> None:
    """The error asks by input and axis, and what it offers works."""
    SHAPELESS.attempt(tmp_path, stem=stem).refused(2, *words)
    planned = SHAPELESS.plan(tmp_path, *options, stem=stem)
    assert planned.decisions.operators[0].outputs[0].shape == (4, 16)


def test_nodes_out_of_order(tmp_path: Path) -> None:
    """An acyclic graph in any order is sorted, with a note, and computes what it should."""
    case = Case("unsorted_nodes")
    planned = assert_runs_as_elsewhere(case, tmp_path)
    ids = [operator.id for operator in planned.decisions.operators]
    made = set[str]()
    for operator in planned.decisions.operators:
        assert all(o is None or o.tensor in made or o.tensor not in ids for o in operator.inputs)
        made.add(operator.id)
    assert any("order" in line or "sorted" in line for line in planned.done.warnings), planned.done.err
    assert_any_plan_runs_as_elsewhere(case, planned, tmp_path)


def test_initializers_that_are_inputs_as_well(tmp_path: Path) -> None:
    """Files of IR version 3 list weights among the inputs: they are parameters, x is the only input."""
    case = Case("init_as_input_ir3")
    planned = assert_runs_as_elsewhere(case, tmp_path, "--batch", "2")
    assert bound_graph(planned.job()).inputs == ("x",)
    assert [parameter.name for parameter in planned.decisions.parameters] == ["w1", "w2"]
    split = case.plan(tmp_path, "--batch", "2", "--constraint", "a:dp=n", "--mesh", "dp=4")
    assert str(split.decisions.parameters[0].placement[0]) == "S(1)"
    assert_any_plan_runs_as_elsewhere(case, planned, tmp_path)


# -- weights elsewhere -------------------------------------------------------------------------------------------


def test_absent_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning needs none; applying stops before any process starts, naming file and folder."""
    case = Case("external_missing")
    planned = case.plan(tmp_path, "--batch", "4")
    assert [parameter.shape for parameter in planned.decisions.parameters] == [(8, 16), (16, 8)]

    def start(*arguments: object) -> None:
        raise AssertionError("processes were started")

    monkeypatch.setattr(tap_planner.apply.runner, "run_processes", start)
    for arguments in ((), ("--nproc", "4")):
        planned.apply(*arguments).refused(5, "weights.bin", str(case.folder), "--init random")
    assert planned.apply("--init", "random", "--verify").code == 0


TRAVERSAL = Case("external_path_traversal")
_opened: list[str] | None = None


def _note_opened(event: str, arguments: tuple[object, ...]) -> None:
    if event == "open" and _opened is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_note_opened)


@contextmanager
def _watched() -> Iterator[list[str]]:
    """What is opened meanwhile."""
    global _opened
    _opened = []
    try:
        yield _opened
    finally:
        _opened = None


@pytest.mark.parametrize("stem", ["dotdot", "absolute", "nested_dotdot", "backslash", "empty"])
def test_weights_outside_the_folder_are_not_opened(stem: str, tmp_path: Path) -> None:
    """Planning does without; applying names the tensor and the location. Nothing outside the folder is opened."""
    model = onnx.load(TRAVERSAL.model(stem), load_external_data=False)
    entries = {entry.key: entry.value for entry in model.graph.initializer[0].external_data}
    location = entries.get("location", "")
    planned = TRAVERSAL.plan(tmp_path, "--batch", "4", stem=stem)
    with _watched() as opened:
        done = planned.apply()
    done.refused(5, "w1")
    assert repr(location) in done.err or location in done.err
    target = (TRAVERSAL.folder / location.replace("\\", "/")).resolve() if location else TRAVERSAL.folder
    assert str(target) not in {os.path.realpath(path) for path in opened}


# -- sizes -------------------------------------------------------------------------------------------------------

HUGE = Case("huge_sizes_small_file")


@pytest.mark.parametrize("mode", ["infer", "train"])
@pytest.mark.parametrize(
    ("stem", "least_bytes"),
    [
        ("constant_of_shape", 2 * 10**12 // 4),
        ("weight_2_66", 2 * 2**66 // 4),
        ("tile_tower", 2 * 10**15 // 4),
        ("dim_2_62", 2 * 2**64 // 4),
    ],
)
def test_sizes_beyond_reason_do_not_fit(stem: str, least_bytes: int, mode: str, tmp_path: Path) -> None:
    """Nothing is made; the least memory is exact: a quarter, in 2 bytes each, of what the file describes, and in
    inference the number that ``constant_of_shape`` returns."""
    done = HUGE.attempt(tmp_path, stem=stem, mode=mode)
    done.refused(3, "no plan fits: ", "per device", f"the limit is 85.90 GB ({80 << 30} bytes)")
    if mode == "infer":
        assert f"({least_bytes + 2 * (stem == 'constant_of_shape')} bytes)" in done.error


@pytest.mark.parametrize("stem", ["dim_2_62", "weight_2_66"])
def test_without_a_limit_they_are_refused(stem: str, tmp_path: Path) -> None:
    """Where no limit is wanted, sizes that cannot be counted are an error, not a wrong number."""
    done = HUGE.attempt(tmp_path, "--max-memory", "none", stem=stem)
    done.refused(2, f"{stem}.onnx: on one device the graph takes about 2^")


def test_sizes_beyond_reason_take_no_memory(tmp_path: Path) -> None:
    """Each answer comes within 4 GiB of address space."""
    program = str(Path(sys.executable).with_name("tap-plan"))
    for path in sorted(HUGE.folder.glob("*.onnx")):
        limited = f"ulimit -v {4 << 20}; exec {program} {path} --cluster {HUGE.cluster} --mode infer"
        done = subprocess.run(
            ["bash", "-c", limited], capture_output=True, text=True, cwd=tmp_path, timeout=60, check=False
        )
        assert done.returncode == 3, (path.stem, done.stderr)


MANY = Case("many_nodes_20k")


def test_many_nodes(tmp_path: Path) -> None:
    """5000 equal residual blocks of four operators that share one weight, and the end of the graph: the blocks are
    searched as one and written as one."""
    planned = MANY.plan(tmp_path)
    folded = planned.document.folded
    assert (
        sum(
            repeat.count * len(block.operators)
            for block in folded.blocks
            for repeat in folded.repeats
            if repeat.key == block.key
        )
        == 20_000 + 1
    )
    assert len(folded.blocks) <= 3 and max(len(block.operators) for block in folded.blocks) <= 8
    assert [parameter.name for parameter in planned.decisions.parameters] == ["w", "b"]
    assert planned.path.stat().st_size < 1 << 20


@pytest.mark.full
def test_a_hundred_thousand_nodes(tmp_path: Path) -> None:
    """The form of 100 000 nodes, as make_100k.py writes it, is planned like one block too."""
    (tmp_path / "model.onnx").write_bytes(MANY.model().read_bytes())
    subprocess.run([sys.executable, MANY.folder / "make_100k.py"], cwd=tmp_path, check=True, timeout=300)
    program = str(Path(sys.executable).with_name("tap-plan"))
    arguments = [tmp_path / "big.onnx", "--cluster", MANY.cluster, "--batch", "8", "--mode", "infer"]
    done = subprocess.run(
        [program, *arguments, "-o", tmp_path / "plan.json"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "plan.json").stat().st_size < 4 << 20
