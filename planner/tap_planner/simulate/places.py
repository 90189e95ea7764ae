"""Where the parameters and activations of a Program lie in its pipeline."""

from __future__ import annotations

from collections.abc import Mapping

from tap_planner.program import Program, SumTied


class Places:
    """Which stages hold what.

    Args:
        program: the plan, lowered.
    """

    def __init__(self, program: Program) -> None:
        graph, decisions = program.graph, program.decisions
        self._made_in: dict[str, int] = {}
        readers: dict[str, set[int]] = {parameter.name: set() for parameter in decisions.parameters}
        for number, chunk in enumerate(program.chunks):
            stage = program.stage_of(number)
            for operator in graph.operators[chunk.operators.start : chunk.operators.stop]:
                self._made_in.update(dict.fromkeys(operator.outputs, number))
                for name in operator.inputs:
                    read = None if name is None else graph.tensors[name].read
                    if read is not None and read.parameter in readers:
                        readers[read.parameter].add(stage)
        self._graph = graph
        self.stages_of: Mapping[str, tuple[int, ...]] = {
            name: tuple(sorted(found)) or (0,) for name, found in readers.items()
        }
        """Per parameter the stages that read it, in order; the first one where none does."""
        self.tied: tuple[tuple[str, ...], ...] = tuple(
            tuple(i.parameter for i in instructions if isinstance(i, SumTied)) for instructions in program.steps
        )
        """Per stage the parameters whose gradients it sums with others."""

    def held_by(self, stage: int) -> tuple[str, ...]:
        """The parameters that a stage holds."""
        return tuple(name for name, stages in self.stages_of.items() if stage in stages)

    def source_of(self, transfer: int) -> int:
        """The chunk that makes what a transfer brings."""
        name = self._graph.operators[transfer].inputs[0]
        assert name is not None
        return self._made_in[name]
