"""Plans on fewer devices than there are: bounds, notes, rooms of unlike nodes, and where only such plans exist."""

from __future__ import annotations

import logging
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest

from tap_planner.api import make_plan, prepare_search, simulate_plan
from tap_planner.cluster import enumerate_meshes, load_cluster, mesh_on, part_of, restricted
from tap_planner.errors import InfeasibleError
from tap_planner.plan import PlanOptions, PlanRequest, check_digests, device_kinds, from_text, parse_constraint, to_text
from tap_planner.program import lower
from tap_planner.search import NotOnAllError, fewer, fewer_devices, least_ns, search, useful_meshes
from tap_planner.simulate import price_program
from tests.graph.models import DATA

OPTIONS = PlanOptions(batch=8, loss="mean", gap_basis_points=0, zero=0, recompute="none", microbatches=1)
GPT = replace(OPTIONS, dims={"seq": 64})
SEVEN = str(Path(__file__).parents[1] / "data" / "clusters" / "quick-1x7.yaml")


def asked(stem: str, cluster: str, options: PlanOptions) -> PlanRequest:
    """A question about a model of tests/data."""
    return PlanRequest(model=DATA / f"{stem}.onnx", cluster=cluster, options=options)


@pytest.mark.parametrize("cluster", ["1x1:l4", "1x3:l4", "2x2:a100-sxm4-80gb"])
@pytest.mark.parametrize("stem", ["hm_gpt_tiny", "gshard_moe_tiny"])
def test_no_plan_is_below_the_even_split(stem: str, cluster: str) -> None:
    """The optimum is no less than the bound, which on one device is all that operators take."""
    dims = {} if stem == "gshard_moe_tiny" else {"seq": 64}
    prepared = prepare_search(asked(stem, cluster, replace(OPTIONS, dims=dims)))
    result = search(prepared.request)
    least = least_ns(prepared.graph, prepared.cluster, "bf16")
    assert 0 < least <= result.bound_ns
    if prepared.cluster.num_devices == 1:
        price = price_program(lower(result.folded.graph, result.decisions), prepared.cluster)
        assert least == price.compute_ns


UNLIKE = """\
node_groups:
  - {name: a, nodes: 1, devices_per_node: 1, device: v100-sxm2-32gb}
  - {name: b, nodes: 1, devices_per_node: 2, device: rtx-4090}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}
"""


@pytest.mark.parametrize("model", ["hm_gpt_tiny", "hm_llama_tiny"])
def test_no_plan_on_unlike_devices_is_below_the_even_split(model: str, tmp_path: Path) -> None:
    """V100 has the slower products, RTX 4090 the slower memory: the bound takes the slower one for each operator."""
    (tmp_path / "c.yaml").write_text(UNLIKE, encoding="utf-8")
    prepared = prepare_search(asked(model, str(tmp_path / "c.yaml"), GPT))
    result = search(prepared.request)
    least = least_ns(prepared.graph, prepared.cluster, "bf16")
    alone = [
        least_ns(prepared.graph, replace(prepared.cluster, device=kind, node_groups=()), "bf16")
        for kind in prepared.cluster.devices
    ]
    worst = least_ns(prepared.graph, replace(prepared.cluster, node_groups=()), "bf16")
    assert max(alone) <= least <= min(worst, result.bound_ns)


def test_a_note_says_that_fewer_are_faster(caplog: pytest.LogCaptureFixture) -> None:
    """Eight sequences on 7 devices: the plan is for all, and a note says that 4 are proven faster; with idle devices
    allowed the plan is for those, its ranks and the idle devices are listed, and nothing is noted."""
    logging.getLogger("tap_planner").propagate = True
    request = asked("hm_gpt_tiny", SEVEN, GPT)
    with caplog.at_level(logging.INFO, logger="tap_planner"):
        everything = make_plan(request)
        notes = [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]
        caplog.clear()
        fewer = make_plan(replace(request, options=replace(GPT, allow_idle=True)))
        quiet = [record for record in caplog.records if record.levelno > logging.INFO]
    (note,) = (text for text in notes if "proven faster" in text)
    assert note.startswith("4 of the 7 devices") and "--allow-idle" in note and quiet == []
    assert len(everything.mesh.ranks) == 7 and everything.mesh.idle_devices == ()
    assert fewer.certificate.objective_ns < everything.certificate.bound_ns
    assert fewer.certificate.space["meshes"] > everything.certificate.space["meshes"]
    assert fewer.mesh.ranks == tuple((0, device) for device in range(4))
    assert fewer.mesh.num_left_out == 3
    assert from_text(to_text(fewer)) == fewer
    check_digests(fewer)
    for document in (everything, fewer):
        prediction = simulate_plan(document, request.model)
        assert (prediction.step_ns, prediction.hidden_ns) == (document.predicted.step_ns, document.predicted.hidden_ns)


def test_what_is_noted_is_a_plan(caplog: pytest.LogCaptureFixture) -> None:
    """The objective of the note is that of a search on the part alone, or more: its effort is limited."""
    prepared = prepare_search(asked("hm_gpt_tiny", SEVEN, GPT))
    result = search(prepared.request)
    found = fewer_devices(prepared.request, result)
    assert found is not None and found.objective_ns < result.bound_ns
    meshes = tuple(mesh_on(shape, tuple(range(found.num_devices))) for shape in ((4,), (2, 2)))
    assert search(replace(prepared.request, meshes=meshes)).objective_ns <= found.objective_ns


def test_nothing_is_noted_about_equal_parts() -> None:
    """Where every plan on a part is one on all devices, parts are not searched at all."""
    cluster = load_cluster("1x4:l4")
    meshes = enumerate_meshes(cluster, allow_idle=True)
    assert {mesh.num_devices for mesh in useful_meshes(cluster, meshes)} == {4, 3}


@pytest.mark.parametrize("name", ["2x4:l4", "1x6:l4"])
def test_parts_that_are_left_out_of_the_space_are_not_missed(name: str) -> None:
    """The optimum on a mesh that is not useful is one on all devices, with everything alike along the first axis."""
    prepared = prepare_search(asked("hm_gpt_tiny", name, replace(GPT, zero=1)))
    cluster = prepared.cluster
    meshes = enumerate_meshes(cluster, allow_idle=True)
    useful = set(useful_meshes(cluster, meshes))
    missed = [mesh for mesh in meshes if mesh not in useful]
    assert missed
    best = search(prepared.request).objective_ns
    for mesh in missed:
        assert search(replace(prepared.request, meshes=(mesh,))).objective_ns >= best


def test_a_mesh_of_fewer_devices() -> None:
    """A mesh that is asked for may have fewer devices; the plan is priced on that part."""
    options = replace(GPT, mesh="dp=2,tp=3", allow_idle=True)
    request = asked("hm_gpt_tiny", "2x7:l4", options)
    document = make_plan(request)
    assert [(axis.name, axis.levels) for axis in document.mesh.axes] == [("dp", ("node",)), ("tp", ("node",))]
    assert document.num_idle >= document.mesh.num_left_out == 8
    result = search(prepare_search(request).request)
    alone = search(prepare_search(asked("hm_gpt_tiny", "1x6:l4", replace(options, allow_idle=False))).request)
    assert result.objective_ns == alone.objective_ns == document.certificate.objective_ns


UNLIKE = """\
node_groups:
  - {name: slow, nodes: 1, devices_per_node: 1, device: l4}
  - {name: fast, nodes: 1, devices_per_node: 2, device: h100-sxm5-80gb}
inter_node: {bandwidth: 25 GB/s, nics_per_node: 1, latency: 10 us}
"""


def test_fast_devices_have_room_where_all_have_not(tmp_path: Path) -> None:
    """A third of an 8 B model does not fit into an L4: no plan on all devices, and the error names the way out; two
    H100 hold it, with their own memory as the limit."""
    path = tmp_path / "cluster.yaml"
    path.write_text(UNLIKE)
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 128}, recompute="full", zero=3, gap_basis_points=100)
    with pytest.raises(
        InfeasibleError, match=r"the limit is 24\.43 GB .* 1342177280 bytes of the device reserved"
    ) as caught:
        make_plan(asked("hm_llama3_8b", str(path), options))
    assert "--allow-idle" in caught.value.hint and caught.value.exit_code == 3
    document = make_plan(asked("hm_llama3_8b", str(path), replace(options, allow_idle=True)))
    assert document.mesh.ranks == ((1, 0), (1, 1))
    (kind,) = device_kinds(document)
    assert (kind.group, kind.num_devices) == ("fast", 2)
    assert 26e9 < document.predicted.total_memory_bytes <= kind.limit_bytes
    cluster = load_cluster(path)
    assert part_of(cluster, mesh_on((2,), (1, 2))) == restricted(cluster, (1, 2))


def test_rules_that_only_fewer_devices_can_keep() -> None:
    """A head of 16 is a part of a dim, which 7 devices cannot cut evenly but 4 can: exit 3, and the way out."""
    options = replace(GPT, constraints=(parse_constraint("Reshape:dp=f3"),))
    with pytest.raises(NotOnAllError, match="no plan uses all 7 devices") as caught:
        make_plan(asked("hm_gpt_tiny", SEVEN, options))
    assert caught.value.exit_code == 3 and "--allow-idle: the mesh dp=2,tp=3 keeps" in caught.value.hint
    document = make_plan(asked("hm_gpt_tiny", SEVEN, replace(options, allow_idle=True)))
    assert 0 < document.mesh.num_left_out == 7 - len(document.mesh.ranks)


def test_parts_that_are_far_are_searched_in_small_models_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where searches take seconds, parts that are likely to be far slower are left out; else they may be the answer."""
    prepared = prepare_search(asked("hm_gpt_tiny", SEVEN, GPT))
    result = search(prepared.request)
    searched: list[int] = []
    monkeypatch.setattr(fewer, "search", lambda request: searched.append(len(request.meshes)) or search(request))
    monkeypatch.setattr(fewer, "_FAR", Fraction(-1))
    assert fewer_devices(prepared.request, result) is not None and searched
    searched.clear()
    monkeypatch.setattr(fewer, "_MANY", 0)
    assert fewer_devices(prepared.request, result) is None and not searched
