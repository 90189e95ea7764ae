"""Folding and expanding are exact inverses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tap_planner.errors import PlanFormatError
from tap_planner.plan import Region, canonical_decisions, expand, expand_parts, fold_decisions, from_text, to_text
from tests.plan.plan_builders import Stack, add_layer, add_loss, add_shared, make_decisions, make_document, make_stack


@pytest.mark.parametrize("layers", [1, 2, 4, 96])
@pytest.mark.parametrize("shared", [False, True])
def test_expand_inverts_fold(layers: int, shared: bool) -> None:
    """Whatever the number of occurrences, all decisions come back with all names."""
    stack = make_stack(layers)
    if shared:
        add_shared(stack)
    decisions = make_decisions(stack)
    assert expand(make_document(decisions, stack.reads)) == canonical_decisions(decisions, stack.reads)


@given(
    columns=st.lists(st.booleans(), min_size=1, max_size=12),
    recompute=st.lists(st.sampled_from(["none", "full"]), min_size=12, max_size=12),
    shared=st.booleans(),
    data=st.data(),
)
def test_expand_inverts_fold_with_variants(
    columns: list[bool], recompute: list[str], shared: bool, data: st.DataObject
) -> None:
    """Any mixture of variants, recompute settings and buckets comes back, and the reads with it."""
    stack = make_stack(len(columns), columns=tuple(columns), recompute=tuple(recompute))
    if shared:
        add_shared(stack)
    numbers = data.draw(st.lists(st.integers(0, 3), min_size=2 * len(columns), max_size=2 * len(columns)))
    decisions = make_decisions(stack, bucket_of=tuple(numbers))
    document = make_document(decisions, stack.reads)
    assert expand(document) == canonical_decisions(decisions, stack.reads)
    assert expand_parts(document.folded).reads == stack.reads


def test_equal_occurrences_are_stored_once() -> None:
    """96 layers take as many entries as 2, apart from the first layer's input."""
    small, large = (fold_decisions(make_decisions(stack), stack.reads) for stack in (make_stack(2), make_stack(96)))
    assert len(large.blocks) == len(small.blocks) == 2
    assert len(large.parameters) == len(small.parameters) == 2
    assert len(large.redistributions) == len(small.redistributions) == 1
    assert [entry.count for entry in large.repeats] == [96, 1]


def test_variants_share_the_block_id() -> None:
    """The id is the digest of the signature, which has no strategies in it."""
    stack = make_stack(4, columns=(True, False, True, True))
    folded = fold_decisions(make_decisions(stack), stack.reads)
    layers = folded.blocks[:2]
    assert layers[0].id == layers[1].id
    assert [block.variant for block in layers] == [0, 1]
    assert [(entry.variant, entry.count) for entry in folded.repeats[:3]] == [(0, 1), (1, 1), (0, 2)]


def test_zero_3_buckets_are_run_length_coded() -> None:
    """A bucket per occurrence is one entry."""
    stack = make_stack(96)
    buckets = tuple(index // 2 for index in range(192))
    decisions = make_decisions(stack, bucket_of=buckets, zero_level=3)
    document = make_document(decisions, stack.reads)
    assert [entry.count for entry in document.folded.buckets] == [96]
    assert document.folded.parameters[0].buckets == tuple(range(96))
    assert expand(document) == canonical_decisions(decisions, stack.reads)


def test_interleaved_buckets_are_run_length_coded() -> None:
    """Two buckets per occurrence are two entries with a step of 2."""
    stack = make_stack(96)
    decisions = make_decisions(stack, bucket_of=tuple(range(192)), zero_level=3)
    decisions = replace(
        decisions, buckets=tuple(replace(bucket, elements=64 + bucket.id % 2) for bucket in decisions.buckets)
    )
    document = make_document(decisions, stack.reads)
    assert [(entry.id, entry.count, entry.step) for entry in document.folded.buckets] == [(0, 96, 2), (1, 96, 2)]
    assert '"bucket": [[1, 96, 2]]' in to_text(document)
    assert expand(from_text(to_text(document))) == canonical_decisions(decisions, stack.reads)


def test_a_parameter_of_several_occurrences_stands_outside() -> None:
    """A tied parameter belongs to no block and keeps its place in the order of first use."""
    stack = make_stack(3)
    stack.reads = {tensor: "tied" if name.endswith(".w1") else name for tensor, name in stack.reads.items()}
    firsts = [parameter for parameter in stack.parameters if parameter.name.endswith(".w1")]
    stack.parameters = [replace(firsts[0], name="tied")] + [p for p in stack.parameters if p not in firsts]
    decisions = make_decisions(stack)
    document = make_document(decisions, stack.reads)
    shared = [entry for entry in document.folded.parameters if entry.block is None]
    assert [entry.decision.name for entry in shared] == ["tied"]
    assert expand(document).parameters[0].name == "tied"


def test_redistributions_between_neighbours_are_folded() -> None:
    """Equal redistributions whose consumers lie in two occurrences are one entry with their names."""
    stack = make_stack(6)
    act = {operator.id: operator for operator in stack.operators}
    for index in range(5):
        operand = act[f"h.{index + 1}.fc"].inputs[0]
        assert operand is not None
        model = stack.redistributions[0]
        stack.redistributions.append(
            replace(model, tensor=f"h.{index}.out", consumers=(f"h.{index}.out", f"h.{index + 1}.fc"))
        )
    decisions = make_decisions(stack)
    document = make_document(decisions, stack.reads)
    outside = [entry for entry in document.folded.redistributions if entry.block is None]
    assert [entry.count for entry in outside] == [5]
    assert expand(document) == canonical_decisions(decisions, stack.reads)


def test_regions_outside_runs_are_blocks_that_occur_once() -> None:
    """Two equal regions outside runs share a block but are two repeats."""
    stack = Stack()
    tensor = add_layer(stack, 0, "x", column=True, run=None)
    tensor = add_layer(stack, 1, tensor, column=True, run=None)
    add_loss(stack, tensor)
    stack.regions = [Region(operators=r.operators, run=None, occurrence=0, recompute="none") for r in stack.regions]
    decisions = make_decisions(stack)
    folded = fold_decisions(decisions, stack.reads)
    assert [entry.count for entry in folded.repeats] == [1, 1, 1]
    assert len(folded.blocks) == 2
    assert expand_parts(folded).regions == decisions.regions


def test_a_missing_name_is_an_error() -> None:
    """A plan whose name table was damaged is refused by name."""
    stack = make_stack(2)
    document = make_document(make_decisions(stack), stack.reads)
    repeat = document.folded.repeats[0]
    names = {name: value for name, value in repeat.names.items() if name != "h.0.fc"}
    damaged = replace(
        document, folded=replace(document.folded, repeats=(replace(repeat, names=names), *document.folded.repeats[1:]))
    )
    with pytest.raises(PlanFormatError, match=r"no names for 'h.0.fc'"):
        expand(damaged)
