"""Custom rules while a graph is bound: which operators get one, and whether it agrees with what the file declares."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence

from tap_planner.errors import UnsupportedGraphError
from tap_planner.graph.values import Form
from tap_planner.operators import CUSTOM_RULE, CustomRule, TensorType, rule_to_text

__all__ = ["CustomRules"]


class CustomRules:
    """The rules that a model is bound with.

    Args:
        rules: at most one per operator type.
    """

    def __init__(self, rules: Sequence[CustomRule]) -> None:
        self._rules = {rule.type: rule for rule in rules}
        self._texts = {rule.type: rule_to_text(rule) for rule in rules}
        self._used: set[str] = set()

    @property
    def used(self) -> tuple[str, ...]:
        """Types to which a rule was given, sorted."""
        return tuple(sorted(self._used))

    def __contains__(self, type: str) -> bool:
        return type in self._rules

    def attach(self, form: Form) -> None:
        """Put the rule of an operator, if it has one, among its attributes.

        Raises:
            UnsupportedGraphError: the file itself has an attribute of the reserved name.
        """
        if CUSTOM_RULE in form.attributes:
            raise UnsupportedGraphError(
                f"attribute {CUSTOM_RULE!r} in the file, a name that is reserved",
                hint="give the rule of an operator with --custom-rule FILE",
            )
        if form.type in self._texts:
            form.attributes[CUSTOM_RULE] = self._texts[form.type]
            self._used.add(form.type)

    def infer(self, type: str, infer: Callable[[], tuple[TensorType, ...]]) -> tuple[TensorType, ...]:
        """Output types by the rule.

        Raises:
            UnsupportedGraphError: the rule does not fit the operator; the message names where it stands.
        """
        try:
            return infer()
        except UnsupportedGraphError as error:
            raise UnsupportedGraphError(f"{self._where(type)}: {error.message}", hint=error.hint) from error

    def check_declared(
        self,
        type: str,
        names: Sequence[str],
        types: Sequence[TensorType],
        declared: Callable[[str], TensorType | None],
    ) -> None:
        """Compare the types that a rule gives with those that the file declares.

        Raises:
            UnsupportedGraphError: they contradict each other.
        """
        for index, (name, found) in enumerate(zip(names, types, strict=True)):
            expected = declared(name)
            if expected is not None and expected != found:
                raise UnsupportedGraphError(
                    f"{self._where(type)}: output {index} ({name!r}) is {_shown(found)} by the rule, "
                    f"the file declares {_shown(expected)}",
                    hint="correct the outputs, sizes or dtype of the rule",
                )

    def _where(self, type: str) -> str:
        source = self._rules[type].source
        return f"custom rule in {source}" if source else "custom rule of the plan"

    def unused(self, types: Collection[str]) -> tuple[str, ...]:
        """Warnings about rules that no operator got.

        Args:
            types: operator types of the model.
        """
        found: list[str] = []
        for type in sorted(set(self._rules) - self._used):
            near = difflib.get_close_matches(type, sorted(types), n=1, cutoff=0.6)
            meant = f" (did you mean {near[0]!r}?)" if near else ""
            found.append(f"{self._where(type)}: it fits no operator of the model{meant}")
        return tuple(found)


def _shown(type_: TensorType) -> str:
    return f"{type_.dtype}{list(type_.shape)}"
