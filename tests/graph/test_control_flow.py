"""Branches, loops, sequences and optionals: unfolded where their course is known, whole where it is not."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from tap_planner.errors import ApplyError, UnsupportedGraphError, UsageError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind, run_body
from tests.graph.executing import assert_equal_outputs, outputs_of
from tests.graph.models import saved, text_model

X = np.random.default_rng(0).normal(size=(2, 4)).astype(np.float32)

LOOP = """g (float[2,4] x{inputs}) => (float[2,4] y, float[k,2,4] s)
    <float[4] w = {{1, 2, 3, 4}}, bool t = {{1}}, int64 n0 = {{0}}, int64 n1 = {{1}}, int64 n3 = {{3}},
     int64 n200 = {{200}}> {{
    y, s = Loop ({count}, t, x) <body = b (int64 i, bool ci, float[2,4] a) => (bool co, float[2,4] o, float[2,4] so) {{
        co = {condition}
        v = Constant <value = float[4] {{0.5, 0.25, 0.125, 0.1}}> ()
        f = Cast <to = 1> (i)
        p = Mul (a, w)
        q = Mul (p, v)
        o = Add (q, f)
        so = Identity (q)
    }}>
}}"""
SCAN = """g (float[2,4] x, float[4,2] h) => (float[2,4] y, float[4,3,2] z)
    <float[4,3] k = {1,2,3,4,5,6,7,8,9,10,11,12}> {
    y, z = Scan <num_scan_inputs = 1, scan_input_axes = [1], scan_input_directions = [1], scan_output_axes = [2],
                 scan_output_directions = [1],
                 body = b (float[2,4] s, float[4] r) => (float[2,4] so, float[4,3] q) {
        so = Add (s, r)
        m = ReduceMax <keepdims = 0> (so)
        q = Mul (k, m)
    }> (x, h)
}"""
BRANCHES = """g (float[2,4] x, bool c) => (float[2,4] y) {
    y = If (c) <then_branch = t () => (float[2,4] a) <float[4] w = {1, 2, 3, 4}> { b = Mul (x, w)  a = Relu (b) },
                else_branch = e () => (float[2,4] a) { a = Neg (x) }>
}"""
RATES = """g (float[batch,samples] x, int64 sr) => (float[p,q,r] y)
    <int64 k16 = {16000}, int64[3] s16 = {2, -1, 8}, int64[3] s8 = {1, -1, 5}> {
    c = Equal (sr, k16)
    [rate] y = If (c) <then_branch = t () => (float[a] t) { t = Reshape (x, s16) },
                       else_branch = e () => (float[a] e) { e = Reshape (x, s8) }>
}"""


def _loop(*, count: str = "n3", condition: str = "Identity (ci)", inputs: str = "") -> str:
    return LOOP.format(count=count, condition=condition, inputs=inputs)


def _shape(graph: Graph) -> tuple[int, ...]:
    return graph.tensors[graph.outputs[0]].type.shape


def test_a_branch_is_chosen_by_the_value_of_an_input(tmp_path: Path) -> None:
    """With the value the branch is taken, the other one may be impossible; without it the error offers the value."""
    model = text_model(tmp_path, RATES)
    dims = {"batch": 2, "samples": 16}
    graph = bind(model, BindOptions(dims=dims, values={"sr": 16000}))
    assert [operator.type for operator in graph.operators] == ["Reshape"]
    assert _shape(graph) == (2, 2, 8)
    with pytest.raises(UnsupportedGraphError, match=r"'rate' \(If\).* input 'sr'.*'y'") as caught:
        bind(model, BindOptions(dims=dims))
    assert caught.value.hint == "give the value: --value sr=16000"


@pytest.mark.parametrize(("condition", "rounds"), [("Identity (ci)", 3), ("Less (i, n1)", 2)])
def test_loops_of_a_known_number_of_rounds_are_unfolded(condition: str, rounds: int, tmp_path: Path) -> None:
    """The rounds follow each other, up to where a constant condition ends the loop; weights in the body are read."""
    model = text_model(tmp_path, _loop(condition=condition))
    graph = bind(model, BindOptions())
    kinds = [operator.type for operator in graph.operators]
    assert kinds.count("Mul") == 2 * rounds and "Loop" not in kinds
    assert_equal_outputs(model, graph, {"x": X})


def test_a_while_loop_ends_by_its_condition(tmp_path: Path) -> None:
    """Without a number of rounds the condition alone decides; onnxruntime agrees."""
    model = text_model(tmp_path, _loop(count="", condition="Less (i, n3)"))
    graph = bind(model, BindOptions())
    assert graph.tensors[graph.outputs[1]].type.shape == (4, 2, 4)
    assert_equal_outputs(model, graph, {"x": X})


@pytest.mark.parametrize("count", ["n0", "n200"])
def test_loops_with_no_or_many_rounds_stay_whole(count: str, tmp_path: Path) -> None:
    """They are one operator whose results have static shapes all the same, and it computes what onnxruntime does."""
    model = text_model(tmp_path, _loop(count=count))
    graph = bind(model, BindOptions())
    assert [operator.type for operator in graph.operators] == ["Loop"]
    assert_equal_outputs(model, graph, {"x": X})


def test_a_loop_on_data_needs_its_rounds(tmp_path: Path) -> None:
    """Its number of rounds, or the size of what it stacks up, has to be given; either way it runs."""
    model = text_model(tmp_path, _loop(count="n", inputs=", int64 n"))
    feeds = {"x": X, "n": np.array(5)}
    with pytest.raises(UnsupportedGraphError, match="how many rounds") as caught:
        bind(model, BindOptions())
    assert "--value n=N" in caught.value.hint
    whole, unfolded = bind(model, BindOptions(dims={"k": 5})), bind(model, BindOptions(values={"n": 5}))
    assert [operator.type for operator in whole.operators] == ["Loop"]
    assert "Loop" not in {operator.type for operator in unfolded.operators}
    (warning,) = whole.warnings
    assert re.search(r"'y' \(Loop\) stays one operator.*input 'n'.*all 6 nodes.*--value n=N", warning)
    for graph in (whole, unfolded):
        assert_equal_outputs(model, graph, feeds)
    with pytest.raises(ApplyError, match=r"shape \(4, 2, 4\), expected \(5, 2, 4\)"):
        outputs_of(model, whole, {"x": X, "n": np.array(4)})


@pytest.mark.parametrize("taken", [True, False])
def test_a_branch_on_data_stays_whole(taken: bool, tmp_path: Path) -> None:
    """Captured values, weights of the branches among them, are operands; both branches compute what they should."""
    model = text_model(tmp_path, BRANCHES)
    graph = bind(model, BindOptions())
    (operator,) = graph.operators
    assert {"x", "c", "w"} <= set(operator.inputs)
    assert graph.body(operator) is not None
    assert_equal_outputs(model, graph, {"x": X, "c": np.array(taken)})


@pytest.mark.parametrize("rows", [2, 200])
def test_scans_with_axes_and_directions(rows: int, tmp_path: Path) -> None:
    """Short scans are unfolded, long ones run as a whole; both as onnxruntime does."""
    model = text_model(tmp_path, SCAN.replace("[4,2] h", f"[4,{rows}] h").replace("[4,3,2] z", f"[4,3,{rows}] z"))
    graph = bind(model, BindOptions())
    assert ("Scan" in {operator.type for operator in graph.operators}) == (rows > 128)
    h = 0.1 * np.random.default_rng(1).normal(size=(4, rows)).astype(np.float32)
    assert_equal_outputs(model, graph, {"x": X, "h": h})


def test_control_flow_inside_control_flow(tmp_path: Path) -> None:
    """A branch in each round whose condition follows from the round's number, with a loop in one of them."""
    model = text_model(
        tmp_path,
        """g (float[2,4] x) => (float[2,4] y) <int64 c3 = {3}, bool t = {1}, int64 c1 = {1}> {
            y = Loop (c3, t, x) <body = b (int64 i, bool ci, float[2,4] a) => (bool co, float[2,4] o) {
                co = Identity (ci)
                e = Equal (i, c1)
                o = If (e) <then_branch = p () => (float[2,4] q) {
                    q = Loop (c3, t, a) <body = bb (int64 j, bool cj, float[2,4] d) => (bool ck, float[2,4] f) {
                        ck = Identity (cj)
                        f = Add (d, x)
                    }>
                }, else_branch = r () => (float[2,4] q) { q = Neg (a) }>
            }>
        }""",
    )
    graph = bind(model, BindOptions())
    assert [operator.type for operator in graph.operators] == ["Neg", "Add", "Add", "Add", "Neg"]
    assert_equal_outputs(model, graph, {"x": X})


def test_equal_bodies_are_one(tmp_path: Path) -> None:
    """Two loops that differ in names alone carry the same body, so that they can fold; another body is another."""
    body = """body = b{0} (int64 i{0}, bool ci{0}, float[2,4] a{0}) => (bool co{0}, float[2,4] o{0}) {{
        co{0} = Identity (ci{0})
        p{0} = {1} (a{0})
        o{0} = Add (p{0}, x) }}"""
    text = "g (float[2,4] x, int64 n) => (float[2,4] y) <bool t = {{1}}> {{ v = Neg (x)\n {0} }}"
    names = ("v", "v0", "v1", "y")

    def graph(*kinds: str) -> Graph:
        nodes = [
            f"{names[index + 1]} = Loop (n, t, {names[index]}) <{body.format(index, kind)}>"
            for index, kind in enumerate(kinds)
        ]
        return bind(text_model(tmp_path, text.format("\n".join(nodes))), BindOptions())

    equal, other = graph("Tanh", "Tanh", "Tanh"), graph("Tanh", "Tanh", "Relu")
    assert len({operator.signature for operator in equal.operators[1:]}) == len(equal.bodies) == 1
    assert len({operator.signature for operator in other.operators[1:]}) == len(other.bodies) == 2
    assert equal.digest != other.digest


def test_a_body_computes_in_double(tmp_path: Path) -> None:
    """Asked for float64, no cast inside the body falls back to float32."""
    model = text_model(tmp_path, _loop(count="n200"))
    graph = bind(model, BindOptions())
    (operator,) = graph.operators
    body = graph.body(operator)
    assert body is not None
    feeds = [np.array(200), np.array(True), X.astype(np.float64)]
    values = {"w": np.array([1.0, 2, 3, 4]), "v": np.array([0.5, 0.25, 0.125, 0.1], np.float32).astype(np.float64)}
    rest = [values[str(name)] for name in operator.inputs[3:]]
    result = run_body(body, [*feeds, *rest], wide=True)
    assert result[0].dtype == np.float64
    expected = X.astype(np.float64)
    for index in range(200):
        expected = expected * values["w"] * values["v"] + index
    np.testing.assert_allclose(result[0], expected, rtol=1e-14)


def test_training_through_a_body_is_refused(tmp_path: Path) -> None:
    """A gradient cannot go through control flow on data; the error names the node and the way out, which works."""
    weights = ", ".join(str(0.1 * index) for index in range(16))
    model = text_model(
        tmp_path,
        f"""g (float[2,4] x, int64 n) => (float[2,4] y) <float[4,4] w = {{{weights}}}, bool t = {{1}}> {{
            a = MatMul (x, w)
            y = Loop (n, t, a) <body = b (int64 i, bool ci, float[2,4] v) => (bool co, float[2,4] o) {{
                co = Identity (ci)
                o = Tanh (v)
            }}>
        }}""",
    )
    options = BindOptions(training=True, loss=LossOptions(kind="mean"))
    with pytest.raises(UnsupportedGraphError, match=r"'y' \(Loop\): training needs a gradient of 'a'") as caught:
        bind(model, options)
    assert "--value n=N" in caught.value.hint
    assert bind(model, BindOptions(values={"n": 3}, training=True, loss=LossOptions(kind="mean"))).loss is not None
    assert bind(model, BindOptions(training=True, loss=LossOptions(kind="mean"), freeze=("w",))).loss is not None


def test_a_loop_whose_shapes_grow_names_its_node(tmp_path: Path) -> None:
    """What a round changes the shape of has no static shape."""
    model = text_model(
        tmp_path,
        """g (float[2,4] x, int64 n) => (float[p,4] y) <bool t = {1}> {
            [grow] y = Loop (n, t, x) <body = b (int64 i, bool ci, float[q,4] a) => (bool co, float[r,4] o) {
                co = Identity (ci)
                o = Concat <axis = 0> (a, x)
            }>
        }""",
    )
    with pytest.raises(UnsupportedGraphError, match=r"'grow' \(Loop\).*\[2, 4\] to \[4, 4\]"):
        bind(model, BindOptions())
    graph = bind(model, BindOptions(values={"n": 3}))
    assert _shape(graph) == (8, 4)


def test_control_flow_on_data_is_not_rebatched(tmp_path: Path) -> None:
    """A body may mix the samples of a batch, so that a file with a fixed batch of one stays at one."""
    model = text_model(tmp_path, BRANCHES.replace("[2,4]", "[1,4]"))
    assert bind(model, BindOptions()).batch == 1
    with pytest.raises(UnsupportedGraphError, match=r"\(If\): the model's batch is fixed at 1"):
        bind(model, BindOptions(batch=3))
    graph = bind(model, BindOptions(batch=3, values={"c": 1}))
    assert _shape(graph) == (3, 4)


SEQUENCES = {
    "build": """a = Relu (x)
        s = SequenceConstruct (x, a)
        b = Neg (x)
        t = SequenceInsert (s, b, last)
        u = SequenceErase (t)
        m = SequenceMap (u) <body = q (float[2,4] e) => (float[2,4] f) { f = Exp (e) }>
        v = Identity (m)
        y = ConcatFromSequence <axis = 0> (v)""",
    "stack": """e = SequenceEmpty ()
        s = SequenceInsert (e, x)
        t = SequenceInsert (s, x, first)
        y = ConcatFromSequence <axis = -1, new_axis = 1> (t)""",
    "split": """s = SplitToSequence <axis = 1, keepdims = 0> (x)
        y = SequenceAt (s, last)""",
    "length": """s = SplitToSequence <axis = 1> (x, three)
        y = SequenceLength (s)""",
    "optional": """o = Optional (x)
        h = OptionalHasElement (o)
        y = If (h) <then_branch = p () => (float[2,4] r) { r = OptionalGetElement (o) },
                    else_branch = q () => (float[2,4] r) { r = Neg (x) }>""",
}


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences_are_lists_of_tensors(name: str, tmp_path: Path) -> None:
    """Sequences and optionals of known items leave nothing but operators on tensors."""
    head = "g (float[2,4] x) => ({} y) <int64 first = {{0}}, int64 last = {{-1}}, int64 three = {{3}}> {{ {} }}"
    model = text_model(tmp_path, head.format("int64" if name == "length" else "float[p]", SEQUENCES[name]), opset=18)
    model.proto.graph.output[0].type.tensor_type.ClearField("shape")
    model = saved(tmp_path, model.proto)
    graph = bind(model, BindOptions())
    assert not any("Sequence" in operator.type or "Optional" in operator.type for operator in graph.operators)
    assert_equal_outputs(model, graph, {"x": X})


def test_sequences_at_the_border_are_refused(tmp_path: Path) -> None:
    """A sequence as an input or an output is named with its type; so is a position that depends on data."""
    given = text_model(tmp_path, "g (seq(float[4]) p) => (float y) <int64 i = {0}> { y = SequenceAt (p, i) }")
    with pytest.raises(UnsupportedGraphError, match="input 'p' is a sequence of float32 tensors"):
        bind(given, BindOptions())
    made = text_model(tmp_path, "g (float[4] p) => (seq(float[4]) y) { y = SequenceConstruct (p, p) }")
    with pytest.raises(UnsupportedGraphError, match="'y', a sequence of 2 tensors"):
        bind(made, BindOptions())
    picked = text_model(
        tmp_path, "g (float[4] p, int64 i) => (float y) { s = SequenceConstruct (p, p)\n y = SequenceAt (s, i) }"
    )
    with pytest.raises(UnsupportedGraphError, match="position 'i' in a sequence depends on the data"):
        bind(picked, BindOptions())
    with pytest.raises(UnsupportedGraphError, match="position 7 in a sequence of 2"):
        bind(picked, BindOptions(values={"i": 7}))
    assert bind(picked, BindOptions(values={"i": 1})).operators == ()


NONZERO = """g (float[4,6] x) => (float[k] y, float[m] z) {
    n = NonZero (x)
    t = Transpose <perm = [1, 0]> (n)
    y = GatherND (x, t)
    r = Relu (x)
    n2 = NonZero (r)
    t2 = Transpose <perm = [1, 0]> (n2)
    g2 = GatherND (r, t2)
    z = Concat <axis = 0> (g2, g2)
}"""


def test_sizes_that_depend_on_data_follow_from_declared_dims(tmp_path: Path) -> None:
    """A declared dim is traced back to the count that it depends on, through three operators and a factor of two."""
    model = text_model(tmp_path, NONZERO)
    x = np.random.default_rng(2).normal(size=(4, 6)).astype(np.float32)
    positive = int((x > 0).sum())
    with pytest.raises(UnsupportedGraphError, match=r"'n' \(NonZero\).*depends on the data") as caught:
        bind(model, BindOptions())
    assert "--dim k=N" in caught.value.hint and "--dim n.1=N" in caught.value.hint
    for dims in ({"k": 24, "m": 2 * positive}, {"k": 24, "n2.1": positive}, {"n.1": 24, "n2.1": positive}):
        graph = bind(model, BindOptions(dims=dims))
        assert len([text for text in graph.warnings if "planned for exactly" in text]) == 2
        assert_equal_outputs(model, graph, {"x": x})
    with pytest.raises(UnsupportedGraphError, match=r"'n2' \(NonZero\)"):
        bind(model, BindOptions(dims={"k": 24}))
    with pytest.raises(UsageError, match="--dim m=21: no number of elements of 'n2'"):
        bind(model, BindOptions(dims={"k": 24, "m": 21}))
    with pytest.raises(ApplyError, match="'n2' selects"):
        outputs_of(model, bind(model, BindOptions(dims={"k": 24, "m": 2})), {"x": x})


def test_subgraphs_without_their_graph_are_refused(tmp_path: Path) -> None:
    """A damaged If is named, not a traceback."""
    model = text_model(tmp_path, "g (float[2] x) => (float[2] y) <bool c = {1}> { y = Neg (x) }").proto
    model.graph.node[0].CopyFrom(helper.make_node("If", ["c"], ["y"]))
    with pytest.raises(UnsupportedGraphError, match="then_branch"):
        bind(saved(tmp_path, model), BindOptions())


def test_branches_nest_as_deep_as_files_can(tmp_path: Path) -> None:
    """Thirty branches inside each other, about what the file format holds, are unfolded without recursion."""
    outputs = [helper.make_tensor_value_info("o", TensorProto.FLOAT, [2])]
    graph = helper.make_graph([helper.make_node("Neg", ["x"], ["o"])], "inner", [], outputs)
    for level in range(30):
        node = helper.make_node("If", ["c"], ["o"], then_branch=graph, else_branch=helper.make_graph([], "e", [], []))
        graph = helper.make_graph([node], f"level{level}", [], outputs)
    main = helper.make_graph(
        list(graph.node),
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [2])],
        outputs,
        [numpy_helper.from_array(np.array(True), "c")],
    )
    model = saved(tmp_path, helper.make_model(main, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert [operator.type for operator in bind(model, BindOptions()).operators] == ["Neg"]
