"""Communication priced by its volume alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.cluster import load_cluster, parse_cluster, parse_mesh
from tap_planner.cost import COLLECTIVE_KINDS, FlatModel, PriceList, prices_of
from tap_planner.errors import UsageError
from tap_planner.plan import PlanOptions, expand, from_text, to_text
from tap_planner.program import lower
from tap_planner.sharding import sent_bytes
from tap_planner.simulate import price_program

DATA = Path(__file__).parents[1] / "data"
MODEL = DATA / "hm_gpt_tiny.onnx"
SLOW = """\
device: a100-sxm4-80gb
nodes: 2
devices_per_node: 2
inter_node: {bandwidth: 1 Gbit/s, nics_per_node: 1}
"""


@pytest.mark.parametrize("kind", COLLECTIVE_KINDS)
def test_links_do_not_matter(kind: str) -> None:
    """The same bytes cost the same inside a node and between nodes: what is sent, over a device's share of the NICs."""
    cluster = load_cluster("2x8:a100-sxm4-80gb")
    model = FlatModel(cluster, (2, 2, 4))
    inside, across = (model.cost(kind, (axis,), 8 * 10**9) for axis in (1, 0))
    assert inside == across
    assert inside.ns == -(-sent_bytes(kind, 2, 8 * 10**9) // 25)
    assert model.rate_ns(kind, (0,), 8 * 10**9) == across.ns


def test_operators_cost_what_they_cost() -> None:
    """Only collectives are priced otherwise."""
    cluster = load_cluster("2x8:a100-sxm4-80gb")
    mesh = parse_mesh("dp=2,tp=8", cluster)
    flat, true = (prices_of(which, cluster, mesh, "bf16") for which in (PriceList.FLAT, PriceList.TIME))
    assert flat.compute.device == true.compute.device
    assert flat.optimizer_ns is true.optimizer_ns


def test_a_plan_by_volume(tmp_path: Path) -> None:
    """Its objective is what the evaluator adds up by volumes, it says what that leaves out, reads back, is verified,
    and the topology prices it no better than the plan that knows the topology."""
    path = tmp_path / "c.yaml"
    path.write_text(SLOW)
    cluster = parse_cluster(SLOW, file="c.yaml")
    options = {
        cost: PlanOptions(batch=16, loss="mean", dims={"seq": 64}, gap_basis_points=0, cost=cost, mesh="a=2,b=2")
        for cost in ("volume", "topology")
    }
    plans = {
        cost: api.make_plan(api.PlanRequest(model=MODEL, cluster=str(path), options=given))
        for cost, given in options.items()
    }
    prepared = api.prepare_search(api.PlanRequest(model=MODEL, cluster=str(path), options=options["volume"]))
    priced = {}
    for cost, document in plans.items():
        program = lower(prepared.graphs(document.pipeline.microbatches), expand(document))
        priced[cost] = {which: price_program(program, cluster, which).objective_ns for which in PriceList}
    volume = plans["volume"]
    assert volume.certificate.objective_ns == priced["volume"][PriceList.FLAT]
    assert "topology and latency of communication" in volume.certificate.not_in_objective
    assert plans["topology"].certificate.objective_ns == priced["topology"][PriceList.TIME]
    assert priced["volume"][PriceList.FLAT] <= priced["topology"][PriceList.FLAT]
    assert priced["topology"][PriceList.TIME] <= priced["volume"][PriceList.TIME]
    assert from_text(to_text(volume)) == volume
    assert not api.verify_certificate(volume, MODEL).findings


def test_volumes_have_no_place_where_bytes_are_the_objective() -> None:
    """What is sent does not depend on what it costs: said, with what to leave out."""
    options = PlanOptions(batch=8, loss="mean", dims={"seq": 64}, cost="volume", objective="communication")
    with pytest.raises(UsageError, match="--cost volume says what communication takes"):
        api.make_plan(api.PlanRequest(model=MODEL, cluster="1x4:a100-sxm4-80gb", options=options))
