"""Sizes: symbols, shapes, values, what is derived, and what does not fit, in words."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.errors import UnboundDimError, UnsupportedGraphError, UsageError
from tap_planner.graph import BindOptions, bind
from tap_planner.graph.expressions import dim_names, evaluate_dim
from tap_planner.graph.polynomials import Polynomial, fitted, product, without_common
from tests.graph.models import text_model


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """Sizes that some node cannot work with."""

    graph: str
    dims: dict[str, int]
    says: str
    hint: str = ""
    more: dict[str, tuple[int, ...]] = field(default_factory=dict)


MISFITS = {
    "divisible": Misfit(
        graph="g (float[batch,heads] x) => (float[p,4] y) <int64[2] s = {-1, 4}> { [r] y = Reshape (x, s) }",
        dims={"batch": 3, "heads": 5},
        says="node 'r' (Reshape): needs batch*heads to be divisible by 4: batch=3, heads=5 gives 15",
        hint="choose other sizes: --dim batch=N --dim heads=N",
    ),
    "divisible by what is left": Misfit(
        graph="g (float[batch,seq,6] x) => (float y) <int64[2] s = {-1, 4}> { y = Reshape (x, s) }",
        dims={"batch": 3, "seq": 5},
        says="needs 3*batch*seq to be divisible by 2: batch=3, seq=5 gives 45",
    ),
    "fixed target": Misfit(
        graph="g (float[batch,seq,8] x) => (float y) <int64[2] s = {64, 4}> { y = Reshape (x, s) }",
        dims={"batch": 3, "seq": 16},
        says="needs batch*seq to be 32: batch=3, seq=16 gives 48",
    ),
    "target from another shape": Misfit(
        graph="""g (float[batch,seq] x, float[rows,8] z) => (float y) <int64 one = {1}, int64[1] a = {0}> {
            s = Shape <start = 0, end = 1> (z)
            m = Constant <value = int64[1] {-1}> ()
            t = Concat <axis = 0> (s, m)
            y = Reshape (x, t) }""",
        dims={"batch": 3, "seq": 5, "rows": 4},
        says="needs batch*seq to be divisible by rows: batch=3, rows=4, seq=5 gives 15 and 4",
    ),
    "sum of dims": Misfit(
        graph="""g (float[b,past] p, float[b,seq] x, float[b,total] m) => (float y) {
            k = Concat <axis = 1> (p, x)
            y = Add (k, m) }""",
        dims={"b": 2, "past": 4, "seq": 16, "total": 21},
        says="(Add): needs dim 1 to agree: past + seq = 20 (past=4, seq=16) against total=21",
        hint="choose other sizes: --dim past=N --dim seq=N --dim total=N",
    ),
    "concat": Misfit(
        graph="g (float[b,s] x, float[c,s] p) => (float y) { y = Concat <axis = 1> (p, x) }",
        dims={"b": 3, "c": 4, "s": 5},
        says="joins along dim 1, and needs dim 0 to agree: c=4 against b=3",
    ),
    "matmul": Misfit(
        graph="g (float[b,s] x, float[t,u] w) => (float y) { y = MatMul (x, w) }",
        dims={"b": 3, "s": 16, "t": 4, "u": 5},
        says="sums over s=16 against t=4",
    ),
    "split": Misfit(
        graph="g (float[b,s] x) => (float y, float z) <int64[2] p = {4, 8}> { y, z = Split <axis = 1> (x, p) }",
        dims={"b": 3, "s": 16},
        says="splits dim 1 into parts, and needs s to be 12: s=16",
        hint="choose other sizes: --dim s=N",
    ),
    "other operators": Misfit(
        graph="g (float[b,s,8] x, float[8,4] w) => (float y) { t = Transpose <perm = [1, 0, 2]> (x)\n"
        " y = LayerNormalization <axis = 1> (t, w) }",
        dims={"b": 3, "s": 16},
        says="operands are [s, b, 8] and [8, 4] for b=3, s=16",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_what_does_not_fit_is_said_in_dims(name: str, tmp_path: Path) -> None:
    """The message names the node, the dims that are involved and their values."""
    case = MISFITS[name]
    with pytest.raises(UnsupportedGraphError, match=re.escape(case.says)) as caught:
        bind(text_model(tmp_path, case.graph), BindOptions(dims=case.dims))
    assert caught.value.message.startswith("node ")
    assert case.hint in caught.value.hint


def test_missing_dims_come_with_near_misses(tmp_path: Path) -> None:
    """All dims without a value are listed; a name that the model does not have comes with what was meant."""
    model = text_model(tmp_path, "g (float[b,seq] x, float[batch,width] z) => (float y) { y = Relu (x) }")
    with pytest.raises(UnboundDimError, match="seq, batch, width") as caught:
        bind(model, BindOptions(dims={"b": 2}))
    assert caught.value.hint == "bind them: --dim seq=N --dim batch=N --dim width=N"
    with pytest.raises(UsageError, match="no dim 'widht'") as wrong:
        bind(model, BindOptions(dims={"b": 2, "seq": 3, "widht": 4}))
    assert wrong.value.hint == "did you mean width? (still without a value: batch, width)"


def test_inputs_without_rank_are_listed_with_the_dims(tmp_path: Path) -> None:
    """One error says all that is missing."""
    model = text_model(tmp_path, "g (float[b,4] x, float z) => (float y) { y = Add (x, z) }")
    model.proto.graph.input[1].type.tensor_type.ClearField("shape")
    with pytest.raises(UnboundDimError, match="value: b; graph input 'z' of no rank") as caught:
        bind(model, BindOptions())
    assert caught.value.hint == "bind them: --dim b=N --shape z=4,8"
    with pytest.raises(UsageError, match="'z' has no rank"):
        bind(model, BindOptions(dims={"b": 2, "z.0": 4}))
    assert bind(model, BindOptions(dims={"b": 2}, shapes={"z": (2, 4)})).tensor("z").type.shape == (2, 4)


def test_shapes_must_agree_with_the_file(tmp_path: Path) -> None:
    """--shape binds symbols like --dim does; what contradicts the file or another option is refused."""
    model = text_model(tmp_path, "g (float[b,4] x, float[b,s] z) => (float[b,s] y) { y = Relu (z) }")
    graph = bind(model, BindOptions(shapes={"x": (3, 4)}, dims={"s": 5}))
    assert graph.dims == {"b": 3, "s": 5}
    assert graph.tensor("z").type.shape == (3, 5)
    for options, words in (
        (BindOptions(shapes={"x": (3, 5)}, dims={"s": 5}), "size 5 for dim 1, which is 4"),
        (BindOptions(shapes={"x": (3,)}, dims={"s": 5}), "1 sizes, the input has 2 dims"),
        (BindOptions(shapes={"q": (3,)}), "no such input"),
        (BindOptions(shapes={"x": (3, 4)}, dims={"b": 2, "s": 5}), "'b' the size 3, but it is 2"),
        (BindOptions(shapes={"x": (3, 4), "z": (2, 5)}), "'b' the size 2, but it is 3"),
        (BindOptions(dims={"b": 2, "s": 5, "x.1": 5}), "dim 1 of input 'x' is 4 in the file"),
    ):
        with pytest.raises(UsageError, match=words):
            bind(model, options)


def test_a_size_of_zero_is_a_size(tmp_path: Path) -> None:
    """Zero is taken as it stands, with a note; bound, or in front of the first input with a batch, it is unknown."""
    model = text_model(tmp_path, "g (float[0,6] x) => (float y) { y = Relu (x) }")
    empty = bind(model, BindOptions())
    assert empty.tensor("x").type.shape == (0, 6)
    assert "--dim x.0=N" in empty.warnings[0]
    assert bind(model, BindOptions(dims={"x.0": 4})).tensor("x").type.shape == (4, 6)
    assert bind(model, BindOptions(batch=4)).tensor("x").type.shape == (4, 6)


def test_zero_and_minus_one_in_reshapes(tmp_path: Path) -> None:
    """0 copies a dim, with allowzero it is a zero; -1 is what is left."""
    model = text_model(
        tmp_path,
        """g (float[batch,6,8] x, float[2,0] e) => (float[batch,4,12] b, float[0,2] z)
        <int64[2] s1 = {0, -1}, int64[3] s2 = {0, 4, -1}, int64[2] s3 = {0, 2}> {
            a = Reshape (x, s1)
            c = Exp (a)
            b = Reshape (c, s2)
            z = Reshape <allowzero = 1> (e, s3) }""",
    )
    graph = bind(model, BindOptions(dims={"batch": 3}))
    assert graph.tensor("c").type.shape == (3, 48)
    assert [graph.tensors[name].type.shape for name in graph.outputs] == [(3, 4, 12), (0, 2)]


def test_derived_dims_are_not_asked_for_but_checked(tmp_path: Path) -> None:
    """A dim of an output follows from the inputs; given all the same, it must be what follows."""
    model = text_model(
        tmp_path, "g (float[b,past] p, float[b,seq] q) => (float[b,total] y) { y = Concat <axis = 1> (p, q) }"
    )
    dims = {"b": 2, "past": 5, "seq": 3}
    assert bind(model, BindOptions(dims=dims)).tensor("y").type.shape == (2, 8)
    assert bind(model, BindOptions(dims={**dims, "total": 8})).dims["total"] == 8
    with pytest.raises(UsageError, match="--dim total=9: with the other dims, 'y' has size 8"):
        bind(model, BindOptions(dims={**dims, "total": 9}))


def test_sums_of_dims_are_computed(tmp_path: Path) -> None:
    """Exporters name derived dims by expressions; only their symbols are asked for."""
    body = 'g (float[b,"past + 2*seq"] x, float[b,past] p) => (float y) { y = Concat <axis = 1> (x, p) }'
    model = text_model(tmp_path, body)
    with pytest.raises(UnboundDimError, match=r"value: past, seq$"):
        bind(model, BindOptions(dims={"b": 3}))
    graph = bind(model, BindOptions(dims={"b": 3, "past": 4, "seq": 2}))
    assert graph.tensor("x").type.shape == (3, 8)


@pytest.mark.parametrize(
    ("text", "size", "names"),
    [
        ("batch", 3, ()),
        ("past + seq", 9, ("past", "seq")),
        ("2*seq", 8, ("seq",)),
        ("(seq - 1)//2 + 1", 2, ("seq",)),
        ("Max(1, past)", 5, ("past",)),
        ("a.b + 1", 8, ("a.b",)),
        ("batch-size", 11, ()),
        ("seq-past", None, ()),
        ("past + other", None, ("past", "other")),
        ("__import__('os')", None, ("__import__", "os")),
        ("seq//0", None, ("seq",)),
        ("9**9**9", None, ()),
        ("past +", None, ()),
        ("(" * 150 + "seq" + ")" * 150, None, ()),
    ],
)
def test_expressions_of_dims(text: str, size: int | None, names: tuple[str, ...]) -> None:
    """Sums, products and the like of whole numbers, and nothing else."""
    dims = {"batch": 3, "past": 5, "seq": 4, "a.b": 7, "batch-size": 11}
    assert evaluate_dim(text, dims) == size
    assert dim_names(text) == names


def test_values_of_vectors(tmp_path: Path) -> None:
    """One number for all elements or one for each; a shape that is an input is given so."""
    model = text_model(tmp_path, "g (float[4,6] x, int64[2] s, bool c) => (float y) { [r] y = Reshape (x, s) }")
    with pytest.raises(UnsupportedGraphError, match=r"'r' \(Reshape\): operand 1 \('s'\).* input 's'") as caught:
        bind(model, BindOptions())
    assert caught.value.hint == "give the value: --value s=N,N"
    assert bind(model, BindOptions(values={"s": (8, 3)})).tensor("y").type.shape == (8, 3)
    for value, words in (((8, 3, 1), "3 numbers"), ((1 << 70, 1), "too large")):
        with pytest.raises(UsageError, match=words):
            bind(model, BindOptions(values={"s": value}))
    with pytest.raises(UsageError, match="not all are bool"):
        bind(model, BindOptions(values={"s": (8, 3), "c": 7}))


def test_shapes_from_data_name_the_inputs_behind_them(tmp_path: Path) -> None:
    """An operand that decides shapes is traced back to integer inputs; float inputs cannot be fixed."""
    model = text_model(
        tmp_path,
        """g (float[4,6] x, int64 n) => (float y) <int64[1] two = {2}, int64[1] ax = {0}> {
            u = Unsqueeze (n, ax)
            s = Concat <axis = 0> (two, u)
            [r] y = Reshape (x, s) }""",
    )
    with pytest.raises(UnsupportedGraphError, match="depends on input 'n'") as caught:
        bind(model, BindOptions())
    assert caught.value.hint == "give the value: --value n=N"
    floats = text_model(
        tmp_path, "g (float[4] x, float[2] f) => (float y) { s = Cast <to = 7> (f)\n y = Reshape (x, s) }"
    )
    with pytest.raises(UnsupportedGraphError, match="depends on input 'f'") as caught:
        bind(floats, BindOptions())
    assert "--value" not in caught.value.hint


_SIZES = st.dictionaries(st.sampled_from(["a", "b", "c"]), st.integers(1, 50), min_size=3, max_size=3)


@given(dims=_SIZES, factor=st.integers(1, 9), scaled=st.sets(st.sampled_from(["a", "b"])), added=st.booleans())
def test_fitted_sizes_hold_everywhere(dims: dict[str, int], factor: int, scaled: set[str], added: bool) -> None:
    """A polynomial learnt from three bindings gives the size for other values of the dims too."""

    def size(values: Mapping[str, int]) -> int:
        total = values["c"] + 3 if added else 1
        for name in scaled:
            total *= values[name]
        return factor * total

    changed = {name: (size({**dims, name: 2 * n}), size({**dims, name: 3 * n})) for name, n in dims.items()}
    found = fitted(size(dims), dims, changed)
    assert found is not None
    for values in itertools.product((1, 4, 7), repeat=3):
        other = dict(zip("abc", values, strict=True))
        assert found.value(other) == size(other)


def test_polynomials_are_shown_as_people_write_them() -> None:
    """Products, sums and powers, without what both sides share."""
    batch, seq = Polynomial.symbol("batch"), Polynomial.symbol("seq")
    assert str(product([batch, seq, Polynomial.constant(4)])) == "4*batch*seq"
    assert str(batch + seq + Polynomial.constant(-1)) == "batch + seq - 1"
    left, right = without_common(
        product([Polynomial.constant(6), batch, seq, seq]), product([Polynomial.constant(4), seq])
    )
    assert (str(left), str(right)) == ("3*batch*seq", "2")
    assert fitted(17, {"a": 3}, {"a": (17, 20)}) is None
