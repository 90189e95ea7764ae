"""Nothing fits: by how much, which options stand in the way, and with which changes a plan fits.

Whatever is said here has been planned: an option is named as a conflict, and a change as a remedy, where a plan was
found with it. The effort is limited, so that more conflicts and remedies may exist.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from tap_planner.errors import InfeasibleError, Remedy, TapError
from tap_planner.growing import Grown, enlarged, fewest_nodes
from tap_planner.moments import rounds_moments
from tap_planner.plan import RECOMPUTES, Constraint, PlanOptions
from tap_planner.probing import Prober
from tap_planner.requests import PreparedSearch, with_options

if TYPE_CHECKING:
    from tap_planner.search import SearchResult

__all__ = ["diagnose"]

_BF16 = ("--optimizer-states", "bf16")
MOST_RULES = 12
"""With more rules only all of them together are looked at."""


def diagnose(prepared: PreparedSearch, failure: InfeasibleError) -> InfeasibleError:
    """The answer that nothing fits, with what it conflicts with and what helps.

    Args:
        prepared: the request.
        failure: the answer to it.
    """
    options = replace(prepared.options, objective="time")  # whether a plan fits does not depend on what is least
    return _Diagnosis(replace(prepared, options=options), failure, prepared.options.objective).error()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Limit:
    """What the user has fixed."""

    kind: str
    shown: str
    """As the user would write it."""
    drop: Callable[[PlanOptions], PlanOptions]
    """Options without it."""


class _Diagnosis:
    def __init__(self, prepared: PreparedSearch, failure: InfeasibleError, objective: str) -> None:
        self._with = "" if objective == "time" else " with --objective time"
        self._also: tuple[str, ...] = ()
        if prepared.options.optimizer_states == "auto" and rounds_moments(prepared.options):
            self._also = _BF16  # what fits with float32 moments fits with these
            prepared = with_options(prepared, replace(prepared.options, optimizer_states="bf16"))
        self._prepared = prepared
        self._options = prepared.options
        self._failure = failure
        self._prober = Prober()
        self._remedies: list[Remedy] = []
        self._conflicts: list[str] = []
        self._together = ""

    def error(self) -> InfeasibleError:
        """Look for everything, what needs no other machine first."""
        self._settings()
        if self._prepared.cluster.node_groups and not self._options.allow_idle:
            options = replace(self._options, allow_idle=True)
            self._add("idle", options, "Add --allow-idle", ("--allow-idle",))
        same = sorted(self._remedies, key=lambda remedy: remedy.objective_ns)
        self._remedies = []
        if self._options.optimizer_states == "fp32" and rounds_moments(self._options):
            options = replace(self._options, optimizer_states="bf16")
            self._add("states", options, f"Add {' '.join(_BF16)} (AdamW's moments are rounded)", _BF16)
        same += self._remedies  # last of those for the same machine: it changes what is computed
        self._remedies = []
        self._nodes()
        self._memory()
        failure = self._failure
        return InfeasibleError(
            f"{failure.message}{self._said()}",
            hint=same[0].text if same else failure.hint,
            least_memory_bytes=failure.least_memory_bytes,
            limit_bytes=failure.limit_bytes,
            conflicts=tuple(self._conflicts),
            remedies=(*same, *sorted(self._remedies, key=lambda remedy: remedy.objective_ns)),
        )

    def _said(self) -> str:
        """How much is missing, and what conflicts."""
        missing = self._failure.least_memory_bytes - self._failure.limit_bytes
        text = f", {_bytes(missing)} {'is' if missing == 1 else 'are'} missing" if missing > 0 else ""
        if self._conflicts:
            several = len(self._conflicts) > 1
            verb, which = ("each conflict", "any of them") if several else ("conflicts", "it")
            return f"{text}; {' and '.join(self._conflicts)} {verb} with that limit: without {which} a plan fits"
        if self._together:
            return f"{text}; {self._together} together conflict with that limit: without them a plan fits"
        return text

    # -- probes ------------------------------------------------------------------------------------------------

    def _plan(self, options: PlanOptions, grown: Grown | None = None) -> SearchResult | None:
        try:
            cluster = None if grown is None else grown.cluster
            return self._prober.plan(with_options(self._prepared, options, cluster))
        except TapError:
            return None

    def _add(self, kind: str, options: PlanOptions, text: str, given: tuple[str, ...]) -> bool:
        """List a change if a plan fits with it."""
        found = self._plan(options)
        if found is not None:
            self._list(kind, text, given, found)
        return found is not None

    def _list(self, kind: str, text: str, given: tuple[str, ...], found: SearchResult) -> None:
        also = f" with {' '.join(self._also)}" if self._also else ""
        self._remedies.append(
            Remedy(
                kind=kind,
                text=f"{text}{also}: a step of {_milliseconds(found.objective_ns)} ms or less{self._with}",
                options=(*given, *self._also) if given else (),
                objective_ns=found.objective_ns,
                memory_bytes=found.memory_bytes,
            )
        )

    # -- what the user has fixed -------------------------------------------------------------------------------

    def _limits(self) -> Iterator[_Limit]:
        options = self._options
        if options.mode == "train" and options.zero not in ("auto", 3):
            yield _Limit(kind="zero", shown=f"--zero {options.zero}", drop=lambda left: replace(left, zero="auto"))
        if options.mode == "train" and options.recompute not in ("auto", RECOMPUTES[-1]):
            shown = f"--recompute {options.recompute}"
            yield _Limit(kind="recompute", shown=shown, drop=lambda left: replace(left, recompute="auto"))
        if options.microbatches != "auto":
            shown = f"--microbatches {options.microbatches}"
            yield _Limit(kind="microbatches", shown=shown, drop=lambda left: replace(left, microbatches="auto"))
        if options.mesh is not None and not options.constraints:  # rules name the axes of the mesh
            shown = f"--mesh {options.mesh}"
            yield _Limit(kind="mesh", shown=shown, drop=lambda left: replace(left, mesh=None))
        if len(options.constraints) <= MOST_RULES:
            for rule in options.constraints:
                yield _Limit(kind="rule", shown=rule.shown, drop=partial(_without_rule, rule=rule))
        elif options.constraints:
            yield _Limit(kind="rule", shown="the rules", drop=lambda left: replace(left, constraints=()))
        if options.target is not None:
            shown = f"--target {options.target}"
            yield _Limit(kind="target", shown=shown, drop=lambda left: replace(left, target=None))

    def _settings(self) -> None:
        """Leave out what the user has fixed, one after the other; if nothing helps, the fewest of it."""
        limits = list(self._limits())
        for limit in limits:
            found = self._plan(limit.drop(self._options))
            if found is not None:
                self._conflicts.append(limit.shown)
                self._loosen(limit, found)
        if self._conflicts or len(limits) < 2:
            return
        found = self._plan(self._without(limits))
        if found is None:
            return
        for limit in tuple(limits):
            others = [other for other in limits if other is not limit]
            again = self._plan(self._without(others))
            if again is not None:
                limits, found = others, again
        self._together = " and ".join(limit.shown for limit in limits)
        self._list("together", f"Leave {self._together} out together", (), found)

    def _without(self, limits: Sequence[_Limit]) -> PlanOptions:
        options = self._options
        for limit in limits:
            options = limit.drop(options)
        return options

    def _loosen(self, limit: _Limit, found: SearchResult) -> None:
        """List the least change of an option without which a plan fits."""
        options = self._options
        if limit.kind == "zero" and isinstance(options.zero, int):
            for level in range(options.zero + 1, 4):
                given = ("--zero", str(level))
                if self._add("zero", replace(options, zero=level), _instead(given, limit), given):
                    return
        elif limit.kind == "recompute":
            for setting in RECOMPUTES[RECOMPUTES.index(options.recompute) + 1 :]:
                given = ("--recompute", setting)
                if self._add("recompute", replace(options, recompute=setting), _instead(given, limit), given):
                    return
        elif limit.kind == "microbatches":
            given = ("--microbatches", str(found.decisions.microbatches))
            self._list("microbatches", _instead(given, limit), given, found)
        elif limit.kind == "mesh":
            given = ("--mesh", str(found.mesh))
            self._list("mesh", _instead(given, limit), given, found)
        else:
            self._list(limit.kind, f"Drop {limit.shown}", (), found)
            return
        if not any(remedy.kind == limit.kind for remedy in self._remedies):  # only a mixture of settings fits
            given = (f"--{limit.kind}", "auto")
            self._list(limit.kind, _instead(given, limit), given, found)

    # -- another machine ---------------------------------------------------------------------------------------

    def _memory(self) -> None:
        """So much memory per device that a plan fits."""
        least = self._failure.least_memory_bytes
        if least <= self._failure.limit_bytes:
            return
        for wanted in self._wanted_bytes(least):
            found = self._plan(replace(self._options, max_memory_bytes=wanted))
            if found is None:
                continue
            more = _more(wanted - self._failure.limit_bytes)
            option = f"--max-memory {wanted}B"
            known = self._prepared.cluster.usable_memory_bytes
            text = f"Use {option} ({more})"
            if wanted > known:
                text = f"Use devices with {wanted} bytes for the plan ({more}; {option} plans for them)"
            self._list("memory", text, ("--max-memory", f"{wanted}B"), found)
            return

    def _wanted_bytes(self, least: int) -> Iterator[int]:
        """The least that any plan needs, what one plan takes that needs little, and a little more than that."""
        yield least
        taken = self._prober.least_bytes(self._prepared)
        if taken is not None and taken > least:
            yield taken
            yield taken + taken // 100

    def _nodes(self) -> None:
        """So many more nodes of the same kind that a plan fits."""
        failure = self._failure

        def plan(nodes: int) -> SearchResult | None:
            grown = enlarged(self._prepared, nodes)
            return None if grown is None else self._plan(grown.options, grown)

        nodes = fewest_nodes(self._prepared, failure.least_memory_bytes, failure.limit_bytes, plan)
        if nodes is None:
            return
        count, found = nodes
        grown = enlarged(self._prepared, count)
        assert grown is not None
        self._list("nodes", grown.text, grown.given, found)


def _without_rule(options: PlanOptions, rule: Constraint) -> PlanOptions:
    return replace(options, constraints=tuple(other for other in options.constraints if other != rule))


def _instead(given: tuple[str, ...], limit: _Limit) -> str:
    also = " (--no-zero)" if limit.shown == "--zero 0" else ""
    return f"Use {' '.join(given)} instead of {limit.shown}{also}"


def _more(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB more" if num_bytes >= 10**7 else f"{_bytes(num_bytes)} more"


def _milliseconds(nanoseconds: int) -> str:
    """Rounded up: what is promised is "or less"."""
    return f"{-(-nanoseconds // 1000) / 1000:.3f}" if nanoseconds < 10**9 else f"{-(-nanoseconds // 10**6)}"


def _bytes(count: int) -> str:
    return f"{count} byte" if count == 1 else f"{count} bytes"
