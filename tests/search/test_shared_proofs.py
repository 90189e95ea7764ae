"""Shares in proofs: what the search makes passes, what would claim too much does not, and JSON keeps both apart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from tap_planner import api
from tap_planner.errors import PlanFormatError
from tap_planner.graph import Graph
from tap_planner.plan import (
    PlanDocument,
    PlanOptions,
    PlanRequest,
    ProofEntry,
    ShareEntry,
    from_text,
    to_text,
    with_digests,
)
from tap_planner.search import (
    Configuration,
    CostedModel,
    Model,
    Recompute,
    Shares,
    Solver,
    Weights,
    fold_assignment,
)
from tap_planner.search.shares import NO_SHARES, is_shared_out, move_shares, wrong_shares
from tap_planner.search.terms import PARTS, SCALE, Term
from tests.graph.models import DATA
from tests.search.brute_force import enumerate_all
from tests.search.building import free_configuration, make_model, random_assignments
from tests.search.models import Nodes, bound, decoder, model_file

pytestmark = pytest.mark.usefixtures("without_buffers")

Row = tuple[str, tuple[int, ...], tuple[int, ...]]
"""Tensor, key, parts."""
MODEL = DATA / "hm_gpt_tiny.onnx"
LIMIT = 950_000
CHECKS = [HealthCheck.too_slow, HealthCheck.filter_too_much]


# -- graphs ----------------------------------------------------------------------------------------------------


def read_by_many() -> Graph:
    """A vector that four operators read, two of which (Mul) keep it for backward; Add does not."""
    graph = Nodes()
    graph.add("Mul", ["x", graph.weight("w", 4)], "h")
    graph.add("Relu", ["h"], "a")
    graph.add("Mul", ["h", "a"], "b")
    graph.add("Add", ["h", "b"], "c")
    graph.add("Mul", ["c", "h"], "y")
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [4])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, [4])]
    return bound(model_file(helper.make_graph(graph.nodes, "many", inputs, outputs, graph.initializers)), batch=4)


def layers_of_gpt() -> Graph:
    """Three repeats: q, k and v read one tensor in each of them."""
    return bound(decoder("gpt", layers=3), batch=4, dims={"seq": 16})


def any_settings(model: Model) -> Configuration:
    """Every region recomputes as it likes, with ZeRO 0 or 1."""
    return free_configuration(tuple(Recompute), (0, 1), len(model.space.mesh_shape))


def shared_terms(model: Model) -> list[Term]:
    """What the relaxed model shares out."""
    parts = (model.outer, *model.links)
    return [term for part in parts for term in part.terms if is_shared_out(term)]


def moved(model: Model, moves: int = 5) -> Shares:
    """Shares after some moves, each towards the optimum under the ones before."""
    solver = Solver(CostedModel(model, any_settings(model)))
    shares, weights = NO_SHARES, Weights(3, 1)
    for number in range(1, moves + 1):
        found = solver.minimise(weights)
        assert found.choices is not None
        shares = move_shares(shares, solver.costed, found.choices, 0.5 / math.sqrt(number), with_memory=True)
        solver.parts.use_shares(shares)
    return shares


# -- rows ------------------------------------------------------------------------------------------------------

keys_drawn = st.one_of(st.tuples(st.integers(0, 9)), st.tuples(st.integers(0, 9), st.integers(-1, 9)))
rows_drawn = st.dictionaries(
    st.tuples(st.sampled_from(["h", "q", "mask"]), keys_drawn),
    st.lists(st.integers(0, PARTS), min_size=1, max_size=4).map(tuple),
    max_size=8,
).map(lambda rows: [(tensor, key, parts) for (tensor, key), parts in rows.items()])


@given(rows_drawn, st.randoms())
def test_rows_hold_all_of_shares(rows: list[Row], chance: Any) -> None:
    """Shares of their own rows are equal shares, in whatever order rows come; rows come in one order."""
    shares = Shares.of_rows(rows)
    assert list(shares.rows()) == sorted(rows)
    again = Shares.of_rows(shares.rows())
    chance.shuffle(rows)
    shuffled = Shares.of_rows(rows)
    assert again == shares == shuffled and hash(again) == hash(shares)
    assert list(shuffled.rows()) == list(shares.rows())


@given(rows_drawn)
def test_shares_are_true_where_something_is_listed(rows: list[Row]) -> None:
    """None listed are equal shares of everything; one part more or less makes others."""
    shares = Shares.of_rows(rows)
    assert bool(shares) == bool(rows) == (shares != NO_SHARES)
    if rows:
        tensor, key, parts = rows[0]
        assert Shares.of_rows([(tensor, key, (parts[0] + 1, *parts[1:])), *rows[1:]]) != shares


def test_moved_shares_survive_their_rows() -> None:
    """What moves have made, written as rows and read, shares out the same."""
    shares = moved(make_model(read_by_many(), (2, 2)))
    again = Shares.of_rows(shares.rows())
    assert list(again.rows()) == list(shares.rows()) != []
    assert hash(again) == hash(shares)


# -- what passes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("graph", [read_by_many, layers_of_gpt])
def test_moved_shares_pass(graph: Callable[[], Graph]) -> None:
    """After each of several moves towards optima; both redistributions and kept copies are shared out."""
    model = make_model(graph(), (2, 2))
    after = [moved(model, moves) for moves in range(6)]
    assert [wrong_shares(shares, model) for shares in after] == [None] * 6
    assert after[-1].edges and after[-1].copies


@given(st.integers(0, 999), st.lists(st.floats(0, 1), min_size=1, max_size=6))
@settings(max_examples=20, deadline=None)
def test_shares_moved_to_anything_pass(seed: int, steps: list[float]) -> None:
    """Whatever choices moves go by, and however far: no destination and no copy is shared out more than whole."""
    model = make_model(read_by_many(), (2, 2))
    costed = CostedModel(model, any_settings(model))
    shares = NO_SHARES
    assignments = random_assignments(model, seed, len(steps), per_class=False)
    for step, assignment in zip(steps, assignments, strict=True):
        shares = move_shares(shares, costed, fold_assignment(model, assignment), step, with_memory=True)
        assert wrong_shares(shares, model) is None


def test_readers_that_may_not_keep_bear_nothing_of_copies() -> None:
    """Add keeps nothing for backward: without recomputation a copy is shared out among the others."""
    model = make_model(read_by_many(), (2, 2))
    costed = CostedModel(model, free_configuration((Recompute.NONE,), (0,), 2))
    assignments = random_assignments(model, 1, 4, per_class=False)
    shares = NO_SHARES
    for assignment in assignments:
        shares = move_shares(shares, costed, fold_assignment(model, assignment), 0.5, with_memory=True)
        assert wrong_shares(shares, model) is None
    (term,) = (term for term in shared_terms(model) if term.tensor == "h")
    idle = [n for n, slot in enumerate(term.slots) if not slot.kept]
    assert idle and len(idle) < len(term.slots)
    for parts in shares.copies["h"].values():
        assert 0 < sum(parts) <= PARTS and all(parts[n] == 0 for n in idle)


# -- what does not ---------------------------------------------------------------------------------------------


def wrong(rows: Sequence[Row]) -> str | None:
    """What is wrong with shares for the graph of one tensor that many read."""
    return wrong_shares(Shares.of_rows(rows), make_model(read_by_many(), (2, 2)))


def test_what_no_shares_may_be() -> None:
    """More than the whole, a tensor that no several readers share, and parts of too few or too many readers."""
    (term,) = (term for term in shared_terms(make_model(read_by_many(), (2, 2))) if term.tensor == "h")
    whole = (PARTS, *[0] * (len(term.slots) - 1))
    more = (PARTS, 1, *[0] * (len(term.slots) - 2))
    assert wrong([("h", (0, 0), whole), ("h", (0,), (*whole, 0))]) is None
    too_much = "shares out more of 'h' than there is"
    assert wrong([("h", (0, 0), more)]) == too_much
    assert wrong([("h", (0,), (*whole, 1))]) == too_much
    assert wrong([("h", (0, 0), whole), ("h", (1, 1), more)]) == too_much
    for tensor in ("c", "x", "nowhere"):  # read once, read once, not there
        assert wrong([(tensor, (0, 0), whole)]) == f"shares out '{tensor}', which no several readers share"
    for key, parts in (((0, 0), whole[1:]), ((0, 0), (*whole, 0)), ((0,), whole), ((0,), (*whole, 0, 0)), ((0, 0), ())):
        assert wrong([("h", key, parts)]) == f"shares out 'h' among {len(parts)}"


def test_a_copy_in_a_state_that_there_is_not() -> None:
    """The number of a placement past the last one is said to be wrong before any table is made of it."""
    (term,) = (term for term in shared_terms(make_model(read_by_many(), (2, 2))) if term.tensor == "h")
    none = (0,) * (len(term.slots) + 1)
    assert wrong([("h", (len(term.state_bytes) - 1,), none)]) is None
    assert wrong([("h", (len(term.state_bytes),), none)]) is not None


@cache
def enumerated() -> tuple[Model, Solver, tuple[tuple[int, int], ...]]:
    """A small graph, its solver without recomputation, and the prices of all its plans."""
    model = make_model(read_by_many(), (2,))
    configuration = free_configuration((Recompute.NONE,), (0,), 1)
    return model, Solver(CostedModel(model, configuration)), enumerate_all(model, configuration).prices


@given(st.data())
@settings(max_examples=40, deadline=None, suppress_health_check=CHECKS)
def test_whatever_passes_is_a_lower_bound(data: st.DataObject) -> None:
    """Shares that nobody would make, but that pass: the relaxed model stays below every plan's price."""
    model, solver, prices = enumerated()
    rows: list[Row] = []
    for term in shared_terms(model):
        states = range(len(term.state_bytes))
        keys = [*((a, b) for a in states for b in (-1, *states)), *((a,) for a in states)]
        for key in data.draw(st.lists(st.sampled_from(keys), max_size=6, unique=True)):
            width = len(term.slots) + (len(key) == 1)
            cuts = sorted(data.draw(st.lists(st.integers(0, PARTS), min_size=width, max_size=width)))
            parts = tuple(high - low for low, high in zip((0, *cuts), cuts, strict=False))
            rows.append((term.tensor, key, tuple(data.draw(st.permutations(parts)))))
    shares = Shares.of_rows(rows)
    assert wrong_shares(shares, model) is None
    solver.parts.use_shares(shares)
    for weights in (Weights(1, 0), Weights(0, 1), Weights(1, 40), Weights(40, 1)):
        least = min(weights.time * ns + weights.memory * num_bytes for ns, num_bytes in prices)
        assert solver.minimise(weights).bound <= SCALE * least


def test_shares_that_do_not_pass_are_no_bound() -> None:
    """Each reader bearing all of everything, the relaxed model is above the best plan: the check is needed."""
    model, solver, prices = enumerated()
    rows: list[Row] = []
    for term in shared_terms(model):
        states = range(len(term.state_bytes))
        parts = (PARTS,) * len(term.slots)
        rows += [(term.tensor, (a, b), parts) for a in states for b in (-1, *states)]
        rows += [(term.tensor, (a,), (*parts, PARTS)) for a in states]
    assert wrong_shares(Shares.of_rows(rows), model) is not None
    solver.parts.use_shares(Shares.of_rows(rows))
    assert solver.minimise(Weights(0, 1)).bound > SCALE * min(num_bytes for _, num_bytes in prices)


# -- plans -----------------------------------------------------------------------------------------------------


@cache
def planned() -> PlanDocument:
    """A plan under a limit that binds."""
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, mesh="dp=2,tp=2", max_memory_bytes=LIMIT)
    return api.make_plan(PlanRequest(model=MODEL, cluster="2x2:a100-sxm4-80gb", options=options))


def is_tightened(entry: ProofEntry) -> bool:
    """Whether windows were searched under a multiplier."""
    return entry.by == "tightened" and entry.multiplier[0] > 0 and bool(entry.shares)


def with_entry(document: PlanDocument, change: Callable[[ProofEntry], ProofEntry]) -> PlanDocument:
    """The plan with its first tightened entry changed, signed anew."""
    entries = list(document.certificate.proof)
    number = next(number for number, entry in enumerate(entries) if is_tightened(entry))
    entries[number] = change(entries[number])
    return with_digests(replace(document, certificate=replace(document.certificate, proof=tuple(entries))))


def raised(entry: ProofEntry) -> ProofEntry:
    """A bound that is 1 % larger."""
    return replace(entry, bound_ns=entry.bound_ns + entry.bound_ns // 100, solver_ns=None)


def doubled(entry: ProofEntry) -> ProofEntry:
    """The same, which doubled shares would give."""
    shares = tuple(replace(row, parts=tuple(2 * part for part in row.parts)) for row in entry.shares)
    return replace(raised(entry), shares=shares)


def elsewhere(entry: ProofEntry) -> ProofEntry:
    """Shares of a tensor that there is not."""
    return replace(entry, shares=(*entry.shares, ShareEntry(tensor="zz", key=(0,), parts=(1,))))


def shortened(entry: ProofEntry) -> ProofEntry:
    """One reader's part left out."""
    first, *others = entry.shares
    return replace(entry, shares=(replace(first, parts=first.parts[1:]), *others))


def test_a_tightened_bound_is_verified() -> None:
    """It holds with its shares, as read from the plan's text."""
    document = planned()
    assert any(is_tightened(entry) for entry in document.certificate.proof)
    assert api.verify_certificate(from_text(to_text(document)), MODEL).findings == ()


@pytest.mark.parametrize(
    ("forge", "message"),
    [
        (raised, "which elimination does not give"),
        (doubled, "than there is"),
        (elsewhere, "shares out 'zz', which no several readers share"),
        (shortened, "shares out '"),
    ],
)
def test_forged_proofs_are_found(forge: Callable[[ProofEntry], ProofEntry], message: str) -> None:
    """Each is a finding that names the mesh, although the digests fit."""
    report = api.verify_certificate(with_entry(planned(), forge), MODEL)
    assert not report.passed
    assert any(message in finding and "dp=2,tp=2" in finding for finding in report.findings), report.findings
    assert not any(finding.startswith("digests") for finding in report.findings)


# -- JSON ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loose", [(), (-1, 3, 17), None])
def test_shares_and_loose_survive_json(loose: tuple[int, ...] | None) -> None:
    """Read and written again a plan is the same bytes."""
    document = with_entry(planned(), lambda entry: replace(entry, loose=loose))
    text = to_text(document)
    again = from_text(text)
    assert to_text(again) == text
    assert again.certificate.proof == document.certificate.proof
    written = next(entry for entry in json.loads(text)["certificate"]["proof"] if entry["by"] == "tightened")
    assert written.get("loose", []) == ("all" if loose is None else list(loose))
    assert written["shares"].keys() == {row.tensor for entry in [first_tightened(again)] for row in entry.shares}


def first_tightened(document: PlanDocument) -> ProofEntry:
    """The entry that tests change."""
    return next(entry for entry in document.certificate.proof if is_tightened(entry))


def damaged(damage: Callable[[dict[str, Any], str], None]) -> tuple[str, str, str]:
    """(text of a plan whose proof was damaged, place of the entry, a tensor of its shares)."""
    content = json.loads(to_text(planned()))
    entries = content["certificate"]["proof"]
    number = next(n for n, entry in enumerate(entries) if entry["by"] == "tightened" and "shares" in entry)
    tensor = next(iter(entries[number]["shares"]))
    damage(entries[number], tensor)
    return json.dumps(content), f"certificate.proof[{number}]", tensor


def put(value: object, *path: int) -> Callable[[dict[str, Any], str], None]:
    """Put a value in the place of one inside the rows of a tensor."""

    def damage(entry: dict[str, Any], tensor: str) -> None:
        inside: Any = entry["shares"][tensor]
        for step in path[:-1]:
            inside = inside[step]
        inside[path[-1]] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "place", "message"),
    [
        (put([1, 2, 3], 0, 0), "[0][0]", "[1, 2, 3], expected destination and gradient, or a state"),
        (put([], 0, 0), "[0][0]", "[], expected destination and gradient, or a state"),
        (put(-2, 0, 0, 0), "[0][0][0]", "-2, expected an integer of at least -1"),
        (put(-1, 0, 1, 0), "[0][1][0]", "-1, expected an integer of at least 0"),
        (put("1", 0, 1, 0), "[0][1][0]", '"1", expected an integer of at least 0'),
        (put([[0]], 0), "[0]", "[[0]], expected key and parts"),
        (put(7, 0), "[0]", "7, expected a list"),
    ],
)
def test_damaged_shares_are_not_read(damage: Callable[[dict[str, Any], str], None], place: str, message: str) -> None:
    """The error names the place and what was expected there."""
    text, entry, tensor = damaged(damage)
    with pytest.raises(PlanFormatError) as caught:
        from_text(text)
    assert caught.value.message == f"{entry}.shares.{tensor}{place}: {message}"


@pytest.mark.parametrize(
    ("loose", "place", "message"),
    [
        ("some", "", '"some", expected a list'),
        ([-2], "[0]", "-2, expected an integer of at least -1"),
        ([True], "[0]", "true, expected an integer of at least -1"),
    ],
)
def test_damaged_loose_is_not_read(loose: object, place: str, message: str) -> None:
    """A list of numbers from -1 on, or "all"."""
    text, entry, _ = damaged(lambda proof, tensor: proof.update(loose=loose))
    with pytest.raises(PlanFormatError) as caught:
        from_text(text)
    assert caught.value.message == f"{entry}.loose{place}: {message}"
