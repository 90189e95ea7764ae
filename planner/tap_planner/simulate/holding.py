"""What devices hold from the forward to the backward of a microbatch, as memory model M counts it.

The rules are those of docs/cost-model.md, said of the decisions; they share nothing with the search, nor with the
``Release`` instructions of a Program, which follow from what its instructions read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tap_planner.graph import TensorKind
from tap_planner.operators import kept_for_backward, record_of
from tap_planner.plan import Decisions, OperatorDecision
from tap_planner.program import Part, Program, part_gradients, rerun_of_regions
from tap_planner.sharding import Placements

Entry = tuple[str, Placements]
"""A tensor in a placement."""


def held_for_backward(program: Program, *, with_working: bool = True) -> frozenset[Entry]:
    """Activations and graph inputs that are held when forward ends.

    Args:
        program: the plan, lowered.
        with_working: whether all that the backward of a working region reads counts, as in model M; False: only what
            is held at the end of forward.
    """
    return frozenset[Entry]().union(*held_by_chunk(program, with_working=with_working))


def held_by_chunk(program: Program, *, with_working: bool = True) -> tuple[frozenset[Entry], ...]:
    """The same of one microbatch in each chunk of a pipeline; arguments as in ``held_for_backward``."""
    return held_by(program, _chunks(program), with_working=with_working)


def held_by(program: Program, parts: Sequence[int], *, with_working: bool) -> tuple[frozenset[Entry], ...]:
    """The same of each part of a program.

    Args:
        program: the plan, lowered.
        parts: per operator the part that it is of, from 0.
        with_working: see ``held_for_backward``.
    """
    return _Holding(program, with_working, parts).entries()


def _chunks(program: Program) -> list[int]:
    return [number for number, chunk in enumerate(program.chunks) for _ in chunk.operators]


def waiting_by_chunk(program: Program) -> tuple[frozenset[tuple[bool, Entry]], ...]:
    """What a microbatch holds in each chunk from the backward of inputs to that of parameters: what products with
    parameters read, and the gradients (True) of what they make."""
    return waiting_by(program, _chunks(program))


def waiting_by(program: Program, parts: Sequence[int]) -> tuple[frozenset[tuple[bool, Entry]], ...]:
    """The same of each part of a program; ``parts`` as in ``held_by``."""
    tensors = program.graph.tensors
    kinds = (TensorKind.ACTIVATION, TensorKind.INPUT)
    found: list[set[tuple[bool, Entry]]] = [set() for _ in range(max(parts, default=0) + 1)]
    for index, decision in enumerate(program.decisions.operators):
        needed = part_gradients(program.graph, decision, Part.PARAMETERS)
        if not any(needed):
            continue
        held, made = found[parts[index]], decision.outputs
        inputs, outputs = kept_for_backward(record_of(program.graph.operators[index].signature), needed)
        operands = (decision.inputs[position] for position in inputs)
        held.update((False, (o.tensor, o.placement)) for o in operands if o and tensors[o.tensor].kind in kinds)
        held.update((False, (made[position].tensor, made[position].placement)) for position in outputs)
        held.update((True, (output.tensor, output.placement)) for output in made)
    return tuple(map(frozenset, found))


def working_regions(decisions: Decisions) -> frozenset[int]:
    """The last occurrence of every run: it stands for the working set of whichever occurrence is recomputed."""
    last: dict[int, tuple[int, int]] = {}
    for number, region in enumerate(decisions.regions):
        if region.run is not None:
            last[region.run] = max(last.get(region.run, (-1, -1)), (region.occurrence, number))
    return frozenset(number for _, number in last.values())


def first_regions(program: Program) -> Mapping[str, int]:
    """Per parameter the first region that reads it."""
    region_of = _region_of(program.decisions)
    found: dict[str, int] = {}
    for decision in program.decisions.operators:
        for operand in decision.inputs:
            read = None if operand is None else program.graph.tensors[operand.tensor].read
            if read is not None:
                found.setdefault(read.parameter, region_of[decision.id])
    return found


def _region_of(decisions: Decisions) -> dict[str, int]:
    return {name: number for number, region in enumerate(decisions.regions) for name in region.operators}


class _Holding:
    """Working state of ``held_for_backward``."""

    def __init__(self, program: Program, with_working: bool, parts: Sequence[int]) -> None:
        self._program = program
        self._decisions = program.decisions
        self._region_of = _region_of(program.decisions)
        self._working = working_regions(program.decisions) if with_working else frozenset[int]()
        self._made_in = {o.tensor: self._region_of[d.id] for d in program.decisions.operators for o in d.outputs}
        self._source = {o.tensor: o.placement for d in program.decisions.operators for o in d.outputs}
        self._again = frozenset[int]().union(*rerun_of_regions(program.graph, program.decisions))
        selective = {n for n, region in enumerate(program.decisions.regions) if region.recompute == "selective"}
        self._remade = {tensor for tensor, region in self._made_in.items() if region in selective} & {
            output.tensor for index in self._again for output in program.decisions.operators[index].outputs
        }
        self._part_of = parts
        operators = program.decisions.operators
        self._part_named = {d.id: parts[index] for index, d in enumerate(operators)}
        self._part_making = {o.tensor: parts[index] for index, d in enumerate(operators) for o in d.outputs}
        self._held_in: list[set[Entry]] = [set() for _ in range(max(parts, default=0) + 1)]
        self._held = self._held_in[0]
        """Of the part that is looked at."""

    def entries(self) -> tuple[frozenset[Entry], ...]:
        """All of them, by part."""
        for index, decision in enumerate(self._decisions.operators):
            self._held = self._held_in[self._part_of[index]]
            region = self._region_of[decision.id]
            setting = self._decisions.regions[region].recompute
            if setting != "full" or region in self._working:
                self._read_by_backward(index, everything=setting == "none" or region in self._working)
            if setting == "selective" and index in self._again:
                self._operands_of_rerun(decision)
            if setting == "full":
                self._boundary(decision, region)
        self._shared_copies()
        tensors = self._program.graph.tensors
        kinds = (TensorKind.ACTIVATION, TensorKind.INPUT)
        return tuple(frozenset(e for e in held if tensors[e[0]].kind in kinds) for held in self._held_in)

    def _read_by_backward(self, index: int, *, everything: bool) -> None:
        """What an operator's backward reads, of it all or what is not made again."""
        decision = self._decisions.operators[index]
        needed = tuple(operand is not None and operand.gradient is not None for operand in decision.inputs)
        inputs, outputs = kept_for_backward(record_of(self._program.graph.operators[index].signature), needed)
        for position in inputs:
            operand = decision.inputs[position]
            if operand is not None and (everything or operand.tensor not in self._remade):
                self._held.add((operand.tensor, operand.placement))
        for position in outputs:
            if everything or index not in self._again:
                self._held.add((decision.outputs[position].tensor, decision.outputs[position].placement))

    def _operands_of_rerun(self, decision: OperatorDecision) -> None:
        """What an operator that runs again reads, unless that is made again."""
        for operand in decision.inputs:
            if operand is not None and operand.tensor not in self._remade:
                self._held.add((operand.tensor, operand.placement))

    def _boundary(self, decision: OperatorDecision, region: int) -> None:
        """What a region that runs again as a whole reads of others, as it was made; inputs as they are read."""
        for operand in decision.inputs:
            if operand is None:
                continue
            made_in = self._made_in.get(operand.tensor)
            if made_in is None:
                self._held.add((operand.tensor, operand.placement))
            elif made_in != region:
                self._held.add((operand.tensor, self._source[operand.tensor]))

    def _shared_copies(self) -> None:
        """Redistributions that regions share are not made again."""
        for redistribution in self._decisions.redistributions:
            regions = {self._region_of[consumer] for consumer in redistribution.consumers}
            if len(regions) > 1 and any(self._decisions.regions[number].recompute == "full" for number in regions):
                part = self._part_making.get(redistribution.tensor, self._part_named[redistribution.consumers[0]])
                self._held_in[part].add((redistribution.tensor, redistribution.to))
