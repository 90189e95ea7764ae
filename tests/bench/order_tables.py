"""Tables of what orders and placers do, from the rows of ``traversal_orders``."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.device_placement import MORE_ORDERS, ORDERS
from tests.bench.order_statistics import choices, correlations, geometric_mean, overhead, regrets, wins

__all__ = ["MODES", "NUMBERING", "OTHERS", "PLACED_BY", "USUAL", "Row", "tables"]

Row = dict[str, object]
MODES = ("training", "inference")
USUAL = "4 V100"
NUMBERING = "lexico-topo, no names"
"""The operators as the file lists them."""
OTHERS = (*MORE_ORDERS, "random:0")
ALL = (*ORDERS, NUMBERING, *OTHERS)
PLACED_BY = ("contiguous:bottleneck", "contiguous:sequential", "earliest-finish")
STEPS = (1.1, 1.3, 2.0)
"""Of parallelism, by which rows are told apart."""


def chosen(rows: Sequence[Row], **wanted: object) -> list[Row]:
    """The rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def by_family(rows: Sequence[Row]) -> list[Row]:
    """Per family: what auto gains on one device, the best order, what a wrong one costs, and the distance to bounds."""
    found: list[Row] = []
    for family in dict.fromkeys(str(row["family"]) for row in rows):
        own = chosen(rows, family=family)
        lost = regrets(own, ORDERS)
        best = min(ORDERS, key=lambda name: lost[name])
        worst = max(ORDERS, key=lambda name: lost[name])
        found.append(
            {
                "family": family,
                "models": len(own),
                "one device / auto": _times(
                    geometric_mean([overhead(row["single_ns"], row["auto_ns"]) for row in own])
                ),
                "best order": best,
                "behind the best": _percent(lost[best]),
                "worst order": worst,
                "behind": _percent(lost[worst]),
                "largest gap": _percent(max(gap(row) for row in own)),
                "best order / auto": _times(geometric_mean([overhead(_best(row), row["auto_ns"]) for row in own])),
                "auto above the bound": _percent(
                    geometric_mean([overhead(row["auto_ns"], row["bound_ns"]) for row in own]) - 1
                ),
            }
        )
    return found


def by_order(rows: Sequence[Row]) -> list[Row]:
    """Per order: how often it is the best (or as good), and what it costs to know no other."""
    found: list[Row] = []
    for name in ALL:
        row: Row = {"order": name}
        for mode in MODES:
            own = chosen(rows, mode=mode)
            row[f"{mode}: best in"] = f"{wins(own, name, ORDERS)} of {len(own)}"
            row[f"{mode}: behind the best"] = _percent(regrets(own, ALL if name not in ORDERS else ORDERS)[name])
        found.append(row)
    return found


def by_cluster(rows: Sequence[Row]) -> list[Row]:
    """Per family: one device over auto, on every cluster, training and inference."""
    found: list[Row] = []
    for family in dict.fromkeys(str(row["family"]) for row in rows):
        line: Row = {"family": family}
        for cluster in dict.fromkeys(str(row["cluster"]) for row in rows):
            parts = [chosen(rows, family=family, cluster=cluster, mode=mode) for mode in MODES]
            gains = [geometric_mean([overhead(row["single_ns"], row["auto_ns"]) for row in own]) for own in parts]
            line[cluster] = " / ".join(f"{gain:.2f}" for gain in gains)
        found.append(line)
    return found


def by_model(rows: Sequence[Row]) -> list[Row]:
    """What CP-SAT says of small problems."""
    return [
        {
            "model": row["model"],
            "mode": row["mode"],
            "cluster": row["cluster"],
            "groups": row["groups"],
            "one device ms": _ms(row["single_ns"]),
            "best order ms": _ms(_best(row)),
            "auto ms": _ms(row["auto_ns"]),
            "CP-SAT ms": _ms(row["exact_ns"]),
            "bound ms": _ms(row["bound_ns"]),
            "proven": row["exact"],
        }
        for row in rows
        if row["exact"]
    ]


def by_placer(rows: Sequence[Row]) -> list[Row]:
    """Per placer: how often it has the best of all unimproved placements, and how far behind it is."""
    found: list[Row] = []
    for name in PLACED_BY:
        line: Row = {"placer": name}
        for mode in MODES:
            own = chosen(rows, mode=mode)
            placers = [_numbers(row["placers_ns"]) for row in own]
            behind = [overhead(each[name], min(each.values())) for each in placers if name in each]
            line[f"{mode}: best in"] = f"{sum(value <= 1.001 for value in behind)} of {len(own)}"
            line[f"{mode}: behind the best"] = _percent(geometric_mean(behind) - 1)
        found.append(line)
    return found


def families_by_order(rows: Sequence[Row], mode: str) -> list[Row]:
    """Per family what each order takes more than the best, all clusters."""
    found: list[Row] = []
    for family in dict.fromkeys(str(row["family"]) for row in rows):
        lost = regrets(chosen(rows, family=family, mode=mode), ORDERS)
        found.append({"family": family, **{name: _percent(value) for name, value in lost.items()}})
    return found


def by_parallelism(rows: Sequence[Row]) -> list[Row]:
    """What there is to gain and to lose where all work is so many times the longest way; on devices that are alike."""
    found: list[Row] = []
    for low, high in zip((1.0, *STEPS), (*STEPS, float("inf")), strict=True):
        for mode in MODES:
            own = [row for row in chosen(rows, mode=mode) if low <= float(str(row["parallelism"])) < high]
            own = [row for row in own if "+" not in str(row["cluster"])]
            if not own:
                continue
            gains = [overhead(row["single_ns"], row["auto_ns"]) for row in own]
            found.append(
                {
                    "parallelism": f"{low} to {high}",
                    "mode": mode,
                    "rows": len(own),
                    "one device / auto": _times(geometric_mean(gains)),
                    "at most": _times(max(gains)),
                    "worst / best order": _times(geometric_mean([1 + gap(row) for row in own])),
                    "best order / auto": _times(geometric_mean([overhead(_best(row), row["auto_ns"]) for row in own])),
                }
            )
    return found


def gap(row: Row) -> float:
    """What the worst order costs more than the best."""
    times = [value for name, value in _numbers(row["orders_ns"]).items() if name in ORDERS]
    return max(times) / min(times) - 1


def _best(row: Row) -> int:
    return min(value for name, value in _numbers(row["orders_ns"]).items() if name in ORDERS)


def _numbers(given: object) -> dict[str, int]:
    """Without what did not fit."""
    assert isinstance(given, dict)
    return {str(name): int(value) for name, value in given.items() if value is not None}


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _times(value: float) -> str:
    return f"{value:.2f}"


def _ms(value: object) -> str:
    return "-" if value is None else f"{int(str(value)) / 1e6:.2f}"


def tables(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """All tables, by caption."""
    usual = chosen(rows, cluster=USUAL)
    return {
        f"training on {USUAL}": by_family(chosen(usual, mode="training")),
        f"inference on {USUAL}": by_family(chosen(usual, mode="inference")),
        "orders, all clusters": by_order(rows),
        **{f"behind the best order, {mode}, all clusters": families_by_order(rows, mode) for mode in MODES},
        "placers, all clusters": by_placer(rows),
        "one device / auto, training / inference": by_cluster(rows),
        "by parallelism": by_parallelism(rows),
        "small problems and CP-SAT": by_model(rows),
        f"rank correlation with features, {USUAL}": correlations(usual),
        "choosing an order for a model not seen before": choices(rows),
    }
