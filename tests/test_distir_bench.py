"""The benchmark of DistIR's experiments: its plans are what they say, and small parts of it have known answers."""

from __future__ import annotations

import pytest

from tap_planner.cluster import load_cluster
from tap_planner.program import Send, collectives
from tests.bench.distir import DGX2, MOST_BYTES, choose, grid_rows, rows_of, run, space, spearman
from tests.bench.instances import DATA
from tests.bench.mlp import SMALL, Degrees, Mlp, program_of

TINY = Mlp(name="tiny", num_layers=4, hidden=64)


def test_plans_by_degrees() -> None:
    """Columns and rows in pairs cost one all-reduce a pair, forward and back; gradients are reduced over the data axis;
    every stage but the last sends what it makes."""
    program = program_of(TINY, 32, Degrees(data=2, tensor=2, pipeline=2, microbatches=4))
    counted = {(c.phase.value, c.kind): 0 for c in collectives(program)}
    for one in collectives(program):
        counted[one.phase.value, one.kind] += one.count
    assert counted["forward", "all_reduce"] == 2 * 4
    assert counted["forward", "send_recv"] == counted["backward", "send_recv"] == 4
    assert any(phase == "gradient" and kind == "all_reduce" for phase, kind in counted)
    sends = [i for chunk in program.chunks for i in chunk.forward if isinstance(i, Send)]
    assert len(sends) == 1


def test_the_space_is_all_of_it() -> None:
    """Degrees multiply to 16, microbatches divide the batch."""
    found = list(space(64))
    assert {(d.data, d.tensor, d.pipeline) for d in found} == {
        (1 << a, 1 << b, 16 >> (a + b)) for a in range(5) for b in range(5) if a + b <= 4
    }
    assert all(64 % (d.data * d.microbatches) == 0 for d in found)


@pytest.mark.parametrize(("batch", "winner"), [(128, (1, 16, 1)), (2048, (2, 8, 1)), (131072, (16, 1, 1))])
def test_measured_winners(batch: int, winner: tuple[int, int, int]) -> None:
    """What was measured as best is chosen: tensor parallel for small batches, data parallel for large ones."""
    chosen = choose(SMALL, batch)
    assert (chosen.degrees.data, chosen.degrees.tensor, chosen.degrees.pipeline) == winner
    assert chosen.peak_bytes <= MOST_BYTES


def test_the_grid_orders_alike() -> None:
    """Over a part of the grid our times go with those of DistIR's simulator."""
    rows = [row for row in rows_of(DATA, "distir_simulated_grid.csv") if row["batch_size"] in ("512", "4096", "65536")]
    rows = [row for row in rows if row["model"] == "mlp-small"]
    theirs = [int(row["batch_size"]) / float(row["sim_throughput_samples_per_s"]) for row in rows]
    assert spearman([ms for ms, _ in grid_rows(rows)], theirs) > 0.95


def test_more_microbatches_hold_less() -> None:
    """Under 1F1B the first stage holds as many microbatches as there are stages, of ever smaller size."""
    cluster = load_cluster(DGX2)
    peaks = [
        run(SMALL, 65536, Degrees(data=1, tensor=1, pipeline=16, microbatches=count), cluster).peak_bytes
        for count in (16, 32, 64)
    ]
    assert peaks == sorted(peaks, reverse=True)
