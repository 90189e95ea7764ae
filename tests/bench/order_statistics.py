"""What figures of orders have in common: regrets, wins, rank correlations, and rules tried on models left out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tap_planner.device_placement import ORDERS
from tests.bench.distir import spearman

__all__ = ["choices", "correlations", "geometric_mean", "overhead", "regrets", "wins"]

Row = Mapping[str, object]
FEATURES = ("groups", "depth", "width", "branching", "forks", "parallelism", "comm")
AS_GOOD = 1.001
"""Within a thousandth of the best an order counts as the best."""


def overhead(value: object, best: object) -> float:
    """One time over another."""
    return float(str(value)) / float(str(best))


def geometric_mean(values: Sequence[float]) -> float:
    """1 of nothing."""
    return math.exp(sum(math.log(value) for value in values) / len(values)) if values else 1.0


def behind(row: Row, orders: Sequence[str]) -> dict[str, float]:
    """Per order its makespan over that of the best of them; one that does not fit counts twice the worst."""
    given = row["orders_ns"]
    assert isinstance(given, Mapping)
    times = {name: given[name] for name in orders if given[name] is not None}
    best, worst = min(times.values()), max(times.values())
    return {name: times.get(name, 2 * worst) / best for name in orders}


def regrets(rows: Sequence[Row], orders: Sequence[str]) -> dict[str, float]:
    """Per order how much more than the best of them it takes, in the geometric mean."""
    each = [behind(row, orders) for row in rows]
    return {name: geometric_mean([found[name] for found in each]) - 1 for name in orders}


def wins(rows: Sequence[Row], order: str, orders: Sequence[str]) -> int:
    """How often an order is as good as the best of ``orders`` and itself."""
    known = tuple(dict.fromkeys((*orders, order)))
    return sum(behind(row, known)[order] <= AS_GOOD for row in rows)


def correlations(rows: Sequence[Row]) -> list[dict[str, object]]:
    """Spearman's rank correlation of every feature with what orders and placing change, training and inference."""
    found: list[dict[str, object]] = []
    for feature in FEATURES:
        line: dict[str, object] = {"feature": feature}
        for mode in ("training", "inference"):
            own = [row for row in rows if row["mode"] == mode]
            values = [float(str(row[feature])) for row in own]
            for caption, measure in _MEASURES.items():
                line[f"{mode}: {caption}"] = f"{_correlation(values, [measure(row) for row in own]):+.2f}"
        found.append(line)
    return found


def _correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return spearman(one, other) if len(set(one)) > 1 and len(set(other)) > 1 else 0.0


_MEASURES: Mapping[str, Callable[[Row], float]] = {
    "one device / auto": lambda row: overhead(row["single_ns"], row["auto_ns"]),
    "worst / best order": lambda row: max(behind(row, ORDERS).values()),
    "topo / best": lambda row: behind(row, ORDERS)["topo"],
}


# -- rules -------------------------------------------------------------------------------------------------------


def choices(rows: Sequence[Row]) -> list[dict[str, object]]:
    """How far behind the best order a model is whose order was chosen by what is known of the other models.

    ``one order``: that with the least regret on the others; ``by mode``: the same of rows of the same mode;
    ``by family``: of the same mode and family, where there is another model of it; ``by one feature``: one of two
    orders below and above a threshold, the pair, the feature and the threshold that are best on the others, by mode;
    ``two``, ``three orders``: the best of so many, the set that is best on the others.
    """
    found: dict[str, list[float]] = {}
    for model in dict.fromkeys(str(row["model"]) for row in rows):
        for mode in ("training", "inference"):
            own = _Table([row for row in rows if row["model"] == model and row["mode"] == mode])
            others = [row for row in rows if row["model"] != model]
            alike = [row for row in others if row["mode"] == mode]
            if not own.rows or not alike:
                continue
            kin = [row for row in alike if row["family"] == own.rows[0]["family"]]
            for rule, known in (("one order", others), ("by mode", alike), ("by family", kin or alike)):
                found.setdefault(rule, []).extend(own.cost[:, _Table(known).best()])
            found.setdefault("by one feature", []).extend(_Stump(_Table(alike)).cost(own))
            for rule, size in (("two orders", 2), ("three orders", 3)):
                subset = _Table(alike).best_set(size)
                found.setdefault(rule, []).extend(own.cost[:, subset].min(axis=1))
            found.setdefault("any order, the mean of six", []).extend(own.cost.mean(axis=1))
            found.setdefault("the worst order", []).extend(own.cost.max(axis=1))
    return [
        {"rule": rule, "behind the best": f"{100 * (math.exp(float(np.mean(costs))) - 1):.1f} %"}
        for rule, costs in found.items()
    ]


class _Table:
    """Rows as an array: the logarithm of what each order takes more than the best."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.cost = np.log([[behind(row, ORDERS)[name] for name in ORDERS] for row in rows]).reshape(-1, len(ORDERS))

    def best(self) -> int:
        """The order with the least mean; ties: the first."""
        return int(self.cost.mean(axis=0).argmin())

    def best_set(self, size: int) -> list[int]:
        """The orders of which the best is best in the mean."""
        sets = [list(each) for each in itertools.combinations(range(len(ORDERS)), size)]
        return min(sets, key=lambda each: float(self.cost[:, each].min(axis=1).mean()))

    def feature(self, name: str) -> np.ndarray:
        """[rows]."""
        return np.asarray([float(str(row[name])) for row in self.rows])


class _Stump:
    """A feature, a threshold, and an order on either side of it."""

    def __init__(self, known: _Table) -> None:
        options: list[tuple[float, str, float, int, int]] = []
        for name in FEATURES:
            values = known.feature(name)
            for threshold in sorted(set(values.tolist()))[1:]:
                low, high = known.cost[values < threshold].sum(axis=0), known.cost[values >= threshold].sum(axis=0)
                options.append((float(low.min() + high.min()), name, threshold, int(low.argmin()), int(high.argmin())))
        _, self.name, self.threshold, self.low, self.high = min(options)

    def cost(self, table: _Table) -> list[float]:
        """What it costs on other rows."""
        side = np.where(table.feature(self.name) < self.threshold, self.low, self.high)
        return table.cost[np.arange(len(side)), side].tolist()
