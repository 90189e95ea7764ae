"""Numbers for people."""

from __future__ import annotations

import pytest

from tap_planner_cli.units import format_bytes, format_ns, format_percent, format_rate, title


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 ns"), (999, "999 ns"), (1_500, "1.500 us"), (12_345_678, "12.35 ms"), (-2 * 10**9, "-2.000 s")],
)
def test_times(value: int, text: str) -> None:
    """Times have four digits and a unit."""
    assert format_ns(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (1 << 30, "1.000 GiB"), (80 << 30, "80.00 GiB"), (5000 << 40, "5,000.0 TiB")]
)
def test_bytes(value: int, text: str) -> None:
    """Bytes have binary units."""
    assert format_bytes(value) == text


@pytest.mark.parametrize(
    ("count", "ns", "text"),
    [(256, 7_872_000, "32,520"), (1, 80_000_000, "12.5"), (1, 4_000_000_000, "0.25"), (1, 0, "-")],
)
def test_rates(count: int, ns: int, text: str) -> None:
    """Rates are per second, with three digits at least; nothing happens often in no time."""
    assert format_rate(count, ns) == text


def test_words() -> None:
    """Percent have a sign; names lose their unit."""
    assert [format_percent(value) for value in (530, -1, None)] == ["+5.30 %", "-0.01 %", "new"]
    assert title("memory_bytes.activations") == "memory: activations"
