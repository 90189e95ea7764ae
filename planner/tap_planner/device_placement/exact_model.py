"""The scheduling model for CP-SAT: optional intervals of tasks on devices and of transfers on channels."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

from ortools.sat.python import cp_model

from tap_planner.device_placement.problem import Placement, Problem
from tap_planner.device_placement.sequences import interchangeable
from tap_planner.device_placement.timeline import Timeline
from tap_planner.errors import UsageError

__all__ = ["Schedule", "ScheduleModel", "time_unit_ns"]

_MOST_UNITS = 1 << 52
"""Horizons up to here are exact as CP-SAT's bounds, which are floats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What the solver found."""

    makespan_ns: int
    placement: Placement
    start_ns: tuple[int, ...]


def time_unit_ns(problem: Problem) -> int:
    """The largest unit in which all durations are whole."""
    unit = math.gcd(*{duration for row in problem.index.tasks.duration_ns for duration in row})
    unit = math.gcd(unit, *{duration for kind in problem.index.links.durations_ns for duration in kind})
    return max(unit, 1)


class ScheduleModel:
    """Variables and constraints.

    Args:
        problem: what is placed.
        unit_ns: a whole number of these is every duration.
        least_ns: no schedule is shorter.
        most_ns: only schedules that are no longer are looked for; None: any.
    """

    def __init__(self, problem: Problem, *, unit_ns: int, least_ns: int, most_ns: int | None) -> None:
        self.problem, self.unit_ns = problem, unit_ns
        self.model = cp_model.CpModel()
        self.horizon = (self._longest() if most_ns is None else most_ns) // unit_ns
        if self.horizon >= _MOST_UNITS:
            raise UsageError(
                f"a step of up to {self.horizon * unit_ns} ns is too long to be scheduled exactly",
                hint="Give a placement to start from, or coarser times.",
            )
        self.on: list[dict[int, cp_model.IntVar]] = []
        self._place_groups()
        self.makespan = self.model.new_int_var(min(-(-least_ns // unit_ns), self.horizon), self.horizon, "")
        self.starts = [self.model.new_int_var(0, self.horizon, "") for _ in range(problem.num_tasks)]
        self.ends: list[cp_model.LinearExprT] = []
        self._run_tasks()
        self.sends: dict[tuple[int, int], cp_model.IntVar] = {}
        self.carries: dict[tuple[int, int, int], cp_model.IntVar] = {}
        self.on_channel: list[list[tuple[cp_model.IntervalVar, cp_model.IntVar, int]]] = [
            [] for _ in range(problem.index.links.num_channels)
        ]
        for tensor, readers in enumerate(problem.index.tasks.readers):
            self._send(tensor, readers)
        for carried in self.on_channel:
            self.model.add_no_overlap([interval for interval, _, _ in carried])
            self.model.add(sum(present * duration for _, present, duration in carried) <= self.makespan)
        self._limit_memory()
        self._break_symmetry()
        self.model.minimize(self.makespan)

    def _longest(self) -> int:
        """All tasks and transfers one after the other, each as slow as it can be."""
        problem, links = self.problem, self.problem.index.links
        slowest = [max(durations) for durations in zip(*links.durations_ns, strict=True)]
        return int(problem.task_ns.max(axis=1).sum()) + problem.num_devices * sum(slowest)

    def _units(self, duration_ns: int) -> int:
        return duration_ns // self.unit_ns

    def _place_groups(self) -> None:
        for row in self.problem.allowed.tolist():
            variables = {device: self.model.new_bool_var("") for device, allowed in enumerate(row) if allowed}
            self.model.add_exactly_one(variables.values())
            self.on.append(variables)

    def _run_tasks(self) -> None:
        """One task at a time on a device; and what follows for the sums of durations."""
        tasks = self.problem.index.tasks
        running: list[list[cp_model.IntervalVar]] = [[] for _ in range(self.problem.num_devices)]
        work: list[list[cp_model.LinearExprT]] = [[] for _ in running]
        for task, group in enumerate(tasks.group_of):
            parts: list[cp_model.LinearExprT] = []
            for device, present in self.on[group].items():
                duration = self._units(tasks.duration_ns[task][device])
                interval = self.model.new_optional_fixed_size_interval_var(self.starts[task], duration, present, "")
                running[device].append(interval)
                parts.append(present * duration)
            for device, part in zip(self.on[group], parts, strict=True):
                work[device].append(part)
            self.ends.append(self.starts[task] + cp_model.LinearExpr.sum(parts))
            self.model.add(self.ends[task] <= self.makespan)
        for intervals, parts in zip(running, work, strict=True):
            self.model.add_no_overlap(intervals)
            self.model.add(sum(parts) <= self.makespan)

    def _send(self, tensor: int, readers: tuple[int, ...]) -> None:
        """Readers start after the tensor was made and, from another device, was sent."""
        tasks = self.problem.index.tasks
        maker = tasks.producer[tensor]
        producer = tasks.group_of[maker]
        for reader in readers:
            self.model.add(self.starts[reader] >= self.ends[maker])
        apart = [reader for reader in readers if tasks.group_of[reader] != producer]
        for target in range(self.problem.num_devices):
            reading = [reader for reader in apart if target in self.on[tasks.group_of[reader]]]
            sources = [source for source in self.on[producer] if source != target]
            if not reading or not sources:
                continue
            needed = self._any([self.on[group][target] for group in sorted({tasks.group_of[r] for r in reading})])
            start = self.model.new_int_var(0, self.horizon, "")
            self.sends[tensor, target] = start
            self.model.add(start >= self.ends[maker]).only_enforce_if(needed)
            for source in sources:
                self._carry(tensor, source, target, needed, reading)

    def _carry(self, tensor: int, source: int, target: int, needed: cp_model.IntVar, reading: list[int]) -> None:
        """One possible transfer: it occupies its channels if its source makes and its target reads the tensor."""
        tasks, links = self.problem.index.tasks, self.problem.index.links
        made = self.on[tasks.group_of[tasks.producer[tensor]]][source]
        carried = self.model.new_bool_var("")
        self.model.add_bool_or(made.negated(), needed.negated(), carried)
        self.model.add_implication(carried, made)
        self.model.add_implication(carried, needed)
        self.carries[tensor, source, target] = carried
        duration, start = self._units(self.problem.transfer_ns(tensor, source, target)), self.sends[tensor, target]
        interval = self.model.new_optional_fixed_size_interval_var(start, duration, carried, "")
        for channel in links.channels[source][target]:
            self.on_channel[channel].append((interval, carried, duration))
        for reader in reading:
            there = self.on[tasks.group_of[reader]][target]
            self.model.add(self.starts[reader] >= start + duration).only_enforce_if(carried, there)

    def _any(self, variables: list[cp_model.IntVar]) -> cp_model.IntVar:
        """Whether any of them is true."""
        if len(variables) == 1:
            return variables[0]
        found = self.model.new_bool_var("")
        self.model.add_max_equality(found, variables)
        return found

    def _limit_memory(self) -> None:
        problem = self.problem
        fixed: list[int] = problem.fixed_bytes.tolist()
        for device, capacity in enumerate(problem.capacity_bytes.tolist()):
            held = [on[device] * fixed[group] for group, on in enumerate(self.on) if device in on]
            for shared in problem.shared:
                variables = [self.on[group][device] for group in sorted(set(shared.groups)) if device in self.on[group]]
                if variables:
                    held.append(self._any(variables) * shared.num_bytes)
            self.model.add(sum(held) <= capacity)

    def _break_symmetry(self) -> None:
        """Of devices that are alike, a later one is used only by groups after the first group on the one before it."""
        for devices in interchangeable(self.problem):
            for earlier, later in pairwise(devices):
                before: list[cp_model.IntVar] = []
                for on in self.on:
                    if later in on:
                        self.model.add(on[later] <= sum(before))
                        before.append(on[earlier])

    def hint(self, placement: Placement, timeline: Timeline) -> None:
        """Start from a schedule that was played."""
        add = self.model.add_hint
        for group, on in enumerate(self.on):
            for device, variable in on.items():
                add(variable, placement[group] == device)
        for variable, start in zip(self.starts, timeline.start_ns.tolist(), strict=True):
            add(variable, self._units(start))
        sent = {(tensor, source, target): start for tensor, source, target, start, _ in timeline.transfers.tolist()}
        for key, variable in self.carries.items():
            add(variable, key in sent)
            if key in sent:
                add(self.sends[key[0], key[2]], self._units(sent[key]))
        add(self.makespan, self._units(timeline.makespan_ns))

    def read(self, solver: cp_model.CpSolver) -> Schedule:
        """The schedule that the solver holds."""
        return Schedule(
            makespan_ns=self.unit_ns * solver.value(self.makespan),
            placement=tuple(next(d for d, variable in on.items() if solver.boolean_value(variable)) for on in self.on),
            start_ns=tuple(self.unit_ns * solver.value(variable) for variable in self.starts),
        )
