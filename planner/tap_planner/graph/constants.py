"""Values that depend on no input and no parameter, computed when somebody asks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from tap_planner.errors import ModelError
from tap_planner.operators import TensorType

MAX_WORK = 1 << 32
"""Elements that may be made to compute one constant."""
Evaluator = Callable[[list["np.ndarray | None"]], list[np.ndarray]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a large constant is computed from other constants."""

    evaluate: Evaluator
    inputs: tuple[str | None, ...]
    """Names of constants; None for an absent operand."""
    output: int
    """Which result of ``evaluate``."""
    outside: TensorType | None = None
    """For a value that lies outside the model file: its type."""
    work: int = 0
    """Elements that are made (a product of matrices counts each as often as it adds to it)."""


Substitute = Callable[[str, TensorType], "np.ndarray | None"]
"""Gives a value for a constant that lies outside the model file, or None to read it."""


def work_of(name: str, recipes: Mapping[str, Recipe]) -> int:
    """Elements that are made to compute a constant, with all that it is computed from."""
    total, pending, seen = 0, [name], {name}
    while pending:
        recipe = recipes.get(pending.pop())
        if recipe is None:
            continue
        total += recipe.work
        for operand in recipe.inputs:
            if operand is not None and operand not in seen:
                seen.add(operand)
                pending.append(operand)
    return total


class ConstantStore:
    """Small constants by value, large ones by recipe.

    Args:
        arrays: values known at once.
        recipes: how the others are computed, each from names of either mapping.
        keys: a text for each name that is equal for equal constants.
    """

    __slots__ = ("_arrays", "_keys", "_recipes")

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray] | None = None,
        recipes: Mapping[str, Recipe] | None = None,
        keys: Mapping[str, str] | None = None,
    ) -> None:
        self._arrays = dict(arrays or {})
        self._recipes = dict(recipes or {})
        self._keys = dict(keys or {})

    def __contains__(self, name: object) -> bool:
        return name in self._arrays or name in self._recipes

    def small(self, name: str) -> np.ndarray | None:
        """The value if it is held ready, else None (nothing is computed)."""
        return self._arrays.get(name)

    def key(self, name: str) -> str:
        """A text that is equal for constants that are equal by construction."""
        return self._keys.get(name, name)

    def outside(self) -> tuple[str, ...]:
        """Constants whose values lie outside the model file (external data of a rotary table, say)."""
        return tuple(name for name, recipe in self._recipes.items() if recipe.outside is not None)

    def value(self, name: str, substitute: Substitute | None = None) -> np.ndarray:
        """The value of a constant; large ones are computed and not kept.

        Args:
            name: of the constant.
            substitute: asked for each value outside the model file; without it the file beside the model is read.

        Raises:
            KeyError: no constant has this name.
            ModelError: a value outside the model file is absent, or the constant is too large to be made.
        """
        if work_of(name, self._recipes) > MAX_WORK:
            raise ModelError(f"constant {name!r} is too large to be computed")
        done: dict[str, np.ndarray] = {}
        pending = [name]
        while pending:
            current = pending[-1]
            if current in done:
                pending.pop()
            elif current in self._arrays:
                done[pending.pop()] = self._arrays[current]
            else:
                recipe = self._recipes[current]
                missing = [operand for operand in recipe.inputs if operand is not None and operand not in done]
                if missing:
                    pending.extend(missing)
                    continue
                given = substitute(current, recipe.outside) if substitute and recipe.outside else None
                if given is not None:
                    done[pending.pop()] = given
                    continue
                operands = [None if operand is None else done[operand] for operand in recipe.inputs]
                done[pending.pop()] = recipe.evaluate(operands)[recipe.output]
        return done[name]

    def restricted(self, names: Iterable[str]) -> ConstantStore:
        """A store with only ``names`` and what they are computed from."""
        keep: set[str] = set()
        pending = list(names)
        while pending:
            name = pending.pop()
            if name in keep:
                continue
            keep.add(name)
            if name in self._recipes:
                pending.extend(operand for operand in self._recipes[name].inputs if operand is not None)
        return ConstantStore(
            {name: value for name, value in self._arrays.items() if name in keep},
            {name: recipe for name, recipe in self._recipes.items() if name in keep},
            {name: key for name, key in self._keys.items() if name in keep},
        )
