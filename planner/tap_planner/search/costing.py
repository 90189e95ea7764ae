"""The cost model of one configuration: own costs of variables, and how regions are treated in every part."""

from __future__ import annotations

import math

import numpy as np

from tap_planner.cost import optimizer_ns, parameter_memory
from tap_planner.search.configuration import Configuration, reduction_calls
from tap_planner.search.model import Model, PartKind
from tap_planner.search.storage import ParameterProfile
from tap_planner.search.terms import RegionPolicy


class CostedModel:
    """A model under one configuration: own costs of variables, and how terms are weighted.

    Args:
        model: variables and terms.
        configuration: ZeRO level, recompute, microbatches, optimizer.
        repeat: how often the model's graph runs in a step; None: once per microbatch. 1 with the graph of the whole
            batch gives a lower bound: more microbatches never take less time.
    """

    def __init__(self, model: Model, configuration: Configuration, repeat: int | None = None) -> None:
        self.model = model
        self.configuration = configuration
        self.repeat = configuration.microbatches if repeat is None else repeat
        self.policy = model.policy(configuration)
        """Regions as they are in the whole graph."""
        self._own: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._parameter_costs: dict[ParameterProfile, tuple[int, int]] = {}

    # -- regions -----------------------------------------------------------------------------------------------

    def part_policy(self, kind: PartKind, number: int) -> RegionPolicy:
        """Regions as the terms of a part see them.

        A link stands for all later occurrences of its run: its second occurrence counts as a working set only where
        the link is the last.

        Args:
            kind: which part.
            number: the run of a link.
        """
        if kind is PartKind.OUTER:
            return self.policy
        region = int(self.model.region_of[self.model.runs[number].second.start])
        working = self.policy.working | {region} if kind is PartKind.LAST else self.policy.working - {region}
        return RegionPolicy(recomputed=self.policy.recomputed, working=frozenset(working) & self.policy.recomputed)

    # -- own costs ---------------------------------------------------------------------------------------------

    def least_own_bytes(self) -> int:
        """A lower bound of the memory: what parameters need at least, by themselves."""
        model = self.model
        total = sum(int(self.own(v)[1].min()) for v in model.outer.variables)
        for run, link in zip(model.runs, model.links, strict=True):
            total += run.num_links * sum(int(self.own(v)[1].min()) for v in link.variables)
        return total

    def own(self, variable: int) -> tuple[np.ndarray, np.ndarray]:
        """([values] ns, [values] bytes) of a variable by itself: compute, and the parameters stored with it."""
        key = self.model.class_of_variable(variable)
        if key not in self._own:
            is_operator = key < self.model.num_operators
            self._own[key] = self._operator_costs(key) if is_operator else self._shared_parameter_costs(key)
        return self._own[key]

    def _operator_costs(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        model = self.model
        space = model.space.operator(index)
        again = 2 if int(model.region_of[index]) in self.policy.recomputed else 1
        ns = (space.forward_ns * again + space.backward_ns) * self.repeat
        num_bytes = np.zeros_like(ns)
        for profiles, inverse in model.parameters.stored_profiles(index):
            costs = np.array([self._profile_cost(profile) for profile in profiles], dtype=np.int64)[inverse]
            ns = ns + costs[:, 0]
            num_bytes = num_bytes + costs[:, 1]
        return ns, num_bytes

    def _shared_parameter_costs(self, variable: int) -> tuple[np.ndarray, np.ndarray]:
        parameters = self.model.parameters
        parameter = parameters.name_of(variable)
        profiles = [parameters.profile(parameter, state) for state in parameters.states(parameter)]
        costs = np.array([self._profile_cost(profile) for profile in profiles], dtype=np.int64)
        return costs[:, 0], costs[:, 1]

    def _profile_cost(self, profile: ParameterProfile) -> tuple[int, int]:
        """(ns, bytes) of a stored parameter: gradient reduction, ZeRO gathers, optimizer; and its memory."""
        if profile not in self._parameter_costs:
            elements, dtype, trainable, data_axes = profile
            trainable = trainable and self.configuration.training
            self._parameter_costs[profile] = self._parameter_cost(
                elements, dtype, trainable, data_axes if trainable else ()
            )
        return self._parameter_costs[profile]

    def _parameter_cost(
        self, elements: int, dtype: str, trainable: bool, data_axes: tuple[int, ...]
    ) -> tuple[int, int]:
        configuration = self.configuration
        space = self.model.space
        shards = math.prod(space.mesh_shape[axis] for axis in data_axes)
        zero = configuration.zero if data_axes else 0
        memory = parameter_memory(
            elements,
            dtype=dtype,
            shards=shards,
            zero_level=zero,
            precision=configuration.precision,
            optimizer=configuration.optimizer or "sgd",
            trainable=trainable,
        )
        ns = 0
        if trainable:
            ns += optimizer_ns(
                elements,
                shards=shards,
                zero_level=zero,
                precision=configuration.precision,
                optimizer=configuration.optimizer,
                device=space.compute.device,
            )
            payload = elements * space.compute.element_bytes(dtype)
            for kind, count in reduction_calls(zero, configuration.microbatches):
                ns += count * space.collectives.rate_ns(kind, data_axes, payload) if data_axes else 0
        return ns, sum(memory)
