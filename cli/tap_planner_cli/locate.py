"""Finding the model that a plan was made for."""

from __future__ import annotations

from pathlib import Path

from tap_planner.errors import UsageError


def locate_model(given: Path | None, plan: Path, name: str) -> Path:
    """The model file: as given, else beside the plan, else in the current folder, by base name.

    Raises:
        UsageError: it is in none of these places.
    """
    if given is not None:
        return given
    base = Path(name).name
    for folder in (plan.parent, Path()):
        if (folder / base).is_file():
            return folder / base
    raise UsageError(
        f"the model {base!r} of the plan is neither beside {plan} nor in the current folder",
        hint="Give its path with --model.",
    )
