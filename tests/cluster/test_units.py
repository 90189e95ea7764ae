"""Quantities: bits are not bytes, GiB are not GB."""

from __future__ import annotations

import pytest

from tap_planner.cluster.units import BANDWIDTH, MEMORY, PEAK, TIME, Quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "quantity", "value"),
    [
        ("300 GB/s", BANDWIDTH, 300_000_000_000),
        ("300GB/s", BANDWIDTH, 300_000_000_000),
        ("1 GiB/s", BANDWIDTH, 1_073_741_824),
        ("400 Gbit/s", BANDWIDTH, 50_000_000_000),
        ("300 Gbps", BANDWIDTH, 37_500_000_000),
        ("537.6 GB/s", BANDWIDTH, 537_600_000_000),
        ("80 GiB", MEMORY, 85_899_345_920),
        ("80 GB", MEMORY, 80_000_000_000),
        ("989.4 TFLOP/s", PEAK, 989_400_000_000_000),
        ("3 us", TIME, 3_000),
        ("0.5 ms", TIME, 500_000),
        ("7 ns", TIME, 7),
    ],
)
def test_value(text: str, quantity: Quantity, value: int) -> None:
    """A quantity is exact in its base unit."""
    assert parse_quantity(text, quantity) == value


@pytest.mark.parametrize(
    "text",
    ["", "3", "us", "3 GB/s", "-3 us", "0 us", "1e3 us", "3  us", "3 us us", "\u0661 us", "0.1 ns", "9999999999 s"],
)
def test_refused(text: str) -> None:
    """Nothing is guessed: no bare numbers, other measures, signs, powers, odd spaces or foreign digits."""
    with pytest.raises(ValueError, match=r"^(is|has) "):
        parse_quantity(text, TIME)
