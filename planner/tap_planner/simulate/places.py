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
        self._program = program
        self._made_in: dict[str, int] = {}
        for number, chunk in enumerate(program.chunks):
            for operator in program.graph.operators[chunk.operators.start : chunk.operators.stop]:
                self._made_in.update(dict.fromkeys(operator.outputs, number))
        stages: dict[str, list[int]] = {}
        for stage, names in enumerate(program.parameters):
            for name in names:
                stages.setdefault(name, []).append(stage)
        self.stages_of: Mapping[str, tuple[int, ...]] = {name: tuple(found) for name, found in stages.items()}
        """Per parameter the stages that hold it, in order."""
        self.tied: tuple[tuple[str, ...], ...] = tuple(
            tuple(i.parameter for i in instructions if isinstance(i, SumTied)) for instructions in program.steps
        )
        """Per stage the parameters whose gradients it sums with others."""

    def held_by(self, stage: int) -> tuple[str, ...]:
        """The parameters that a stage holds."""
        return self._program.parameters[stage]

    def source_of(self, transfer: int) -> int:
        """The chunk that makes what a transfer brings."""
        return self._made_in[self.sent_by(transfer)]

    def sent_by(self, transfer: int) -> str:
        """What a transfer brings, as its maker calls it."""
        name = self._program.graph.operators[transfer].inputs[0]
        assert name is not None
        return name
