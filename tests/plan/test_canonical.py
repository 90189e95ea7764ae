"""The text of a plan: stable, strict, atomic; and its digests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest

from tap_planner.errors import PlanFormatError, UsageError
from tap_planner.plan import (
    Constraint,
    PlanDocument,
    PlanOptions,
    check_digests,
    compute_digests,
    from_text,
    read_plan,
    row_major_ranks,
    schema,
    to_text,
    with_digests,
    write_plan,
)
from tests.plan.plan_builders import add_shared, make_decisions, make_document, make_stack


@pytest.fixture(scope="module")
def document() -> PlanDocument:
    """A plan with variants, shared redistributions and every kind of option."""
    stack = make_stack(6, columns=(True, True, False, True, True, True))
    add_shared(stack)
    made = make_document(make_decisions(stack, bucket_of=(0, 0, 0, 1, 1, 2, 3, 4, 4, 4, 4, 4)), stack.reads)
    options = PlanOptions(
        batch=8,
        precision="fp32",
        loss="mean",
        loss_output="y",
        zero=1,
        mesh="dp=2,tp=2",
        max_memory_bytes=1 << 30,
        constraints=(
            Constraint(kind="batch", axis="tp", forbid=True),
            Constraint(kind="operator", pattern="h.*", axis="tp", value="n", forbid=False),
        ),
        dims={"seq": 16, "batch": 8},
        shapes={"x": (8, 8)},
        values={"step": -1},
        batch_dim="n",
        freeze=("emb*",),
        train=("scale",),
    )
    return with_digests(replace(made, options=options))


def test_text_round_trip(document: PlanDocument) -> None:
    """Reading and writing again gives the same bytes and the same value."""
    text = to_text(document)
    assert from_text(text) == document
    assert to_text(from_text(text)) == text


def test_text_is_canonical(document: PlanDocument) -> None:
    """ASCII, a final newline, no float, and one line per operator, parameter and name family."""
    text = to_text(document)
    assert text.isascii()
    assert text.endswith("}\n")
    lines = text.splitlines()
    assert sum('"strategy"' in line for line in lines) == sum(len(b.operators) for b in document.folded.blocks)
    assert all(line.count('"strategy"') <= 1 for line in lines)
    assert list(json.loads(text))[:4] == ["$schema", "format_version", "kind", "producer"]


def test_text_satisfies_the_schema(document: PlanDocument) -> None:
    """The schema that ships in the package describes what is written."""
    jsonschema.Draft202012Validator.check_schema(schema())
    jsonschema.Draft202012Validator(schema()).validate(json.loads(to_text(document)))


def test_many_ranks_are_written_as_a_shape(document: PlanDocument) -> None:
    """1024 ranks in row-major order take one line that a person can read."""
    axes = (replace(document.mesh.axes[0], size=128), replace(document.mesh.axes[1], size=8))
    large = replace(document, mesh=replace(document.mesh, axes=axes, ranks=row_major_ranks((128, 8))))
    assert '"ranks": {"order": "row-major", "shape": [128, 8]}' in to_text(large)
    assert from_text(to_text(large)).mesh == large.mesh


def test_unknown_keys_of_a_newer_minor_are_ignored(document: PlanDocument) -> None:
    """Minor versions add keys; they are read as if these were absent."""
    json_value = json.loads(to_text(document)) | {"format_version": "1.7", "novelty": {"a": 1}}
    json_value["blocks"][0]["operators"][0]["novelty"] = True
    read = from_text(json.dumps(json_value))
    assert read == replace(document, format_version="1.7")
    check_digests(read)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("format_version",), "2.0", r"format_version: the plan has format 2.0, this program reads 1.x"),
        (("format_version",), "one", r'format_version: "one", expected a version like 1.0'),
        (("kind",), "other", "no plan"),
        (("mesh", "axes", 0, "size"), 0, r"mesh.axes\[0\].size: 0, expected an integer of at least 1"),
        (("mesh", "ranks"), [[0, 0]], r"mesh.ranks: 1, expected 4 ranks"),
        (("options", "mode"), "trian", 'options.mode: "trian", expected train or infer'),
        (("options", "zero"), "all", 'options.zero: "all", expected auto or an integer'),
        (("options", "zero"), 4, "options.zero: 4, expected an integer of 0 to 3"),
        (("options", "loss", "kind"), "huber", 'options.loss.kind: "huber", expected mean or sum or cross-entropy'),
        (("parameters", 0, "placement", "tp"), "S[1]", r"parameters\[0\].placement.tp: placement 'S\[1\]' is unknown"),
        (("parameters", 0, "placement"), {"dp": "R"}, r"parameters\[0\].placement: .* expected the axes dp, tp"),
        (("parameters", 0, "bucket"), [[1]], r"parameters\[0\].bucket\[0\]"),
        (("blocks", 0, "operators", 0, "id"), 3, r"blocks\[0\].operators\[0\].id: 3, expected a string"),
        (("repeats", 0, "count"), 3, r"repeats\[0\].names"),
        (("repeats", 0, "count"), True, r"repeats\[0\].count: true, expected an integer"),
        (("buckets", 0, "axes"), ["pp"], r'buckets\[0\].axes\[0\]: "pp", expected dp or tp'),
        (("predicted", "step_ns"), -1, "predicted.step_ns: -1, expected an integer of at least 0"),
    ],
)
def test_errors_name_place_and_value(
    document: PlanDocument, path: tuple[str | int, ...], value: object, message: str
) -> None:
    """A wrong value is refused with its place, itself and what was expected; the hint says what to do."""
    json_value = json.loads(to_text(document))
    target = json_value
    for key in path[:-1]:
        target = target[key]
    target[path[-1]] = value
    with pytest.raises(PlanFormatError, match=message) as caught:
        from_text(json.dumps(json_value))
    assert caught.value.hint


def test_a_missing_key_is_named(document: PlanDocument) -> None:
    """The place of a missing key is said."""
    json_value = json.loads(to_text(document))
    del json_value["inputs"]["model"]["graph_digest"]
    with pytest.raises(PlanFormatError, match=r"inputs.model.graph_digest: the key is missing"):
        from_text(json.dumps(json_value))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1, column 2: not valid JSON"),
        ("[]", "no plan"),
        ('{"kind": "tap.plan", "format_version": 1.0}', "1.0 is no integer"),
        ('{"kind": "tap.plan", "a": NaN}', "NaN is no integer"),
        ('{"kind": "tap.plan", "kind": "tap.plan"}', "'kind' stands twice"),
        ("[" * 100_000, "not a readable plan"),
        ("9" * 5_000, "not a readable plan"),
    ],
)
def test_malformed_text(text: str, message: str) -> None:
    """What is no plan at all is refused in one line."""
    with pytest.raises(PlanFormatError, match=message):
        from_text(text)


def test_digests_tell_what_changed(document: PlanDocument) -> None:
    """The prediction is no decision; a strategy is one."""
    digests = compute_digests(document)
    slower = replace(document, predicted=replace(document.predicted, step_ns=1))
    assert compute_digests(slower).decisions == digests.decisions
    assert compute_digests(slower).plan != digests.plan
    other = replace(document, options=replace(document.options, precision="bf16"))
    assert compute_digests(other).decisions != digests.decisions


def test_an_edited_plan_is_noticed(document: PlanDocument) -> None:
    """A changed strategy does not fit the digest; the hint says what to do."""
    check_digests(document)
    edited = from_text(to_text(document).replace('"tp": "n"', '"tp": "m"', 1))
    with pytest.raises(PlanFormatError, match=r"digests.decisions: .* edited") as caught:
        check_digests(edited)
    assert "tap-plan" in caught.value.hint


def test_files(document: PlanDocument, tmp_path: Path) -> None:
    """Writing is atomic and leaves no temporary file; where the plan lies does not change a byte."""
    path = tmp_path / "plan.json"
    path.write_text("old")
    write_plan(path, document)
    assert path.read_bytes() == to_text(document).encode()
    assert read_plan(path) == document
    assert [file.name for file in tmp_path.iterdir()] == ["plan.json"]


def test_file_errors(document: PlanDocument, tmp_path: Path) -> None:
    """Files that cannot be read or written are named."""
    with pytest.raises(PlanFormatError, match=r"absent.json: the plan cannot be read: No such file"):
        read_plan(tmp_path / "absent.json")
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\xff\xfe")
    with pytest.raises(PlanFormatError, match="not UTF-8"):
        read_plan(tmp_path / "model.onnx")
    with pytest.raises(UsageError, match="cannot be written"):
        write_plan(tmp_path / "no" / "plan.json", document)
