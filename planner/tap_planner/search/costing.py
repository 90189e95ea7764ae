"""The cost model of one configuration: own costs of variables, and how regions are treated in every part."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from tap_planner.cost import PriceList, parameter_memory, reduction_calls, unsharded_bytes, workspace_bytes
from tap_planner.schedule import BUCKET_ELEMENTS
from tap_planner.search.configuration import Configuration, Recompute
from tap_planner.search.model import Model, PartKind
from tap_planner.search.results import result_bytes
from tap_planner.search.storage import ParameterProfile, StoredProfiles
from tap_planner.search.terms import UNREACHABLE, RegionPolicy

ParameterCosts = Mapping[int, tuple[np.ndarray, np.ndarray]]
"""By data axes (as bits), [ZeRO settings, values] ns and bytes."""


class CostedModel:
    """A model under one configuration: own costs of variables, and how terms are weighted.

    Args:
        model: variables and terms.
        configuration: what regions may choose from, microbatches, optimizer.
        repeat: how often the time of the model's graph counts in a step; None: the configuration's passes, of what goes
            between operators those of forward. With the
            graph of fewer microbatches, as often as there are of those, it is a lower bound: what depends on sizes
            never takes less time in smaller parts, and what does not is paid for every microbatch.
        lost: by class of operator, [strategies] those that do not exist.
        least: whether activations count no more often than every pipeline stage holds them, so that memory is a lower
            bound of what stages hold together; else as often as the first one does.
    """

    def __init__(
        self,
        model: Model,
        configuration: Configuration,
        repeat: int | None = None,
        lost: Mapping[int, np.ndarray] | None = None,
        *,
        least: bool = False,
    ) -> None:
        self.model = model
        self.configuration = configuration
        self.has_own_graph = repeat is None
        """Whether the model is of the configuration's own microbatch count, not of a smaller one."""
        self.repeat = configuration.passes.forward if repeat is None else repeat
        self._repeat_backward = configuration.passes.backward if repeat is None else repeat
        self.in_flight = configuration.least_in_flight if least else configuration.in_flight
        """How often activations count."""
        self.lost = lost or {}
        self.recomputes = configuration.settings.recomputes if configuration.training else (Recompute.NONE,)
        self.zeros = configuration.settings.zeros
        self._times: dict[int, np.ndarray] = {}
        self._members: dict[tuple[PartKind, int], Mapping[int, tuple[tuple[int, int], ...]]] = {}
        self._zero_options: dict[tuple[int, bool], np.ndarray] = {}
        self._parameters: dict[int, ParameterCosts] = {}
        self._whole: dict[tuple[int, int], np.ndarray] = {}
        self._levels: dict[tuple[int, int, int, int], int] = {}
        self._profiles: dict[tuple[ParameterProfile, bool], np.ndarray] = {}
        self.partly_exact = model.space.price_list is PriceList.VOLUME
        """Whether the exact stage may leave the cost of a tensor shared out that occurrences want in very many places,
        instead of giving up."""

    def under(self, configuration: Configuration) -> CostedModel:
        """The same model under another configuration of as many microbatches."""
        return CostedModel(self.model, configuration, None if self.has_own_graph else self.repeat, self.lost)

    # -- settings ----------------------------------------------------------------------------------------------

    def options(self, region: int) -> tuple[Recompute, ...]:
        """Recompute settings that a region may choose from."""
        return self.recomputes if self.model.places.recomputes(region) else (Recompute.NONE,)

    def domain(self, variable: int) -> int:
        """Number of values of a variable."""
        model = self.model
        if model.is_recompute(variable):
            return len(self.options(model.region_of_setting(variable)))
        return model.domain(variable)

    def values(self, variable: int) -> np.ndarray:
        """Values of a variable."""
        if self.model.is_zero(variable):
            group, mask = self.model.group_of_setting(variable)
            return self.zero_options(mask, inside=self.lies_in_run(group))
        return np.arange(self.domain(variable))

    def zero_members(self, kind: PartKind, number: int) -> Mapping[int, tuple[tuple[int, int], ...]]:
        """By ZeRO setting of a part, the variables that its parameters are stored with, and their data axes."""
        key = (kind, number)
        if key not in self._members:
            found: dict[int, list[tuple[int, int]]] = {}
            for variable in self.model.part(kind, number).variables:
                for mask in self.parameter_costs(variable):
                    setting = self.model.zero_variable(self.model.zero_group(variable), mask)
                    found.setdefault(setting, []).append((variable, mask))
            self._members[key] = {setting: tuple(members) for setting, members in found.items()}
        return self._members[key]

    @cached_property
    def workspace_bytes(self) -> int:
        """What communication takes under every choice."""
        space, configuration = self.model.space, self.configuration
        stages = 1 if configuration.pipeline is None else configuration.pipeline.num_stages
        return stages * workspace_bytes(
            space.cluster,
            space.mesh_shape,
            space.graph,
            configuration.precision,
            training=configuration.training,
            num_stages=stages,
        )

    def least_own_bytes(self) -> int:
        """A lower bound of the memory: what communication and, at least, parameters need by themselves."""
        model = self.model
        total = self.workspace_bytes + sum(self._least_bytes(variable) for variable in model.outer.variables)
        for run, link in zip(model.runs, model.links, strict=True):
            total += run.num_links * sum(self._least_bytes(variable) for variable in link.variables)
        return total

    def _least_bytes(self, variable: int) -> int:
        inside = self.lies_in_run(self.model.zero_group(variable))
        tables = self.parameter_costs(variable).items()
        costs = [num_bytes[self.zero_options(mask, inside=inside)] for mask, (_, num_bytes) in tables]
        return int(np.sum([table.min(axis=0) for table in costs], axis=0).min()) if costs else 0

    @property
    def last_differs(self) -> bool:
        """Whether the last occurrence of a run weighs more than the others."""
        return self.recomputes != (Recompute.NONE,) or self.configuration.settings.whole_level >= 2

    @cached_property
    def dearest(self) -> int:
        """The most that one table may charge, where that may be far above what solutions cost: sending as little as
        possible is sending nothing, but single steps may send all of a tensor. 0 where times are added up."""
        model = self.model
        if model.space.price_list is not PriceList.VOLUME:
            return 0
        parts = (model.outer, *model.links)
        terms = (*model.shared_terms, *(term for part in parts for term in part.terms))
        found = [3 * len(t.slots) * self.repeat * int(t.cost_ns[t.cost_ns < UNREACHABLE].max()) for t in terms]
        for variable in (variable for part in parts for variable in part.variables):
            if variable < model.num_operators:
                ns = self.operator_ns(variable)
                found.append(int(ns[ns < UNREACHABLE].max(initial=0)))
            found.extend(int(ns.max()) for ns, _ in self.parameter_costs(variable).values())
        return max(found, default=0)

    def policy(self, chosen: Mapping[int, Recompute], kind: PartKind, number: int) -> RegionPolicy:
        """Regions as the terms of a part see them.

        A link stands for all later occurrences of its run: its second occurrence counts as a working set only where
        the link is the last.

        Args:
            chosen: how regions recompute.
            kind: which part.
            number: the run of a link.
        """
        places = self.model.places
        working = places.last_regions
        if kind is not PartKind.OUTER:
            region = places.run_regions[number][1]
            working = working | {region} if kind is PartKind.LAST else working - {region}
        return RegionPolicy(modes=chosen, working=working)

    # -- own costs ---------------------------------------------------------------------------------------------

    def operator_ns(self, index: int) -> np.ndarray:
        """[recompute settings of the operator's region, strategies] compute of a step, with what runs again."""
        key = int(self.model.class_of[index])
        if key not in self._times:
            space = self.model.space.operator(key)
            region = int(self.model.region_of[key])
            rerun = bool(self.model.places.rerun[key]) if Recompute.SELECTIVE in self.options(region) else False
            again = {Recompute.NONE: 0, Recompute.SELECTIVE: int(rerun), Recompute.FULL: 1}
            forwards = np.array([[1 + again[mode]] for mode in self.options(region)])
            if self.has_own_graph:
                ns = space.forward_ns * self.repeat
                ns = ns + ((forwards - 1) * space.forward_ns + space.backward_ns) * self._repeat_backward
            else:
                ns = space.least_of_step_ns(forwards, self.repeat, self.configuration.microbatches)
            if key in self.lost:
                ns[:, self.lost[key]] = UNREACHABLE
            self._times[key] = ns
        return self._times[key]

    def result_bytes(self, index: int) -> np.ndarray:
        """[strategies] bytes of what an operator returns from all microbatches, in inference."""
        return result_bytes(self.model.space, int(self.model.class_of[index])) * self.configuration.microbatches

    def parameter_costs(self, variable: int) -> ParameterCosts:
        """By data axes (as bits), ([ZeRO settings, values] ns, the same in bytes) of what is stored with a variable.

        Values under which nothing has these data axes cost nothing there.

        Args:
            variable: an operator, or a parameter that several read.
        """
        key = self.model.class_of_variable(variable)
        if key not in self._parameters:
            self._parameters[key] = self._parameter_table(key)
        return self._parameters[key]

    def makes_room(self, variable: int, kind: PartKind) -> bool:
        """Whether what is stored with a variable has room for whole copies: all occurrences of a run take turns in that
        of the last."""
        if kind is not PartKind.OUTER:
            return kind is PartKind.LAST
        return self.model.first_region(variable) in self.model.places.last_regions

    def whole_bytes(self, variable: int, level: int) -> np.ndarray:
        """[values] bytes of the whole copies of what is stored with a variable, in a run up to a ZeRO level."""
        key = (self.model.class_of_variable(variable), level)
        if key not in self._whole:
            count = self.domain(variable)
            total = np.zeros(count, dtype=np.int64)
            for profiles, inverse in self._stored(key[0]):
                copies = [self._copies(profile, level) for profile in profiles]
                total = total + np.array(copies, dtype=np.int64)[inverse]
            self._whole[key] = total
        return self._whole[key]

    def level_of(self, variable: int, value: int, mask: int, zero: int) -> int:
        """The highest ZeRO level among what is stored with a variable under a value and has these data axes.

        Args:
            variable: see ``parameter_costs``.
            value: its value.
            mask: the data axes, as bits.
            zero: place of the ZeRO setting of their group.
        """
        key = (self.model.class_of_variable(variable), value, mask, zero)
        if key not in self._levels:
            levels = [0]
            for profiles, inverse in self._stored(key[0]):
                profile = profiles[int(inverse[value])]
                if self._mask(profile) == mask:
                    setting = self.zeros[zero]
                    levels.append(setting.level if setting.sharded(profile[3]) else 0)
            self._levels[key] = max(levels)
        return self._levels[key]

    def _copies(self, profile: ParameterProfile, level: int) -> int:
        """Bytes of the whole copies of a parameter that exist while it is in use."""
        configuration = self.configuration
        if not self._mask(profile):
            return 0
        return unsharded_bytes(
            profile[0],
            zero_level=level,
            precision=configuration.precision,
            optimizer=configuration.optimizer or "sgd",
        )

    def _stored(self, variable: int) -> tuple[StoredProfiles, ...]:
        parameters = self.model.parameters
        if variable < self.model.num_operators:
            return parameters.stored_profiles(variable)
        name = parameters.name_of(variable)
        profiles = tuple(parameters.profile(name, state) for state in parameters.states(name))
        return ((profiles, np.arange(len(profiles))),)

    def _parameter_table(self, variable: int) -> ParameterCosts:
        outside = not self.model.places.recomputes(self.model.first_region(variable))
        found: dict[int, np.ndarray] = {}
        for profiles, inverse in self._stored(variable):
            for mask in sorted({self._mask(profile) for profile in profiles}):
                costs = [
                    self._profile_costs(profile, outside)
                    if self._mask(profile) == mask
                    else np.zeros((len(self.zeros), 2), dtype=np.int64)
                    for profile in profiles
                ]
                table = np.stack(costs, axis=1)[:, inverse]
                found[mask] = found[mask] + table if mask in found else table
        return {mask: (table[..., 0], table[..., 1]) for mask, table in sorted(found.items())}

    def _mask(self, profile: ParameterProfile) -> int:
        """Data axes of a stored parameter that is trained, as bits."""
        return sum(1 << axis for axis in self._data_axes(profile))

    def lies_in_run(self, group: int) -> bool:
        """Whether what is stored in a ZeRO group is first read in a run."""
        model = self.model
        regions = model.places.num_regions
        region = group if group < regions else model.first_region(group - regions + model.num_operators)
        return model.places.recomputes(region)

    def zero_options(self, mask: int, *, inside: bool) -> np.ndarray:
        """Places of the ZeRO settings that some parameter with these data axes may prefer to every other one.

        Args:
            mask: the data axes, as bits.
            inside: in runs, or outside.
        """
        key = (mask, inside)
        if key not in self._zero_options:
            self._zero_options[key] = self._undominated(mask, inside)
        return self._zero_options[key]

    def sharding_places(self, setting: int) -> np.ndarray:
        """Places of all that a ZeRO setting may be, also of what no parameter prefers."""
        group, mask = self.model.group_of_setting(setting)
        return self._sharding(mask, self.lies_in_run(group))

    def _undominated(self, mask: int, inside: bool) -> np.ndarray:
        places = self._sharding(mask, inside)
        profiles = [known for known in self._profiles_by_mask.get(mask, ()) if known[1] != inside]
        if not profiles or mask == 0:
            return places[:1]
        tables = [self._profile_costs(profile, outside) for profile, outside in profiles]
        both = np.unique(np.concatenate(tables, axis=1), axis=1)[places]
        no_worse = (both[:, None] <= both[None]).all(axis=2)  # [ZeRO settings, others]
        is_better = (both[:, None] < both[None]).any(axis=2) | np.triu(np.ones_like(no_worse), 1)  # of equals the first
        return places[~(no_worse & is_better).any(axis=0)]

    def _sharding(self, mask: int, inside: bool) -> np.ndarray:
        """Places of the ZeRO settings that do what they say where the data axes are these: a level over axes that are
        not among them would be none. All of them, where there is no other."""
        axes = tuple(axis for axis in range(mask.bit_length()) if mask >> axis & 1)
        places = self.configuration.settings.places(inside=inside)
        sharding = [place for place in places if not self.zeros[place].level or self.zeros[place].sharded(axes)]
        return np.array(sharding or places, dtype=np.int64)

    @cached_property
    def _profiles_by_mask(self) -> dict[int, list[tuple[ParameterProfile, bool]]]:
        """By data axes (as bits), the different stored parameters, and whether each is first read outside runs."""
        model = self.model
        found: dict[tuple[ParameterProfile, bool], None] = {}
        for variable in (*model.outer.variables, *(v for link in model.links for v in link.variables)):
            outside = not model.places.recomputes(model.first_region(variable))
            for profiles, _ in self._stored(model.class_of_variable(variable)):
                found.update(((profile, outside), None) for profile in profiles)
        by_mask: dict[int, list[tuple[ParameterProfile, bool]]] = {}
        for profile, outside in found:
            by_mask.setdefault(self._mask(profile), []).append((profile, outside))
        return by_mask

    def _profile_costs(self, profile: ParameterProfile, outside: bool) -> np.ndarray:
        """[ZeRO settings, 2] ns and bytes of a stored parameter: gradient reduction, ZeRO gathers, optimizer; memory.

        Outside runs, whole copies that fill a bucket count.

        Args:
            profile: the parameter as it is stored.
            outside: whether it is first read outside runs.
        """
        key = (profile, outside)
        if key not in self._profiles:
            sharded = [zero.sharded(self._data_axes(profile)) for zero in self.zeros]
            kinds = [(zero.level if axes else 0, axes) for zero, axes in zip(self.zeros, sharded, strict=True)]
            known = {kind: self._parameter_cost(profile, *kind, outside) for kind in dict.fromkeys(kinds)}
            self._profiles[key] = np.array([known[kind] for kind in kinds], dtype=np.int64)
        return self._profiles[key]

    def _data_axes(self, profile: ParameterProfile) -> tuple[int, ...]:
        """Data axes of a stored parameter that is trained."""
        _, _, trainable, data_axes = profile
        return data_axes if trainable and self.configuration.training else ()

    def _parameter_cost(
        self, profile: ParameterProfile, level: int, sharded: tuple[int, ...], outside: bool
    ) -> tuple[int, int]:
        """ns and bytes of a stored parameter under a ZeRO level that shards over some of its data axes."""
        elements, dtype, trainable, _ = profile
        configuration = self.configuration
        space = self.model.space
        trainable = trainable and configuration.training
        data_axes = self._data_axes(profile)
        shards = math.prod(space.mesh_shape[axis] for axis in sharded)
        memory = parameter_memory(
            elements,
            dtype=dtype,
            shards=shards,
            zero_level=level,
            precision=configuration.precision,
            optimizer=configuration.optimizer or "sgd",
            optimizer_states=configuration.optimizer_states,
            trainable=trainable,
        )
        ns = 0
        if trainable:
            ns += space.prices.optimizer_ns(
                elements,
                shards=shards,
                zero_level=level,
                precision=configuration.precision,
                optimizer=configuration.optimizer,
                optimizer_states=configuration.optimizer_states,
                device=space.compute.device,
            )
            for call in reduction_calls(
                elements,
                zero_level=level,
                data_axes=data_axes,
                zero_axes=sharded,
                mesh_shape=space.mesh_shape,
                microbatches=configuration.microbatches,
            ):
                payload = call.elements * space.compute.element_bytes(dtype)
                ns += call.count * space.collectives.rate_ns(call.kind, call.axes, payload)
        whole = self._copies(profile, level) if outside and elements > BUCKET_ELEMENTS else 0
        return ns, sum(memory) + whole
