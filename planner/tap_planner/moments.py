"""The element type of AdamW's moments: where a request has a choice, and where it may not ask for bfloat16."""

from __future__ import annotations

from tap_planner.errors import UsageError
from tap_planner.plan import OPTIMIZER_STATES, PlanOptions

__all__ = ["check_moments", "rounds_moments"]


def rounds_moments(options: PlanOptions) -> bool:
    """Whether the element type of the moments can be chosen: there are some, and bfloat16 is a sensible one.

    At fp64, which is for checking numbers, it is not; nor where a target has no such optimizer.
    """
    from tap_planner.search import TARGETS

    if options.mode != "train" or options.optimizer != "adamw" or options.precision == "fp64":
        return False
    if options.target is None:
        return True
    target = TARGETS[options.target]
    known = {*target.zero_levels, *target.zero_levels_with_tensor} & set(target.zero_levels_with_bf16_states)
    return bool(known) if options.zero == "auto" else options.zero in known


def check_moments(options: PlanOptions) -> None:
    """Refuse types that there are not, and bfloat16 moments where there are none or where they would spoil what the
    precision is for.

    Raises:
        UsageError: they are asked for all the same.
    """
    if options.optimizer_states not in (*OPTIMIZER_STATES, "auto"):
        raise UsageError(
            f"optimizer states {options.optimizer_states!r}, expected {', '.join(OPTIMIZER_STATES)} or auto",
            hint="Leave --optimizer-states out.",
        )
    if options.optimizer_states != "bf16":
        return
    if options.mode != "train":
        raise UsageError(
            "--optimizer-states bf16: inference has no optimizer",
            hint="Leave --optimizer-states out, or use --mode train.",
        )
    if options.optimizer != "adamw":
        raise UsageError(
            f"--optimizer-states bf16: --optimizer {options.optimizer} keeps no moments",
            hint="Leave --optimizer-states out, or use --optimizer adamw.",
        )
    if options.precision == "fp64":
        raise UsageError(
            "--optimizer-states bf16: --precision fp64 is for checking numbers, and keeps moments in float64",
            hint="Leave --optimizer-states out, or use --precision fp32 or bf16.",
        )
