"""Numbers for people."""

from __future__ import annotations

_TIME = (("s", 10**9), ("ms", 10**6), ("us", 10**3))
_BYTES = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def format_ns(value: int) -> str:
    """``1.235 ms``."""
    return _scaled(value, _TIME, "ns")


def format_bytes(value: int) -> str:
    """``1.50 GiB``."""
    return _scaled(value, _BYTES, "B")


def _scaled(value: int, units: tuple[tuple[str, int], ...], base: str) -> str:
    for unit, size in units:
        if abs(value) >= size:
            scaled = value / size
            digits = 3 if abs(scaled) < 10 else 2 if abs(scaled) < 100 else 1
            return f"{scaled:,.{digits}f} {unit}"
    return f"{value} {base}"


def format_count(value: int) -> str:
    """``1,234``."""
    return f"{value:,}"


def format_rate(count: int, ns: int) -> str:
    """How often a second, as ``1,234`` or ``12.3``; of no time it cannot be said."""
    if not ns:
        return "-"
    rate = count * 1e9 / ns
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def format_percent(basis_points: int | None) -> str:
    """``+5.30 %``; ``new`` where there was nothing before."""
    return "new" if basis_points is None else f"{basis_points / 100:+.2f} %"


def format_quantity(name: str, value: int) -> str:
    """A value whose name ends in its unit (perhaps before a dot)."""
    unit = name.split(".")[0]
    if unit.endswith("_ns"):
        return format_ns(value)
    if unit.endswith("_bytes"):
        return format_bytes(value)
    return format_count(value)


def format_unit(unit: str, value: int) -> str:
    """A value in ``ns`` or ``bytes``."""
    return format_ns(value) if unit == "ns" else format_bytes(value)


def format_signed(name: str, value: int) -> str:
    """A difference with its sign."""
    return ("+" if value > 0 else "") + format_quantity(name, value)


def title(name: str) -> str:
    """``step_ns`` -> ``step time``, ``memory_bytes.activations`` -> ``memory: activations``."""
    head, _, tail = name.partition(".")
    words = {
        "step_ns": "step time",
        "compute_ns": "compute time",
        "communication_ns": "communication time",
        "communication_bytes": "communicated bytes",
        "hidden_ns": "hidden communication",
        "sent_bytes": "sent by a device",
        "memory_bytes": "memory",
    }.get(head, head.replace("_", " "))
    return f"{words}: {tail}" if tail else words


def share(part: int, whole: int) -> str:
    """``12.5 %``."""
    return f"{100 * part / whole:.1f} %" if whole else "-"
