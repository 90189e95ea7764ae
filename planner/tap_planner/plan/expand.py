"""Folded parts of the document -> decisions with all names written out; the inverse of ``fold``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from tap_planner.errors import PlanFormatError
from tap_planner.plan.decisions import (
    BucketDecision,
    Decisions,
    LossDecision,
    OperandDecision,
    OperatorDecision,
    OutputDecision,
    ParameterDecision,
    RedistributionDecision,
    Region,
)
from tap_planner.plan.document import (
    BlockKey,
    BucketEntry,
    FoldedDecisions,
    ParameterEntry,
    PlanDocument,
    RedistributionEntry,
    RepeatEntry,
)
from tap_planner.plan.ordering import bucket_members, order_parameters, order_redistributions
from tap_planner.plan.pipelines import expand_pipeline

_HINT = "The plan was edited or damaged; write it again with tap-plan."


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpandedParts:
    """What the folded parts say, with all names written out."""

    operators: tuple[OperatorDecision, ...]
    parameters: tuple[ParameterDecision, ...]
    redistributions: tuple[RedistributionDecision, ...]
    buckets: tuple[BucketDecision, ...]
    regions: tuple[Region, ...]
    reads: Mapping[str, str]
    """Tensor name to the parameter that it reads."""
    blocks: tuple[BlockKey, ...]
    """Block and variant of each region."""


def expand(document: PlanDocument) -> Decisions:
    """All decisions of a plan, as the applier reads them.

    Raises:
        PlanFormatError: the parts of the plan do not fit together; the message names the block or name.
    """
    parts = expand_parts(document.folded)
    options = document.options
    training = options.mode == "train"
    if training and (options.loss is None or options.loss_output is None):
        raise PlanFormatError("options.loss: null in a plan for training, expected a loss", hint=_HINT)
    return Decisions(
        mode=options.mode,
        precision=options.precision,
        optimizer=options.optimizer if training else "",
        optimizer_states=document.optimizer_states,
        loss=LossDecision(kind=options.loss, output=options.loss_output)
        if training and options.loss is not None and options.loss_output is not None
        else None,
        microbatches=document.pipeline.microbatches,
        axes=document.mesh.axes,
        order=document.mesh.order,
        operators=parts.operators,
        parameters=parts.parameters,
        redistributions=parts.redistributions,
        buckets=parts.buckets,
        regions=parts.regions,
        pipeline=expand_pipeline(document.pipeline, parts.operators, [axis.name for axis in document.mesh.axes]),
    )


def expand_parts(folded: FoldedDecisions) -> ExpandedParts:
    """Write out every occurrence of every block.

    Raises:
        PlanFormatError: a repeat names an unknown block, or a name is missing.
    """
    expansion = _Expansion(folded)
    for repeat in folded.repeats:
        expansion.add_repeat(repeat)
    expansion.add_shared()
    return expansion.result()


class _Names:
    """The names of one occurrence."""

    def __init__(self, repeat: RepeatEntry, index: int) -> None:
        self._repeat = repeat
        self._index = index

    def __call__(self, name: str) -> str:
        names = self._repeat.names.get(name)
        if names is None:
            raise PlanFormatError(
                f"repeats: block {self._repeat.block} has no names for {name!r}, which it uses", hint=_HINT
            )
        return names[self._index]

    def label(self, operator: OperatorDecision) -> str:
        labels = self._repeat.labels.get(operator.id)
        return operator.name if labels is None else labels[self._index]


def _rename_operator(operator: OperatorDecision, names: _Names) -> OperatorDecision:
    return OperatorDecision(
        id=names(operator.id),
        name=names.label(operator),
        type=operator.type,
        strategy=operator.strategy,
        inputs=tuple(
            None
            if operand is None
            else OperandDecision(tensor=names(operand.tensor), placement=operand.placement, gradient=operand.gradient)
            for operand in operator.inputs
        ),
        outputs=tuple(
            OutputDecision(tensor=names(output.tensor), shape=output.shape, placement=output.placement)
            for output in operator.outputs
        ),
    )


def _rename_redistribution(decision: RedistributionDecision, names: _Names) -> RedistributionDecision:
    return replace(decision, tensor=names(decision.tensor), consumers=tuple(map(names, decision.consumers)))


class _Expansion:
    """Collects what the occurrences say."""

    def __init__(self, folded: FoldedDecisions) -> None:
        self._folded = folded
        self._blocks = {block.key: block for block in folded.blocks}
        self._parameters_of: dict[BlockKey, list[ParameterEntry]] = {}
        for parameter in folded.parameters:
            if parameter.block is not None:
                self._parameters_of.setdefault((parameter.block, parameter.variant), []).append(parameter)
        self._redistributions_of: dict[BlockKey, list[RedistributionEntry]] = {}
        for entry in folded.redistributions:
            if entry.block is not None:
                self._redistributions_of.setdefault((entry.block, entry.variant), []).append(entry)
        self._seen: dict[BlockKey, int] = {}
        self._run_lengths: dict[int, int] = {}
        self._operators: list[OperatorDecision] = []
        self._parameters: list[ParameterDecision] = []
        self._redistributions: list[RedistributionDecision] = []
        self._regions: list[Region] = []
        self._keys: list[BlockKey] = []
        self._reads: dict[str, str] = {}

    def add_repeat(self, repeat: RepeatEntry) -> None:
        if repeat.key not in self._blocks:
            raise PlanFormatError(
                f"repeats: block {repeat.block!r} variant {repeat.variant} is not among the blocks", hint=_HINT
            )
        for index in range(repeat.count):
            self._add_occurrence(repeat, _Names(repeat, index))

    def _add_occurrence(self, repeat: RepeatEntry, names: _Names) -> None:
        operators = [_rename_operator(operator, names) for operator in self._blocks[repeat.key].operators]
        self._operators.extend(operators)
        number = self._seen.get(repeat.key, 0)
        self._seen[repeat.key] = number + 1
        self._add_parameters(repeat.key, number, names)
        for entry in self._redistributions_of.get(repeat.key, ()):
            self._redistributions.append(_rename_redistribution(entry.decision, names))
        self._keys.append(repeat.key)
        occurrence = 0
        if repeat.run is not None:
            occurrence = self._run_lengths.get(repeat.run, 0)
            self._run_lengths[repeat.run] = occurrence + 1
        self._regions.append(
            Region(
                operators=tuple(operator.id for operator in operators),
                run=repeat.run,
                occurrence=occurrence,
                recompute=repeat.recompute,
            )
        )

    def _add_parameters(self, key: BlockKey, number: int, names: _Names) -> None:
        for entry in self._parameters_of.get(key, ()):
            if number >= len(entry.buckets):
                raise PlanFormatError(
                    f"parameters: {entry.decision.name!r} has {len(entry.buckets)} bucket values, "
                    f"block {key[0]} occurs more often",
                    hint=_HINT,
                )
            name = names(entry.decision.name)
            self._parameters.append(replace(entry.decision, name=name, bucket=entry.buckets[number]))
            self._reads.update((names(tensor), name) for tensor in entry.tensors)

    def add_shared(self) -> None:
        """Parameters and redistributions that belong to no single occurrence."""
        for entry in self._folded.parameters:
            if entry.block is None:
                self._parameters.append(replace(entry.decision, bucket=entry.buckets[0]))
                self._reads.update((tensor, entry.decision.name) for tensor in entry.tensors)
        for shared in self._folded.redistributions:
            if shared.block is not None:
                continue
            own = (shared.decision.tensor, *shared.decision.consumers)
            repeat = RepeatEntry(
                block="of a redistribution",
                variant=0,
                run=None,
                count=shared.count,
                recompute="none",
                names=shared.names or {name: (name,) for name in own},
                labels={},
            )
            for index in range(shared.count):
                self._redistributions.append(_rename_redistribution(shared.decision, _Names(repeat, index)))

    def result(self) -> ExpandedParts:
        self._check()
        parameters = order_parameters(self._operators, self._parameters, self._reads)
        return ExpandedParts(
            operators=tuple(self._operators),
            parameters=parameters,
            redistributions=order_redistributions(self._operators, self._redistributions),
            buckets=tuple(sorted(_expand_buckets(self._folded.buckets, parameters), key=lambda bucket: bucket.id)),
            regions=tuple(self._regions),
            reads=self._reads,
            blocks=tuple(self._keys),
        )

    def _check(self) -> None:
        known = {operator.id for operator in self._operators}
        if len(known) != len(self._operators):
            raise PlanFormatError("repeats: two operators expand to the same name", hint=_HINT)
        if len({parameter.name for parameter in self._parameters}) != len(self._parameters):
            raise PlanFormatError("parameters: two parameters expand to the same name", hint=_HINT)
        for decision in self._redistributions:
            unknown = [consumer for consumer in decision.consumers if consumer not in known]
            if unknown or not decision.consumers:
                raise PlanFormatError(
                    f"redistributions: {decision.tensor!r} has the unknown consumers {unknown}", hint=_HINT
                )


def _expand_buckets(
    entries: Iterable[BucketEntry], parameters: Sequence[ParameterDecision]
) -> Iterable[BucketDecision]:
    members = bucket_members(parameters)
    for entry in entries:
        for number in range(entry.id, entry.id + entry.count * entry.step, entry.step):
            yield BucketDecision(
                id=number,
                axes=entry.axes,
                dtype=entry.dtype,
                zero_level=entry.zero_level,
                zero_axes=entry.zero_axes,
                parameters=members.pop(number, ()),
                elements=entry.elements,
            )
    if members:
        raise PlanFormatError(f"parameters: bucket {min(members)} is not among the buckets", hint=_HINT)
