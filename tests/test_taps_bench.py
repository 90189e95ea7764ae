"""The bench of what knowing the topology saves: never negative, on the measured grid neither."""

from __future__ import annotations

import pytest

from tests.bench.collective_rows import DATA
from tests.bench.grid_times import read_grid
from tests.bench.taps import CASES, compare


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_savings(name: str) -> None:
    """On two nodes with 25 Gbit/s no plan by topology communicates longer than the one by volume, whatever order the
    axes of that one lie in, priced by the topology or by the grid; the worst order never costs less than the best."""
    row = compare(name, 2, 25, read_grid(DATA))
    assert 0 < row.saving <= row.worst_ties
    assert row.grid is not None and row.grid >= 0


def test_orders_are_priced_as_the_plan_says() -> None:
    """AlexNet on eight nodes: what the table calls the plan by topology is what its own prediction has."""
    row = compare("alexnet", 8, 400, read_grid(DATA))
    assert row.grid is None
    assert row.topology_mesh.endswith("/tp,dp")
    assert row.saving > 0.3
