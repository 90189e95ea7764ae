"""Custom rules: what a file may say, what a wrong one says back, and that the rule it makes is true."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.errors import CustomRuleError, UnsupportedGraphError
from tap_planner.operators import (
    CUSTOM_RULE,
    AttributeValue,
    ComputeKind,
    CustomRule,
    FactorKind,
    FactorRule,
    OperatorSignature,
    TensorType,
    load_custom_rules,
    record_of,
    rule_of,
    rule_to_text,
)
from tap_planner.operators.custom import OperandPattern, parse_pattern, rule_from_text
from tap_planner.operators.custom_files import parse_custom_rules
from tests.operators.operator_reference import Array, parts_of, shard, signature, tensor

ATTENTION = """\
operators:
  acme.ops::Attention:
    inputs: ["b s (h d)", "b t (h d)", "b t (h d)", "b 1 s t?"]
    outputs: ["b s (h d)"]
    factors: {d: fixed, t: fixed}
    sizes: {h: num_heads}
    kind: contraction
    flops: 2
    trainable: [1]
"""


def _rule(text: str) -> CustomRule:
    (rule,) = parse_custom_rules(text, file="rules.yaml")
    return rule


def _one(body: str, type: str = "acme.ops::F") -> CustomRule:
    """A rule from its keys, one a line."""
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    return _rule(f"operators:\n  {type}:\n{lines}")


def _applied(
    rule: CustomRule,
    *inputs: TensorType | None,
    attributes: Mapping[str, AttributeValue] | None = None,
    num_outputs: int = 1,
) -> OperatorSignature:
    """The signature that the binder makes."""
    everything = {**(attributes or {}), CUSTOM_RULE: rule_to_text(rule)}
    bare = OperatorSignature(
        type=rule.type,
        attributes=tuple(sorted(everything.items())),
        inputs=inputs,
        outputs=(),
    )
    return replace(bare, outputs=record_of(bare).infer(bare, num_outputs))


# -- what a file may say -----------------------------------------------------------------------------------------


def test_defaults() -> None:
    """In every output: parallel; in none: sum; in some, twice in one operand, or in no operand: fixed."""
    rule = _one('inputs: ["a b c", "k k"]\noutputs: ["a b n", "a"]\nsizes: {n: 3}')
    kinds = {name: kind.value for name, kind in rule.factors}
    assert kinds == {"a": "parallel", "b": "fixed", "c": "sum", "k": "fixed", "n": "fixed"}
    assert rule.kind is ComputeKind.MEMORY
    assert (rule.saved_inputs, rule.saved_outputs, rule.trainable, rule.differentiable) == ((0, 1), (0, 1), (), None)


def test_everything_can_be_said() -> None:
    """Every key arrives in the rule."""
    rule = _one(
        'inputs: ["b k", "k n", "n?", null]\noutputs: ["b n", "b"]\nfactors: {n: fixed}\nsizes: {n: width, b: 4}\n'
        "linear: [[P, R, P, R], [R, P, P, R]]\nadditive: [2]\nkind: contraction\nflops: 3\nsaved_inputs: [1, 0]\n"
        "saved_outputs: []\ntrainable: [1, 2]\ndifferentiable: [0, 1, 2]\ndtype: [null, int64]\noverride: true"
    )
    assert rule == CustomRule(
        type="acme.ops::F",
        inputs=(parse_pattern("b k"), parse_pattern("k n"), parse_pattern("n?"), None),
        outputs=(parse_pattern("b n"), parse_pattern("b")),
        factors=(("b", FactorKind.PARALLEL), ("k", FactorKind.SUM), ("n", FactorKind.FIXED)),
        sizes=(("b", 4), ("n", "width")),
        linear=(("P", "R", "P", "R"), ("R", "P", "P", "R")),
        additive=(2,),
        kind=ComputeKind.CONTRACTION,
        flops=3,
        saved_inputs=(0, 1),
        saved_outputs=(),
        trainable=(1, 2),
        differentiable=(0, 1, 2),
        dtypes=(None, "int64"),
        override=True,
    )
    assert rule.source == "rules.yaml:2"
    assert rule_from_text(rule_to_text(rule)) == rule


_NAMES = st.sampled_from(["b", "s", "h2", "_x", "Long_name"])
_DIMS = st.one_of(st.just(()), st.tuples(_NAMES), st.lists(_NAMES, min_size=2, max_size=3).map(tuple))


@given(st.lists(_DIMS, max_size=4), st.booleans())
def test_expressions_survive_writing(dims: list[tuple[str, ...]], optional: bool) -> None:
    """What an expression prints is read back as the same."""
    pattern = OperandPattern(dims=tuple(dims), optional=optional)
    assert parse_pattern(str(pattern)) == pattern


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("b (h d", "'\\(' is not closed"),
        ("b h)", "'\\)' closes nothing"),
        ("((a b))", "parentheses stand inside parentheses"),
        ("b ()", "write 1 for a dim of size 1"),
        ("b? s", "'\\?' stands at the very end"),
        ("b 2", "'2' is no factor"),
        ("b, s", "',' is no factor"),
        ("b (1 d)", "'1' is no factor"),
        ("none s", "'none' is the name of a strategy"),
    ],
)
def test_wrong_expressions(text: str, why: str) -> None:
    """Each slip in an expression is told with its place in the file."""
    with pytest.raises(CustomRuleError, match=why) as caught:
        _one(f'inputs: ["b", "{text}"]\noutputs: ["b"]')
    assert caught.value.message.startswith("rules.yaml:3: operators.acme.ops::F.inputs[1]: ")
    assert caught.value.hint


@pytest.mark.parametrize(
    ("body", "line", "message"),
    [
        ("outputs: [b]", 2, "the key 'inputs' is missing"),
        ("inputs: [b]\noutputs: [b]\nfactor: {b: sum}", 5, "unknown key 'factor' (did you mean 'factors'?)"),
        ("inputs: [b]\noutputs: [b]\ninputs: [b]", 5, "the key 'inputs' occurs twice, first in line 3"),
        ("inputs: b\noutputs: [b]", 3, "inputs: 'b' found, expected a list"),
        ("inputs: [[b]]\noutputs: [b]", 3, "inputs[0]: a list found, expected an expression as 'b s (h d)', or null"),
        ("inputs: [b]\noutputs: [null]", 4, "outputs[0]: null found, expected an expression"),
        ("inputs: [b]\noutputs: ['b?']", 4, "outputs[0]: 'b?' is optional, expected '?' at operands only"),
        ("inputs: [b]\noutputs: [b]\nfactors: {b: paralel}", 5, "factors.b: 'paralel' found, expected parallel or sum"),
        (
            "inputs: [bat]\noutputs: [bat]\nfactors:\n  bta: fixed",
            6,
            "factors.bta: no such factor in inputs and outputs",
        ),
        ("inputs: [b]\noutputs: [b]\nfactors: {b: sum}", 5, "factors.b: sum found, but an output holds the factor"),
        ("inputs: [b k]\noutputs: [b]\nfactors: {k: parallel}", 5, "factors.k: parallel found, but output 0 does not"),
        ("inputs: [b b]\noutputs: [b]\nfactors: {b: parallel}", 5, "factors.b: parallel found, but the factor occurs"),
        ("inputs: [b]\noutputs: [b c]", 2, "sizes: the size of factor 'c' is not determined: it occurs in no operand"),
        ("inputs: [(h d)]\noutputs: [h d]", 2, "the size of factor 'h' is not determined: it occurs only together"),
        ("inputs: [b]\noutputs: [b]\nsizes: {c: 8}", 5, "sizes.c: no such factor"),
        ("inputs: [b]\noutputs: [b]\nsizes: {b: 0}", 5, "sizes.b: '0' found, expected a whole number from 1"),
        ("inputs: [b]\noutputs: [b]\nsizes: {b: -4}", 5, "sizes.b: '-4' found, expected a whole number from 1"),
        ("inputs: [b]\noutputs: [b]\nlinear: [[P, R]]", 5, "linear[0]: [P, R] found, expected P or R"),
        ("inputs: [b]\noutputs: [b]\nlinear: [[R]]", 5, "linear[0]: [R] found, expected at least one P"),
        ("inputs: [b]\noutputs: [b]\nlinear: [[Q]]", 5, "'Q' found, expected P or R"),
        ("inputs: [b]\noutputs: [b]\nadditive: [1]", 5, "additive: 1 found, expected positions from 0 to 0"),
        ("inputs: [b]\noutputs: [b]\ntrainable: [-1]", 5, "'-1' found, expected a whole number from 0 to 255"),
        ("inputs: [b]\noutputs: [b]\nsaved_inputs: [0, 0]", 5, "saved_inputs: [0, 0] found, expected each"),
        ("inputs: [b]\noutputs: [b]\nkind: contract", 5, "kind: 'contract' found, expected contraction or"),
        ("inputs: [b]\noutputs: [b]\nflops: 2", 5, "flops: given for kind memory"),
        ("inputs: [b]\noutputs: [b]\ndtype: flaot32", 5, "dtype: 'flaot32' found"),
        ("inputs: [b]\noutputs: [b]\ndtype: [int64, int64]", 5, "dtype: 2 element types found"),
        ("inputs: ['b?']\noutputs: [b]\nsizes: {b: 8}", 2, "dtype: missing, and operand 0"),
        ("inputs: [b]\noutputs: [b]\noverride: yes", 5, "override: 'yes' found, expected true or false"),
        ("inputs: [&x b]\noutputs: [b]", 3, "YAML anchors and aliases are not accepted"),
    ],
)
def test_wrong_files(body: str, line: int, message: str) -> None:
    """Every slip is one line that names file, line, key, what was found and what was expected."""
    with pytest.raises(CustomRuleError) as caught:
        _one(body)
    assert caught.value.message.startswith(f"rules.yaml:{line}: ")
    assert message in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "rules.yaml:1: the file is empty, expected the key operators"),
        ("operator: {}", "rules.yaml:1: operator: unknown key 'operator' (did you mean 'operators'?)"),
        ("operators: {}", "rules.yaml:1: operators: no rule found"),
        ("operators:\n  a b: {inputs: [b], outputs: [b]}", "rules.yaml:2: operators.a b: 'a b' is no operator type"),
        ("operators:\n\tx", "not valid YAML"),
        ("operators:\n  Relu: {inputs: [b], outputs: [b]}", "rules.yaml:2: operators.Relu: Relu has a built-in rule"),
    ],
)
def test_wrong_documents(text: str, message: str) -> None:
    """The same for the file as a whole; a rule for a known type must say that it overrides."""
    with pytest.raises(CustomRuleError) as caught:
        parse_custom_rules(text, file="rules.yaml")
    assert message in caught.value.message


def test_files(tmp_path: Path) -> None:
    """Files are read in order; an absent one and two rules for one type are refused, with both places."""
    for name, type in (("a", "x::A"), ("b", "x::B"), ("c", "x::A")):
        (tmp_path / f"{name}.yaml").write_text(f"operators:\n  {type}: {{inputs: [b], outputs: [b]}}\n")
    rules = load_custom_rules([tmp_path / "b.yaml", tmp_path / "a.yaml"])
    assert [rule.type for rule in rules] == ["x::B", "x::A"]
    with pytest.raises(CustomRuleError, match=r"c\.yaml:2: operators\.x::A: there is a rule in .*a\.yaml:2 already"):
        load_custom_rules([tmp_path / "a.yaml", tmp_path / "c.yaml"])
    with pytest.raises(CustomRuleError, match=r"d\.yaml: the file of custom rules cannot be read: No such file"):
        load_custom_rules([tmp_path / "d.yaml"])


# -- a rule on an operator ---------------------------------------------------------------------------------------


def test_shapes_follow_from_the_operands() -> None:
    """Sizes come from attributes, constants and dims; outputs are their products; the type is operand 0's."""
    sig = _applied(
        _rule(ATTENTION),
        tensor(2, 5, 12),
        tensor(2, 7, 12),
        tensor(2, 7, 12),
        tensor(2, 1, 5, 7),
        attributes={"num_heads": 3},
    )
    assert sig.outputs == (tensor(2, 5, 12),)
    sizes = {factor.name: factor.size for factor in rule_of(sig).factors}
    assert sizes == {"b": 2, "s": 5, "h": 3, "d": 4, "t": 7, "*flops": 2}
    doubled = _one('inputs: ["(two s)"]\noutputs: ["s", "s n"]\nsizes: {two: 2, n: 6}\ndtype: [null, int64]')
    assert _applied(doubled, tensor(8), num_outputs=2).outputs == (tensor(4), tensor(4, 6, dtype="int64"))


@pytest.mark.parametrize(
    ("inputs", "heads", "message"),
    [
        ([(2, 5, 12)], 3, "operand 1 is absent, expected 'b t (h d)'"),
        ([(2, 5, 12), (2, 7, 12), (2, 84)], 3, "operand 2 has shape [2, 84], expected 3 dims as 'b t (h d)'"),
        ([(2, 5, 12), (3, 7, 12), (2, 7, 12)], 3, "operand 1, dim 0 of 'b t (h d)' has size 3, expected b=2"),
        ([(2, 5, 12), (2, 7, 12), (2, 7, 15)], 3, "operand 2, dim 2 of 'b t (h d)' has size 15, expected h=3 x d=4"),
        ([(2, 5, 12), (2, 7, 12), (2, 7, 12)], 5, "operand 0, dim 2 of 'b s (h d)' has size 12, expected a multiple"),
        ([(2, 5, 12)] * 2 + [(2, 5, 12), (2, 3, 5, 5)], 3, "operand 3, dim 1 of 'b 1 s t?' has size 3, expected 1"),
        ([(2, 5, 12)] * 5, 3, "5 operands found, the rule describes 4"),
        ([(2, 5, 12)] * 3, None, "factor 'h': its size is attribute 'num_heads', which is absent, expected an integer"),
        ([(2, 5, 12)] * 3, 1.5, "factor 'h': its size is attribute 'num_heads', which is 1.5, expected an integer"),
    ],
)
def test_operands_that_do_not_fit(inputs: list[tuple[int, ...]], heads: float | None, message: str) -> None:
    """The operand, what was got and what the rule expects are named."""
    attributes: dict[str, AttributeValue] = {} if heads is None else {"num_heads": heads}
    with pytest.raises(UnsupportedGraphError) as caught:
        _applied(_rule(ATTENTION), *(tensor(*shape) for shape in inputs), attributes=attributes)
    assert caught.value.message.startswith(message)
    assert caught.value.hint


def test_broadcasting_is_written_out() -> None:
    """A dim of 1 where the rule has a factor is no silent broadcast."""
    rule = _one('inputs: ["b s", "b s"]\noutputs: ["b s"]')
    with pytest.raises(UnsupportedGraphError, match="operand 1, dim 0 of 'b s' has size 1, expected b=4") as caught:
        _applied(rule, tensor(4, 8), tensor(1, 8))
    assert "Write 1 in the rule" in caught.value.hint


def test_operands_always_absent() -> None:
    """An operand that the rule calls always absent must be so; outputs that it does not describe are refused."""
    rule = _one('inputs: ["b", null, "b?"]\noutputs: ["b"]')
    assert _applied(rule, tensor(4), None, tensor(4)).outputs == (tensor(4),)
    assert _applied(rule, tensor(4)).outputs == (tensor(4),)
    with pytest.raises(UnsupportedGraphError, match=r"operand 1 has shape \[4\], the rule says"):
        _applied(rule, tensor(4), tensor(4))
    with pytest.raises(UnsupportedGraphError, match="2 outputs found, the rule describes 1"):
        _applied(rule, tensor(4), num_outputs=2)


@pytest.mark.parametrize(
    ("body", "builtin"),
    [
        (
            "inputs: ['b0 m k', 'b0 k n']\noutputs: ['b0 m n']\nlinear: [[P, R], [R, P]]\nkind: contraction",
            signature("MatMul", tensor(2, 3, 4), tensor(2, 4, 5)),
        ),
        (
            "inputs: [m k, k n, 'n?']\noutputs: [m n]\nlinear: [[P, R, P], [R, P, P]]\nadditive: [2]\n"
            "kind: contraction\ntrainable: [0, 1, 2]",
            signature("Gemm", tensor(4, 6), tensor(6, 8), tensor(8)),
        ),
        (
            "inputs: [m k, k n]\noutputs: [m n]\nlinear: [[P, R], [R, P]]",
            signature("Einsum", tensor(4, 6), tensor(6, 8), equation="mk,kn->mn"),
        ),
    ],
    ids=["MatMul", "Gemm", "Einsum"],
)
def test_rules_written_out_equal_the_built_in_ones(body: str, builtin: OperatorSignature) -> None:
    """The rule of a product, written by hand, is the built-in one (whose truth is tested against onnx)."""
    sig = _applied(_one(body), *builtin.inputs)
    mine, known = rule_of(sig), rule_of(builtin)
    assert sig.outputs == builtin.outputs
    assert _by_name(mine) == _by_name(known)
    assert (mine.additive, mine.partial) == (known.additive, known.partial)


def _by_name(rule: FactorRule) -> tuple[object, ...]:
    names = [factor.name for factor in rule.factors]
    held = [
        None if dims is None else [tuple(names[factor] for factor in dim) for dim in dims]
        for dims in (*rule.inputs, *rule.outputs)
    ]
    return {factor.name: (factor.size, factor.kind) for factor in rule.factors}, held


def _attention(query: Array, key: Array, value: Array, width: int) -> Array:
    """Attention by its definition; heads are counted from the width of one."""
    batch, queries, hidden = query.shape
    heads = [x.reshape(batch, x.shape[1], hidden // width, width).swapaxes(1, 2) for x in (query, key, value)]
    scores = np.exp(heads[0] @ heads[1].swapaxes(2, 3) / math.sqrt(width))
    result = scores / scores.sum(-1, keepdims=True) @ heads[2]
    return result.swapaxes(1, 2).reshape(batch, queries, hidden)


def test_split_factors_of_a_rule_are_true() -> None:
    """Attention on parts of each factor that the rule calls parallel is the part of the whole (numpy, by hand)."""
    rng = np.random.default_rng(0)
    operands = [rng.normal(size=(4, length, 12)) for length in (6, 5, 5)]
    sig = _applied(_rule(ATTENTION), *(tensor(*x.shape) for x in operands), attributes={"num_heads": 3})
    rule, whole = rule_of(sig), _attention(operands[0], operands[1], operands[2], 4)
    split = [index for index, factor in enumerate(rule.factors) if factor.kind is FactorKind.PARALLEL]
    assert [rule.factors[index].name for index in split] == ["b", "s", "h"]
    for factor in split:
        for part in parts_of(rule.factors[factor].size, 2):
            local = [shard(rule, dims or (), x, factor, part) for dims, x in zip(rule.inputs, operands, strict=True)]
            result = _attention(local[0], local[1], local[2], 4)
            np.testing.assert_allclose(result, shard(rule, rule.outputs[0], whole, factor, part), rtol=1e-12)


def test_integers_are_not_summed() -> None:
    """Where a result is an integer tensor a sum is fixed and nothing is linear."""
    rule = _one("inputs: [b k]\noutputs: [b]\nlinear: [[P]]\ndtype: int64")
    made = rule_of(_applied(rule, tensor(4, 6)))
    assert [factor.kind for factor in made.factors] == [FactorKind.PARALLEL, FactorKind.FIXED]
    assert made.partial == ()


def test_the_record() -> None:
    """Cost, saved values, weights and gradients are what the rule says; another rule is another record."""
    sig = _applied(_rule(ATTENTION), *(tensor(2, 5, 12),) * 3, attributes={"num_heads": 3})
    record = record_of(sig)
    assert record.known
    assert record.kind is ComputeKind.CONTRACTION
    assert (record.saved_inputs, record.saved_outputs, record.trainable_operands) == ((0, 1, 2, 3), (), (1,))
    assert math.prod(factor.size for factor in rule_of(sig).factors) == 2 * (2 * 5 * 5 * 12)
    assert not record_of(replace(sig, attributes=(("num_heads", 3),))).known


def test_outputs_that_nobody_wants_are_not_saved() -> None:
    """An operator with fewer outputs than the rule describes saves none that is not there."""
    rule = _one("inputs: [b]\noutputs: [b, b]")
    assert record_of(_applied(rule, tensor(4))).saved_outputs == (0,)
    assert record_of(_applied(rule, tensor(4), num_outputs=2)).saved_outputs == (0, 1)
