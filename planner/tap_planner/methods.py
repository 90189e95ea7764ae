"""How a model is spread (``--method``): which options go with which method."""

from __future__ import annotations

from collections.abc import Mapping

from tap_planner.errors import UsageError
from tap_planner.plan import DEFAULT_SCHEDULE, PlanOptions

__all__ = ["check_method"]

PLACING, AUTO = "device-placement", "auto"


def check_method(options: PlanOptions) -> None:
    """Refuse options that the method cannot keep.

    Raises:
        UsageError: names the option.
    """
    if options.method not in (PLACING, AUTO):
        for name, given in _of_placing(options).items():
            if given:
                raise UsageError(f"{name} is for device placement", hint=f"Add --method {PLACING}.")
        return
    wrong = _of_sharding(options) | ({} if options.method == AUTO else _of_splitting(options))
    if options.method == AUTO:
        wrong |= {f"--place '{options.places[0]}'" if options.places else "--place": bool(options.places)}
    for name, given in wrong.items():
        if given:
            raise UsageError(
                f"{name} with --method {options.method}: {_REASON[options.method]}",
                hint=f"Leave {name.split()[0]} out, or choose another --method.",
            )


_REASON = {
    PLACING: "every operator is whole, on one device, in one microbatch, and the step is to be short",
    AUTO: "plans of both kinds are compared by their step, and must be able to keep what is asked",
}


def _of_placing(options: PlanOptions) -> Mapping[str, bool]:
    """What says nothing without placements."""
    place = f"--place '{options.places[0]}'" if options.places else "--place"
    return {f"--order {options.traversal_order}": options.traversal_order != "auto", place: bool(options.places)}


def _of_sharding(options: PlanOptions) -> dict[str, bool]:
    """What no placement can keep, whichever is compared with it."""
    return {
        f"--objective {options.objective}": options.objective != "time",
        f"--cost {options.cost}": options.cost != "topology",
        f"--mesh {options.mesh}": options.mesh is not None,
        f"--target {options.target}": options.target is not None,
        "--optimizer-states auto": options.optimizer_states == "auto",
        "--stay-near": options.max_regret_basis_points is not None,
        **({f"--constraint '{options.constraints[0]}'": True} if options.constraints else {}),
    }


def _of_splitting(options: PlanOptions) -> dict[str, bool]:
    """What is about split operators alone."""
    return {
        f"--stages {options.stages}": options.stages != 1,
        f"--schedule {options.schedule}": options.schedule != DEFAULT_SCHEDULE,
        f"--chunks {options.chunks}": options.chunks is not None,
        f"--microbatches {options.microbatches}": options.microbatches not in ("auto", 1),
        f"--zero {options.zero}": options.zero not in ("auto", 0),
        f"--recompute {options.recompute}": options.recompute not in ("auto", "none"),
    }
