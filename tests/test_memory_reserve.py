"""Plans beside what devices hold for communication, and what they hold back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tap_planner import api
from tap_planner.cluster import load_cluster
from tap_planner.errors import InfeasibleError
from tap_planner.plan import PlanDocument, PlanOptions, PlanRequest, from_text, to_text
from tests.graph.models import DATA

MODEL = DATA / "hm_gpt_tiny.onnx"
CLUSTER = "2x2:a100-sxm4-80gb"
BUFFERS = 688 << 20
TRAINING = PlanOptions(batch=8, loss="mean", dims={"seq": 16}, recompute="none")


def request(cluster: str = CLUSTER, **changes: object) -> PlanRequest:
    """Training of a tiny GPT, or as the changes say."""
    options = replace(TRAINING, **changes)  # type: ignore[arg-type]
    return PlanRequest(model=MODEL, cluster=cluster, options=options)


def planned(cluster: str = CLUSTER, **changes: object) -> PlanDocument:
    """The plan, as read from its text."""
    return from_text(to_text(api.make_plan(request(cluster, **changes))))


def file_with(folder: Path, more: str) -> str:
    """The same devices, with further lines."""
    path = folder / "cluster.yaml"
    path.write_text(f"device: a100-sxm4-80gb\nnodes: 2\ndevices_per_node: 2\n{more}")
    return str(path)


def gradients() -> int:
    """Bytes of all gradients on one device, in bf16."""
    parameters = api.prepare_search(request()).graph.parameters
    return 2 * sum(parameter.type.num_elements for parameter in parameters if parameter.trainable)


@pytest.mark.parametrize(("mesh", "communicators"), [("dp=4", 1), ("dp=2,tp=2", 3)])
@pytest.mark.parametrize("mode", ["train", "infer"])
def test_the_table_adds_up(mesh: str, communicators: int, mode: str, tmp_path: Path) -> None:
    """The workspace is the buffers of all communicators and, in training, one bucket. Without it the plan is the same,
    and so is what it takes."""
    given = {"mesh": mesh, "mode": mode, "loss": "mean" if mode == "train" else None}
    document = planned(**given)
    bare = planned(file_with(tmp_path, "collective_buffers: 0 B\n"), **given)
    sizes, others = dict(document.predicted.memory_bytes), dict(bare.predicted.memory_bytes)
    assert sizes.pop("workspace") == communicators * BUFFERS + (gradients() if mode == "train" else 0)
    assert others.pop("workspace", 0) == 0
    assert sizes == others
    assert document.predicted.total_memory_bytes == document.predicted.memory_bytes["workspace"] + sum(sizes.values())
    assert document.folded == bare.folded


def test_the_limit_counts_the_workspace() -> None:
    """With just what the least plan takes there is one, with a byte less there is none; the proofs hold."""
    smallest = planned(objective="memory")
    least = smallest.predicted.total_memory_bytes
    assert least > BUFFERS
    assert smallest.mesh.axes[0].size == 4  # one communicator is less than three
    fitting = planned(max_memory_bytes=least)
    assert fitting.predicted.total_memory_bytes == least
    for document in (smallest, fitting):
        assert api.verify_certificate(document, MODEL, replay=True).findings == ()
    with pytest.raises(InfeasibleError) as caught:
        planned(max_memory_bytes=least - 1)
    assert (caught.value.least_memory_bytes, caught.value.limit_bytes) == (least, least - 1)
    assert "reserved" not in caught.value.message  # what the user gives is the limit, whatever is held back


def test_the_reserve_is_no_part_of_the_limit(tmp_path: Path) -> None:
    """Where the device is the limit, what is held back is taken off, and the message says how much."""
    memory = load_cluster(CLUSTER).device.memory_bytes
    reserved = memory - (100 << 20)
    cluster = file_with(tmp_path, f"reserved_memory: {reserved} B\n")
    with pytest.raises(InfeasibleError) as caught:
        planned(cluster)
    assert caught.value.limit_bytes == 100 << 20
    assert f"({100 << 20} bytes, with {reserved} bytes of the device reserved)" in caught.value.message
    assert planned(cluster, max_memory_bytes=memory).predicted.total_memory_bytes < memory


def test_a_document_without_the_figures(tmp_path: Path) -> None:
    """A plan of a cluster that says nothing of both is verified as it was made: nothing is assumed of it."""
    more = "reserved_memory: 0 B\ncollective_buffers: 0 B\n"
    document = planned(file_with(tmp_path, more), mesh="dp=2,tp=2")
    assert not {"reserved_memory_bytes", "collective_buffers_bytes"} & set(document.cluster)
    assert api.verify_certificate(document, MODEL).findings == ()
