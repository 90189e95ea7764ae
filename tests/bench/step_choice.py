"""How good the configuration is that the prediction chooses: measured regret within groups of measured steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tests.bench.measured_steps import MeasuredStep

Prediction = tuple[MeasuredStep, int]
"""A measured step, and its prediction in ns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One group: the same model, devices and batch in two or more configurations."""

    best: MeasuredStep
    chosen: MeasuredStep
    by_rule: MeasuredStep
    """By the rule of thumb: largest dp, then largest micro-batch."""

    @property
    def regret(self) -> float:
        """By how much the chosen step is slower than the best, as measured."""
        return self.chosen.measured_ns / self.best.measured_ns - 1

    @property
    def rule_regret(self) -> float:
        """The same of the rule of thumb."""
        return self.by_rule.measured_ns / self.best.measured_ns - 1


def choices(predictions: Iterable[Prediction]) -> tuple[Choice, ...]:
    """What is chosen in each group, by the least prediction.

    Args:
        predictions: of all configurations.
    """
    groups: defaultdict[tuple[object, ...], list[Prediction]] = defaultdict(list)
    for step, ns in predictions:
        groups[step.shape, step.num_devices, step.global_batch].append((step, ns))
    return tuple(
        Choice(
            best=min(steps, key=lambda step: step.measured_ns),
            chosen=min(group, key=lambda prediction: prediction[1])[0],
            by_rule=max(steps, key=lambda step: (step.dp, step.micro_batch)),
        )
        for group in groups.values()
        if len(group) > 1
        for steps in [[step for step, _ in group]]
    )


def choice_rows(found: Sequence[Choice]) -> list[dict[str, object]]:
    """How often the choice is within 5 % of the best, and the mean regret; the planner's and the rule's.

    Args:
        found: the groups.
    """

    def row(name: str, regret: Callable[[Choice], float]) -> dict[str, object]:
        regrets = [regret(choice) for choice in found]
        return {
            "chosen by": name,
            "groups": len(regrets),
            "within_5_percent": round(100 * sum(value <= 0.05 for value in regrets) / len(regrets), 1),
            "mean_regret_percent": round(100 * sum(regrets) / len(regrets), 2),
        }

    if not found:
        return []
    return [
        row("prediction", lambda choice: choice.regret),
        row("largest dp, then micro-batch", lambda choice: choice.rule_regret),
    ]
