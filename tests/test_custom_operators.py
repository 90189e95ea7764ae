"""An operator that nobody knows: planned with a warning, then by a custom rule, and run by a user's torch function.

``unknown_custom_op`` holds MatMul, acme.ops::FlashThing (4 heads) and MatMul, whose weights the tests train.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper

from tap_planner import api
from tap_planner.errors import ApplyError, UnsupportedGraphError
from tap_planner.graph import BindOptions, Graph, bind, load_model
from tap_planner.operators import CUSTOM_RULE, CustomRule, custom_rule, load_custom_rules, record_of
from tap_planner.plan import (
    ApplyRequest,
    PlanDocument,
    PlanOptions,
    PlanRequest,
    Verdict,
    diff_plans,
    from_text,
    parse_constraint,
    to_text,
    write_plan,
)

MODEL = Path(__file__).parent / "data" / "cases" / "unknown_custom_op" / "model.onnx"
FLASH = "acme.ops::FlashThing"

RULES = f"""\
operators:
  {FLASH}:
    inputs: ["b (h d)"]
    outputs: ["b (h d)"]
    factors: {{d: fixed}}
    sizes: {{h: heads}}
"""
FUNCTIONS = f"""\
import torch
from tap_planner.apply import OperatorContext, custom_operator

@custom_operator("{FLASH}")
def flash_thing(context: OperatorContext, operands):
    width = context.input_shape(0)[1] // context.int("heads")
    return torch.softmax(operands[0].unflatten(1, (-1, width)), -1).flatten(1)
"""
"""A softmax over each head: heads and batch are independent, what lies inside a head is not."""


@dataclass(frozen=True, kw_only=True)
class Workplace:
    """A folder with rules and functions, and what the commands do there."""

    folder: Path

    def file(self, name: str, text: str) -> Path:
        """Write a file."""
        path = self.folder / name
        path.write_text(text)
        return path

    def plan(self, rules: str | None, *constraints: str, mesh: str | None = "tp=2", **options: object) -> PlanDocument:
        """Plan the case for two CPU cores."""
        loaded = () if rules is None else load_custom_rules([self.file("rules.yaml", rules)])
        request = PlanRequest(
            model=MODEL,
            cluster="1x2:cpu-core",
            options=PlanOptions(
                batch=4,
                mesh=mesh,
                loss=None if options.get("mode") == "infer" else "mean",
                constraints=tuple(map(parse_constraint, constraints)),
                custom_rules=loaded,
                precision="fp32",
                **options,  # type: ignore[arg-type]
            ),
        )
        return api.make_plan(request)

    def apply(
        self,
        document: PlanDocument,
        functions: str | None = FUNCTIONS,
        *,
        verify: bool = True,
        nproc: int | None = None,
    ) -> api.ApplyOutcome:
        """Run a plan with the functions."""
        write_plan(self.folder / "plan.json", document)
        custom_ops = () if functions is None else (self.file("ops.py", functions),)
        request = ApplyRequest(
            plan=self.folder / "plan.json", model=MODEL, custom_ops=custom_ops, verify=verify, nproc=nproc, seed=1
        )
        return api.apply_plan(request)


@pytest.fixture
def place(tmp_path: Path) -> Workplace:
    """An empty folder."""
    return Workplace(folder=tmp_path)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What is warned of."""
    monkeypatch.setattr(logging.getLogger("tap_planner"), "propagate", True)
    found: list[str] = []
    with caplog.at_level(logging.WARNING, logger="tap_planner"):
        monkeypatch.setattr(caplog.handler, "emit", lambda record: found.append(record.getMessage()))
        yield found


def choices(document: PlanDocument, type: str) -> list[tuple[str, ...]]:
    """Strategies of all operators of a type."""
    return [op.strategy for block in document.folded.blocks for op in block.operators if op.type == type]


# -- without a rule ----------------------------------------------------------------------------------------------


def test_planned_opaque_with_a_warning(place: Workplace, warnings: list[str]) -> None:
    """The operator is replicated; the warning names it, its count, its share and the remedy. In fp32 the step reads
    and writes 32+128+64, 64+64 and 64+128+32 elements, of which the operator's are 128 of 576: 22 %."""
    document = place.plan(None, mode="infer")
    assert choices(document, FLASH) == [("none",)]
    assert warnings == [
        f"{FLASH} (1 operator) is not known: replicated on every device; its operands and results are 22 % of the "
        "bytes that the step touches; describe it with --custom-rule FILE (docs/custom-rules.md)"
    ]


def test_several_unknown_types_share_one_warning(tmp_path: Path, warnings: list[str]) -> None:
    """Every type is listed with its count."""
    nodes = [
        helper.make_node("B", ["x"], ["a"], domain="acme"),
        helper.make_node("A", ["a"], ["b"], domain="acme"),
        helper.make_node("B", ["b"], ["c"], domain="acme"),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    path = saved(tmp_path, nodes, dict.fromkeys("abcxy", (2, 4)))
    api.prepare_search(PlanRequest(model=path, cluster="1x2:cpu-core", options=PlanOptions(mode="infer")))
    (warning,) = warnings
    assert warning.startswith("acme::A (1 operator), acme::B (2 operators) are not known: replicated on every device")
    assert "their operands and results are 75 % of the bytes" in warning


def saved(folder: Path, nodes: list[onnx.NodeProto], shapes: dict[str, tuple[int | str, ...]]) -> Path:
    """A model from x to y, with value_info for the other shapes."""
    infos = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()}
    graph = helper.make_graph(nodes, "g", [infos.pop("x")], [infos.pop("y")], value_info=list(infos.values()))
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("acme", 1)]
    onnx.save(helper.make_model(graph, opset_imports=opsets), folder / "model.onnx")
    return folder / "model.onnx"


@pytest.mark.parametrize("nproc", [None, 2])
def test_refused_without_a_function(place: Workplace, nproc: int | None) -> None:
    """tap-apply names the operator and the option before any process starts."""
    document = place.plan(RULES, mode="infer")
    with pytest.raises(ApplyError, match=f"^no torch function is known for {FLASH} \\(1 operator\\)") as caught:
        place.apply(document, None, nproc=nproc)
    assert caught.value.exit_code == 5
    assert "--custom-ops FILE.py, which runs the code of that file" in caught.value.hint


def test_an_opaque_operator_can_be_run(place: Workplace) -> None:
    """A function is enough to run a replicated operator: it gets whole tensors."""
    outcome = place.apply(place.plan(None))
    assert outcome.passed, "\n".join(outcome.lines())


# -- with a rule -------------------------------------------------------------------------------------------------


def test_split_in_lockstep(place: Workplace, warnings: list[str]) -> None:
    """By its rule heads are split; training is what a single process does; nothing is warned of."""
    document = place.plan(RULES, f"{FLASH}:tp=h", "MatMul:tp!=batch")
    assert choices(document, FLASH) == [("h",)]
    assert warnings == []
    outcome = place.apply(document)
    assert outcome.passed, "\n".join(outcome.lines())
    assert outcome.report is not None and outcome.report.largest_gradient > 1e-4
    assert {row.what for row in outcome.report.comparisons} >= {"gradient w", "gradient w2", "output y"}


@pytest.mark.parametrize("mode", ["train", pytest.param("infer", marks=pytest.mark.full)])
def test_split_on_two_processes(place: Workplace, mode: str) -> None:
    """The function reaches the worker processes."""
    outcome = place.apply(place.plan(RULES, f"{FLASH}:tp=h", mode=mode), nproc=2)
    assert outcome.passed, "\n".join(outcome.lines())


@pytest.mark.full
def test_split_under_a_launcher(place: Workplace) -> None:
    """The function reaches the processes that a launcher started."""
    write_plan(place.folder / "plan.json", place.plan(RULES, f"{FLASH}:tp=h"))
    script = "import sys\nfrom tap_planner_cli.apply import main\nif __name__ == '__main__':\n    main()\n"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    arguments = ["plan.json", "--model", MODEL, "--verify", "--backend", "gloo"]
    files = [place.file("main.py", script), *arguments, "--custom-ops", place.file("ops.py", FUNCTIONS)]
    run = subprocess.run(
        [*launcher, *files],
        cwd=place.folder,
        capture_output=True,
        text=True,
        timeout=180,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert "gradient: 2 of 2 equal" in run.stdout


def test_microbatches(place: Workplace) -> None:
    """The batch goes through a rule: two microbatches are one batch."""
    outcome = place.apply(place.plan(RULES, f"{FLASH}:tp=h", microbatches=2))
    assert outcome.passed, "\n".join(outcome.lines())


def test_steps_in_the_plan_s_precision(place: Workplace) -> None:
    """Plain steps run too."""
    outcome = place.apply(place.plan(RULES, f"{FLASH}:tp=h"), verify=False)
    assert outcome.result is not None and len(outcome.result.losses) == 1


LINEAR = f"operators:\n  {FLASH}:\n    inputs: [b c]\n    outputs: [b c]\n    linear: [[P]]\n"


@pytest.mark.parametrize(
    ("rules", "constraints"),
    [
        (RULES.replace("d: fixed", "d: parallel"), (f"{FLASH}:tp=d",)),
        (LINEAR, (f"{FLASH}:tp=partial", "a:tp=k")),
    ],
    ids=["inside a head", "linear"],
)
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_a_false_rule_is_found(place: Workplace, rules: str, constraints: tuple[str, ...], mode: str) -> None:
    """A rule that claims what the operator cannot do gives a plan that --verify does not pass."""
    outcome = place.apply(place.plan(rules, *constraints, mode=mode))
    assert not outcome.passed
    assert any(finding.startswith("output y differs") for finding in outcome.lines())


def test_a_rule_decides_about_gradients(place: Workplace) -> None:
    """What lies only behind operands that no gradient reaches is not trained."""
    document = place.plan(RULES + "    differentiable: []\n")
    assert {entry.decision.name: entry.decision.trainable for entry in document.folded.parameters} == {
        "w": False,
        "w2": True,
    }


def test_a_true_linear_way(place: Workplace) -> None:
    """A sum passes through an operator that is linear."""
    functions = FUNCTIONS.replace(
        "torch.softmax(operands[0].unflatten(1, (-1, width)), -1).flatten(1)", "3 * operands[0]"
    )
    document = place.plan(LINEAR, f"{FLASH}:tp=partial", "a:tp=k")
    assert choices(document, FLASH) == [("partial",)]
    outcome = place.apply(document, functions)
    assert outcome.passed, "\n".join(outcome.lines())


def _documented(kind: str) -> str:
    """The block of a language in docs/custom-rules.md."""
    text = (Path(__file__).parents[1] / "docs" / "custom-rules.md").read_text(encoding="utf-8")
    (block,) = re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)
    return block


@pytest.mark.parametrize(("factor", "false"), [("b", False), ("s", False), ("h", False), ("t", True)])
def test_the_documented_attention(tmp_path: Path, factor: str, false: bool) -> None:
    """The rule and the function of docs/custom-rules.md are true for every factor that may be split, with a mask; if
    the rule leaves out that the keys are fixed, splitting them is found."""
    rules, functions = _documented("yaml"), _documented("py")
    names = {"q": (4, 6, 16), "k": (4, 8, 16), "v": (4, 8, 16), "mask": (4, 1, 6, 8), "y": (4, 6, 16)}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in names.items()]
    node = helper.make_node("FlashThing", list(names)[:4], ["y"], domain="acme.ops", num_heads=4)
    model = helper.make_model(
        helper.make_graph([node], "g", infos[:4], infos[4:]),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid("acme.ops", 1)],
    )
    onnx.save(model, tmp_path / "model.onnx")
    (tmp_path / "rules.yaml").write_text(rules.replace("t: fixed, ", "") if false else rules)
    (tmp_path / "ops.py").write_text(functions)
    options = PlanOptions(
        mode="infer",
        mesh="tp=2",
        precision="fp32",
        custom_rules=load_custom_rules([tmp_path / "rules.yaml"]),
        constraints=(parse_constraint(f"{FLASH}:tp={factor}"),),
    )
    request = PlanRequest(model=tmp_path / "model.onnx", cluster="1x2:cpu-core", options=options)
    write_plan(tmp_path / "plan.json", api.make_plan(request))
    outcome = api.apply_plan(
        ApplyRequest(
            plan=tmp_path / "plan.json", model=request.model, custom_ops=(tmp_path / "ops.py",), verify=True, seed=1
        )
    )
    assert outcome.passed != false, "\n".join(outcome.lines())


# -- the plan holds the rule -------------------------------------------------------------------------------------


def test_the_plan_stores_the_rules_that_it_uses(place: Workplace, warnings: list[str]) -> None:
    """Rules of other models are left out with a warning; checking and applying need no file."""
    document = place.plan(RULES + "  acme.ops::FlashTing: {inputs: [b], outputs: [b]}\n")
    assert [rule.type for rule in document.options.custom_rules] == [FLASH]
    (warning,) = warnings
    assert "rules.yaml:7: it fits no operator of the model (did you mean 'acme.ops::FlashThing'?)" in warning
    text = to_text(document)
    assert from_text(text) == document
    assert "rules.yaml" not in text
    (place.folder / "rules.yaml").unlink()
    assert api.check_plan(from_text(text), MODEL, "1x2:cpu-core").verdict is Verdict.IDENTICAL


def test_another_rule_is_another_graph(place: Workplace) -> None:
    """The rule is part of the graph's digest, and a diff shows what of it changed."""
    old, new = place.plan(RULES), place.plan(RULES.replace("h: heads", "h: 2"))
    assert old.model.graph_digest != new.model.graph_digest
    difference = diff_plans(old, new)
    assert any("custom_rules" in change.name and "sizes" in change.name for change in difference.options)


def test_a_plan_without_its_rule_is_refused(place: Workplace) -> None:
    """A plan from which the rule was taken is about another graph."""
    document = place.plan(RULES)
    bare = replace(document, options=replace(document.options, custom_rules=()))
    with pytest.raises(ApplyError, match="gives graph"):
        api.lower_plan(bare, MODEL)


# -- binding -----------------------------------------------------------------------------------------------------


def flash_rule(**changes: object) -> CustomRule:
    """The rule of these tests."""
    keys: dict[str, object] = {"type": FLASH, "inputs": ["b (h d)"], "outputs": ["b (h d)"], "sizes": {"h": "heads"}}
    return custom_rule(**{**keys, "source": "rules.yaml:2", **changes})  # type: ignore[arg-type]


def bound(path: Path, *rules: CustomRule, batch: int = 4) -> Graph:
    """A model bound with rules."""
    return bind(load_model(path), BindOptions(batch=batch, custom_rules=rules))


def test_no_shape_is_needed(tmp_path: Path) -> None:
    """With a rule a file without value_info imports; without one the error names the remedy."""
    model = onnx.load(MODEL)
    del model.graph.value_info[:]
    onnx.save(model, tmp_path / "bare.onnx")
    assert bound(tmp_path / "bare.onnx", flash_rule()).tensor("b").type.shape == (4, 16)
    with pytest.raises(UnsupportedGraphError, match=FLASH) as caught:
        bound(tmp_path / "bare.onnx")
    assert "--custom-rule FILE" in caught.value.hint


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inputs": ["b s (h d)"]}, r"operand 0 has shape \[4, 16\], expected 3 dims as 'b s \(h d\)'"),
        ({"sizes": {"h": 3}}, r"operand 0, dim 1 of 'b \(h d\)' has size 16, expected a multiple of h=3"),
        ({"sizes": {"h": "head"}}, "its size is attribute 'head', which is absent"),
        ({"outputs": ["b h"]}, r"output 0 \('b'\) is float32\[4, 4\] by the rule, the file declares float32\[4, 16\]"),
        ({"dtype": "int64"}, r"output 0 \('b'\) is int64\[4, 16\] by the rule, the file declares float32\[4, 16\]"),
    ],
)
def test_rules_that_do_not_fit(changes: dict[str, object], message: str) -> None:
    """The error names the node, the rule's place, what was got and what was expected."""
    where = f"node 'custom0' \\({FLASH}\\): custom rule in rules.yaml:2: .*"
    with pytest.raises(UnsupportedGraphError, match=where + message):
        bound(MODEL, flash_rule(**changes))


def test_trainable_operands(tmp_path: Path) -> None:
    """A weight of a custom operator is trained if the rule calls the operand trainable."""
    weight = helper.make_tensor("w", TensorProto.FLOAT, (4,), [1.0] * 4)
    node = helper.make_node("Scale", ["x", "w"], ["y"], domain="acme")
    path = saved(tmp_path, [node], {"x": ("batch", 4), "y": ("batch", 4)})
    model = onnx.load(path)
    model.graph.initializer.append(weight)
    onnx.save(model, path)
    for trainable in ([], [1]):
        rule = custom_rule(type="acme::Scale", inputs=["b c", "c"], outputs=["b c"], trainable=trainable)
        graph = bind(load_model(path), BindOptions(batch=2, training=True, custom_rules=(rule,)))
        assert [parameter.trainable for parameter in graph.parameters] == [bool(trainable)] * len(graph.parameters)
        assert len(graph.parameters) == len(trainable)


def test_rebatching_asks_the_rule(tmp_path: Path) -> None:
    """A file with a fixed batch of one is re-batched where the rule lets the batch be split, else it is refused."""
    path = saved(tmp_path, [helper.make_node("F", ["x"], ["y"], domain="acme")], {"x": (1, 8), "y": (1, 8)})
    rule = custom_rule(type="acme::F", inputs=["b c"], outputs=["b c"])
    assert bound(path, rule, batch=4).tensor("y").type.shape == (4, 8)
    fixed = custom_rule(type="acme::F", inputs=["b c"], outputs=["b c"], factors={"b": "fixed"})
    with pytest.raises(UnsupportedGraphError, match="its rule does not let dim 0"):
        bound(path, fixed, batch=4)


def test_the_reserved_attribute_is_refused(tmp_path: Path) -> None:
    """A file cannot bring a rule of its own."""
    node = helper.make_node("F", ["x"], ["y"], domain="acme", **{CUSTOM_RULE: "{}"})
    with pytest.raises(UnsupportedGraphError, match="a name that is reserved"):
        bound(saved(tmp_path, [node], {"x": (4, 8), "y": (4, 8)}))


def test_equal_operators_share_a_rule(tmp_path: Path) -> None:
    """Operators of one type and shape have one record; those of a type without a rule stay unknown."""
    nodes = [
        helper.make_node("F", ["x"], ["a"], domain="acme"),
        helper.make_node("F", ["a"], ["b"], domain="acme"),
        helper.make_node("G", ["b"], ["y"], domain="acme"),
    ]
    rule = custom_rule(type="acme::F", inputs=["b c"], outputs=["b c"])
    graph = bound(saved(tmp_path, nodes, dict.fromkeys("abxy", (4, 8))), rule)
    first, second, third = (operator.signature for operator in graph.operators)
    assert first == second
    assert [record_of(each).known for each in (first, second, third)] == [True, True, False]
    assert graph.ruled == ("acme::F",)


# -- functions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("x = 1\n", r"ops\.py: it defines no operator"),
        ("import torch\ndef f(:\n", r"ops\.py:2: SyntaxError"),
        ("x = 1\nraise ValueError('no')\n", r"ops\.py:2: ValueError: no"),
        ("import sys\nsys.exit(3)\n", r"ops\.py:2: SystemExit: 3"),
        ("OPERATORS = [1]\n", "OPERATORS is no mapping"),
        (f"OPERATORS = {{'{FLASH}': 3}}\n", "OPERATORS is no mapping"),
        (FUNCTIONS + FUNCTIONS.replace("def flash_thing", "def other"), f"operator {FLASH} is defined twice"),
        (FUNCTIONS + "OPERATORS = {'MatMul': flash_thing}\n", "defines MatMul, which has a built-in function"),
        (FUNCTIONS.replace("Thing", "Ting"), "no torch function is known for acme.ops::FlashThing"),
    ],
    ids=["empty", "syntax", "raises", "exits", "list", "number", "twice", "built-in", "misspelt"],
)
def test_wrong_files(place: Workplace, functions: str, message: str) -> None:
    """A file that cannot be used is one line of error with its place."""
    document = place.plan(RULES, mode="infer")
    with pytest.raises(ApplyError, match=message) as caught:
        place.apply(document, functions)
    assert "\n" not in caught.value.message
    assert caught.value.hint


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return operands[0].nonsense", r"in .*ops\.py:6 failed: AttributeError"),
        ("return operands[0].detach()", "lost the gradient"),
        (
            "operands[0].data.mul_(1); operands[0].detach().add_(1); return operands[0] * 1",
            "changed an operand in place",
        ),
        ("return operands[0], operands[0]", "returned 2 results, expected 1"),
        ("return 3.0", "returned float as output 0, expected a tensor"),
        ("return operands[0].half()", r"returned torch\.float16 as output 0, expected torch\.float64"),
        ("return operands[0][:, :4]", r"it made a part of shape \(4, 4\), expected \(4, 8\)"),
        ("return Broken.apply(operands[0])", "failed in backward: ZeroDivisionError"),
        ("raise context.unsupported('heads')", "cannot be executed: heads"),
    ],
    ids=["raises", "detached", "in place", "two", "number", "dtype", "shape", "backward", "unsupported"],
)
def test_wrong_functions(place: Workplace, body: str, message: str) -> None:
    """What a function does wrong is told, with its place."""
    functions = [*FUNCTIONS.splitlines()[:5], f"    {body}", "", *_BROKEN]
    with pytest.raises(ApplyError, match=message):
        place.apply(place.plan(RULES, f"{FLASH}:tp=h"), "\n".join(functions))


_BROKEN = (
    "class Broken(torch.autograd.Function):",
    "    @staticmethod",
    "    def forward(ctx, x): return x * 1",
    "    @staticmethod",
    "    def backward(ctx, grad): return grad * (1 // 0)",
)


def test_a_table_of_functions(place: Workplace) -> None:
    """The dict OPERATORS does what the decorator does."""
    functions = FUNCTIONS.replace(f'@custom_operator("{FLASH}")\n', "") + f"OPERATORS = {{'{FLASH}': flash_thing}}\n"
    outcome = place.apply(place.plan(RULES, f"{FLASH}:tp=h"), functions)
    assert outcome.passed, "\n".join(outcome.lines())


def test_functions_do_not_outlive_the_run(place: Workplace) -> None:
    """What one run loaded the next one does not know."""
    document = place.plan(RULES, f"{FLASH}:tp=h", mode="infer")
    assert place.apply(document).passed
    with pytest.raises(ApplyError, match="no torch function is known"):
        place.apply(document, None)


def test_overriding_a_built_in_rule(tmp_path: Path) -> None:
    """With override: true a rule replaces the built-in one; the built-in function still runs, and a lie is found."""
    path = saved(tmp_path, [helper.make_node("Softmax", ["x"], ["y"], axis=-1)], {"x": ("batch", 8), "y": ("batch", 8)})
    outcomes: list[bool] = []
    for factor in ("b", "c"):
        rule = custom_rule(type="Softmax", inputs=["b c"], outputs=["b c"], override=True)
        options = PlanOptions(
            mode="infer",
            batch=4,
            mesh="tp=2",
            precision="fp32",
            custom_rules=(rule,),
            constraints=(parse_constraint(f"Softmax:tp={factor}"),),
        )
        write_plan(
            tmp_path / "plan.json", api.make_plan(PlanRequest(model=path, cluster="1x2:cpu-core", options=options))
        )
        request = ApplyRequest(plan=tmp_path / "plan.json", model=path, verify=True)
        outcomes.append(api.apply_plan(request).passed)
    assert outcomes == [True, False]
