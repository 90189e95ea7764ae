"""Predicted step times against measured ones, of training without pipeline.

Every measured row is planned as it ran (mesh, micro-batch, ZeRO level and recomputation given, splits by rules) and
predicted by the planner with the catalogue's constants. ``docs/measured-steps.md`` holds the results.

    python -m tests.bench.step_times [--data DIR] [--json build/steps.json] [--rows] [--markdown]
        [--refit [--attention]]

``--data`` reads the tables from another folder; those it lacks are left out. ``--refit`` fits the constants anew on the
rows that ``step_fit`` names, with ``--attention`` also what fused attention reaches.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.bench.instances import markdown, table, write_json
from tests.bench.measured_steps import (
    FSDP,
    ITERATIONS,
    MEASUREMENTS,
    THROUGHPUT,
    MeasuredStep,
    read_fsdp,
    read_iterations,
    read_throughput,
)
from tests.bench.planned_steps import plan_step
from tests.bench.step_choice import choice_rows, choices
from tests.bench.step_constants import Fitted
from tests.bench.step_features import features_of
from tests.bench.step_fit import is_fitted_on, refit

READERS: dict[str, Callable[[Path], tuple[MeasuredStep, ...]]] = {
    ITERATIONS: read_iterations,
    THROUGHPUT: read_throughput,
    FSDP: read_fsdp,
}
OUTLIER_PERCENT = 15.0
"""Rows further off than this are listed one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """A measured step and its prediction."""

    step: MeasuredStep
    ns: int
    fits: bool

    @property
    def error_percent(self) -> float:
        """Above 0: predicted too slow."""
        return 100 * (self.ns / self.step.measured_ns - 1)

    def row(self) -> dict[str, object]:
        """For tables."""
        return {
            "table": self.step.table,
            "part": self.step.part,
            "row": self.step.label,
            "measured_ms": round(self.step.measured_ns / 1e6, 1),
            "predicted_ms": round(self.ns / 1e6, 1),
            "error_percent": round(self.error_percent, 1),
            "fits": self.fits,
        }


def read_steps(data: Path) -> tuple[MeasuredStep, ...]:
    """All rows of the tables that a folder has.

    Args:
        data: the folder.
    """
    return tuple(step for name, read in READERS.items() if (data / name).exists() for step in read(data))


def refitted(steps: Iterable[MeasuredStep], models: Path, *, attention: bool = False) -> Fitted:
    """Constants fitted on those of the rows that they are fitted on.

    Args:
        steps: rows.
        models: folder of the model files.
        attention: whether fused attention has a share of its own.
    """
    rows = [(step, features_of(plan_step(step, models))) for step in steps if is_fitted_on(step)]
    return refit(rows, attention=attention)


def predict_steps(steps: Iterable[MeasuredStep], models: Path, fitted: Fitted) -> tuple[Predicted, ...]:
    """Plan and predict every row.

    Args:
        steps: rows.
        models: folder of the model files.
        fitted: constants instead of the catalogue's; empty: none.
    """
    found: list[Predicted] = []
    for step in steps:
        planned = plan_step(step, models, fitted)
        found.append(Predicted(step=step, ns=planned.predicted_ns(), fits=planned.fits))
    return tuple(found)


def summary(predictions: Iterable[Predicted]) -> list[dict[str, object]]:
    """One row for each part of each table.

    Args:
        predictions: of all rows.
    """
    parts: defaultdict[tuple[str, str], list[Predicted]] = defaultdict(list)
    for predicted in predictions:
        parts[predicted.step.table, predicted.step.part].append(predicted)
    return [_summary_row(*part, found) for part, found in parts.items()]


def _summary_row(name: str, part: str, found: Sequence[Predicted]) -> dict[str, object]:
    errors = [predicted.error_percent for predicted in found]
    sizes = [abs(error) for error in errors]
    return {
        "table": name.removesuffix(".csv"),
        "part": part,
        "rows": len(found),
        "MAPE": round(statistics.mean(sizes), 1),
        "median": round(statistics.median(sizes), 1),
        "bias": round(statistics.mean(errors), 1),
        "largest": round(max(sizes), 1),
        "within_10_percent": sum(size <= 10 for size in sizes),
        "out_of_memory": sum(not predicted.fits for predicted in found),
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, object]:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=MEASUREMENTS, help="folder of the measured tables")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--refit", action="store_true", help="fit the constants on the rows of --data")
    parser.add_argument("--attention", action="store_true", help="with --refit: a share for fused attention, too")
    parser.add_argument("--rows", action="store_true", help="print every row, not only those far off")
    parser.add_argument("--markdown", action="store_true", help="print tables as Markdown")
    options = parser.parse_args(arguments)
    steps = read_steps(options.data)
    with tempfile.TemporaryDirectory() as folder:
        fitted = refitted(steps, Path(folder), attention=options.attention) if options.refit else {}
        predictions = predict_steps(steps, Path(folder), fitted)
    chosen = choices((each.step, each.ns) for each in predictions if each.step.table == ITERATIONS)
    listed = [each.row() for each in predictions if options.rows or abs(each.error_percent) > OUTLIER_PERCENT]
    result: dict[str, object] = {
        "constants": {name: asdict(constants) for name, constants in fitted.items()},
        "summary": summary(predictions),
        "choice": choice_rows(chosen),
        "missed": [
            {
                "group": f"{choice.best.shape.name} n{choice.best.num_devices} b{choice.best.global_batch}",
                "best": choice.best.label,
                "chosen": choice.chosen.label,
                "regret_percent": round(100 * choice.regret, 1),
            }
            for choice in chosen
            if choice.regret > 0.05
        ],
        "rows": [each.row() for each in predictions],
    }
    show = markdown if options.markdown else table
    for name, constants in fitted.items():
        print(name, constants, file=sys.stderr)
    for rows in (result["summary"], result["choice"], result["missed"], listed):
        assert isinstance(rows, list)
        print(show(rows) + "\n")
    write_json(options.json, result)
    return result


if __name__ == "__main__":
    main()
