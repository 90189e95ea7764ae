"""Plans whose occurrences and groups are treated differently come back from their text, and are written compactly."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from jsonschema import Draft202012Validator

from tap_planner.errors import PlanFormatError
from tap_planner.graph import BindOptions, Graph, LossOptions, bind
from tap_planner.plan import (
    Decisions,
    canonical_decisions,
    compute_digests,
    diff_plans,
    expand,
    fold_decisions,
    from_text,
    schema,
    to_text,
)
from tests.apply.random_plans import RandomPlan
from tests.graph.models import data_model, symbols
from tests.plan.plan_builders import make_decisions, make_document, make_stack


def graph_of(name: str) -> Graph:
    """A model bound for training."""
    model = data_model(name)
    dims = {dim: 8 for dim in ("seq", "dec_seq", "enc_seq") if dim in symbols(model)}
    return bind(model, BindOptions(batch=4, dims=dims, training=True, loss=LossOptions(kind="mean")))


def reads_of(graph: Graph) -> dict[str, str]:
    """Tensor to the parameter that it reads."""
    return {name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None}


@pytest.mark.parametrize("name", ["gpt2_tiny", "llama_tiny", "t5_tiny", "gshard_moe_tiny"])
def test_random_mixed_plans_come_back(name: str) -> None:
    """Settings of regions and groups, hybrid ones too, survive folding and the text; the text fits the schema."""
    graph = graph_of(name)
    hybrid = 0
    for seed in range(3):
        built = RandomPlan(graph, (2, 2), seed, zero=None, recompute="mixed").build()
        decisions = replace(built, precision="fp32", axes=make_decisions(make_stack(1)).axes)
        document = make_document(decisions, reads_of(graph))
        text = to_text(document)
        Draft202012Validator(schema()).validate(json.loads(text))
        back = expand(from_text(text))
        expected = canonical_decisions(decisions, reads_of(graph))
        assert (back.regions, back.parameters, back.buckets) == (
            expected.regions,
            expected.parameters,
            expected.buckets,
        )
        assert (back.operators, back.redistributions) == (expected.operators, expected.redistributions)
        hybrid += sum(bool(bucket.rest_axes) for bucket in back.buckets)
    assert hybrid > 0


def mixed_stack(recompute: tuple[str, ...], levels: tuple[int, ...]) -> tuple[Decisions, dict[str, str]]:
    """A stack of layers with a recompute setting and a ZeRO level each; each layer is a bucket."""
    stack = make_stack(len(recompute), recompute=recompute)
    decisions = make_decisions(stack, bucket_of=tuple(index // 2 for index in range(2 * len(recompute))))
    parameters = tuple(
        replace(p, zero_level=levels[p.bucket or 0], zero_axes=(0,) if levels[p.bucket or 0] else ())
        for p in decisions.parameters
    )
    buckets = tuple(
        replace(b, zero_level=levels[b.id], zero_axes=(0,) if levels[b.id] else ()) for b in decisions.buckets
    )
    return replace(decisions, parameters=parameters, buckets=buckets), stack.reads


def test_recompute_in_40_of_96_layers_is_three_entries() -> None:
    """Repeats are run-length coded by setting; the operators of the block are written once."""
    decisions, reads = mixed_stack(("full",) * 40 + ("selective",) * 30 + ("none",) * 26, (1,) * 96)
    folded = fold_decisions(decisions, reads)
    assert [(entry.recompute, entry.count) for entry in folded.repeats[:3]] == [
        ("full", 40),
        ("selective", 30),
        ("none", 26),
    ]
    assert len(folded.blocks) == 2
    assert expand(make_document(decisions, reads)) == canonical_decisions(decisions, reads)


def test_zero_levels_are_variants() -> None:
    """Layers with another level are another variant of the block, however many they are."""
    decisions, reads = mixed_stack(("none",) * 12, (3,) * 5 + (1,) * 4 + (0,) * 3)
    folded = fold_decisions(decisions, reads)
    assert [(entry.variant, entry.count) for entry in folded.repeats[:3]] == [(0, 5), (1, 4), (2, 3)]
    assert [p.decision.zero_level for p in folded.parameters] == [3, 3, 1, 1, 0, 0]
    document = make_document(decisions, reads)
    assert expand(from_text(to_text(document))) == canonical_decisions(decisions, reads)


def with_hybrid_bucket(zero_axes: tuple[int, ...]) -> tuple[Decisions, dict[str, str]]:
    """One layer whose gradients are summed over both axes, and sharded over some."""
    stack = make_stack(1)
    decisions = make_decisions(stack, bucket_of=(0, 0))
    bucket = replace(decisions.buckets[0], axes=(0, 1), zero_level=2, zero_axes=zero_axes)
    return replace(decisions, buckets=(bucket,)), stack.reads


def test_axes_of_a_bucket_are_written_where_they_differ() -> None:
    """``zero_axes`` of a bucket is there for hybrid sharding alone, decides, and shows in a diff of digests."""
    texts, digests = [], []
    for axes in ((0, 1), (1,)):
        decisions, reads = with_hybrid_bucket(axes)
        document = make_document(decisions, reads)
        texts.append(json.loads(to_text(document))["buckets"][0])
        digests.append(compute_digests(document).decisions)
        assert expand(from_text(to_text(document))).buckets == decisions.buckets
    assert "zero_axes" not in texts[0] and texts[1]["zero_axes"] == ["tp"]
    assert digests[0] != digests[1]


def test_axes_that_are_not_the_buckets_are_refused() -> None:
    """A bucket can be sharded over its own axes only; the message names place, value and what is expected."""
    decisions, reads = with_hybrid_bucket((1,))
    damaged = to_text(make_document(decisions, reads)).replace(
        '"zero": 2, "zero_axes": ["tp"]', '"zero": 2, "zero_axes": ["dp"]'
    )
    damaged = damaged.replace('"axes": ["dp", "tp"], "dtype"', '"axes": ["tp"], "dtype"')
    with pytest.raises(PlanFormatError, match=r"buckets\[0\]\.zero_axes.*some of the bucket's axes"):
        from_text(damaged)


def test_a_diff_names_settings_that_changed() -> None:
    """Recompute of operators and ZeRO of parameters, folded over the layers."""
    old = make_document(*mixed_stack(("none",) * 12, (1,) * 12))
    new = make_document(*mixed_stack(("none",) * 6 + ("selective",) * 6, (1,) * 6 + (2,) * 6))
    diff = diff_plans(old, new)
    fields = {(change.name, change.old, change.new) for entity in diff.operators for change in entity.fields}
    assert fields == {("recompute", "none", "selective")}
    assert sum(entity.count for entity in diff.operators) % 6 == 0
    changed = {(change.name, change.old, change.new) for entity in diff.parameters for change in entity.fields}
    assert changed == {("zero", 1, 2)}
