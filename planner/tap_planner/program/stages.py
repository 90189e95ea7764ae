"""Where the operators, parameters and buckets of a plan lie in its pipeline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from tap_planner.errors import ApplyError, UsageError
from tap_planner.graph import Graph, cut_in_stages, reordered
from tap_planner.operators import TRANSFER
from tap_planner.plan import Decisions
from tap_planner.schedule import Work, check

_HINT = "the plan was edited or damaged: write it again with tap-plan"


def cut_as_planned(graph: Graph, decisions: Decisions) -> Graph:
    """Cut a graph in the stages of a plan, its operators in the order of the plan.

    Args:
        graph: the model bound with the batch of one microbatch.
        decisions: the plan.

    Returns:
        The graph that the decisions are about; without a pipeline the same one.

    Raises:
        ApplyError: the plan has other operators, or begins a stage where the graph has none.
    """
    if decisions.pipeline is None:
        return graph
    starts: list[str] = []
    for _, operators in decisions.chunks:
        own = (operator.id for operator in operators if operator.type != TRANSFER)
        starts.extend(tuple(own)[:1])
    try:
        own = [operator.id for operator in decisions.operators if operator.type != TRANSFER]
        return cut_in_stages(reordered(graph, own), starts, decisions.pipeline.schedule.copies)[0]
    except UsageError as error:
        raise ApplyError(f"the plan was made for another model: {error.message}", hint=_HINT) from error


class Stages:
    """The pipeline of a plan.

    Args:
        graph: the model, cut in stages.
        decisions: the plan.

    Raises:
        ApplyError: the plan's chunks do not fit its operators, regions, buckets or schedule.
    """

    def __init__(self, graph: Graph, decisions: Decisions) -> None:
        self._graph = graph
        self._decisions = decisions
        self._pipeline = decisions.pipeline
        starts = (0,) if self._pipeline is None else self._pipeline.chunks
        ends = (*starts[1:], len(graph.operators))
        self.chunks: tuple[range, ...] = tuple(range(a, b) for a, b in zip(starts, ends, strict=True))
        """Operators of every chunk."""
        self._check_chunks()
        self._chunk_of = tuple(number for number, chunk in enumerate(self.chunks) for _ in chunk)
        self.regions = self._regions()
        """Regions of every chunk."""
        self._made_in = {
            name: self._chunk_of[index] for index, operator in enumerate(graph.operators) for name in operator.outputs
        }
        self._sent = self._transfers()
        self._readers = self._reading_chunks()
        self._check_zero()
        self.of_parameter: Mapping[str, tuple[int, ...]] = {
            name: tuple(sorted({*map(self.stage_of, chunks)})) or (0,) for name, chunks in self._readers.items()
        }
        """The stages that read each parameter, in order."""
        self._of_bucket = self._buckets()

    @cached_property
    def splits_backward(self) -> bool:
        """Whether gradients of parameters are made later than those of activations."""
        orders = () if self._pipeline is None else self._pipeline.schedule.orders
        return any(slot.work is Work.WEIGHT_BACKWARD for order in orders for slot in order)

    def stage_of(self, chunk: int) -> int:
        """The stage that holds a chunk."""
        return 0 if self._pipeline is None else self._pipeline.stage_of(chunk)

    def chunk_of(self, index: int) -> int:
        """The chunk that an operator lies in."""
        return self._chunk_of[index]

    def other_end(self, transfer: int, chunk: int) -> int | None:
        """The stage at the other end of a transfer that begins or ends in a chunk; None where that is its own."""
        source, end = self.source_of(transfer), self._chunk_of[transfer]
        other = self.stage_of(source if chunk == end else end)
        return None if other == self.stage_of(chunk) else other

    def is_transfer(self, index: int) -> bool:
        """Whether an operator stands for what goes from chunk to chunk."""
        return self._graph.operators[index].type == TRANSFER

    def sent_from(self, chunk: int) -> Sequence[int]:
        """The transfers of what a chunk makes."""
        return self._sent.get(chunk, ())

    def source_of(self, transfer: int) -> int:
        """The chunk that makes what a transfer brings."""
        name = self._graph.operators[transfer].inputs[0]
        assert name is not None
        return self._made_in[name]

    def of_bucket(self, bucket: int) -> tuple[int, ...]:
        """The stages that hold a bucket's parameters."""
        return self._of_bucket.get(bucket, ())

    def tied(self, stage: int) -> Sequence[str]:
        """Trainable parameters that a stage shares with others."""
        return tuple(
            parameter.name
            for parameter in self._decisions.parameters
            if parameter.trainable and len(stages := self.of_parameter[parameter.name]) > 1 and stage in stages
        )

    # -- what is known ----------------------------------------------------------------------------------------------

    def _check_chunks(self) -> None:
        if self._pipeline is None:
            return
        try:
            check(self._pipeline.schedule)
        except UsageError as error:
            raise ApplyError(error.message, hint=error.hint) from error
        count = self._pipeline.schedule.num_virtual_stages
        if len(self.chunks) != count:
            raise ApplyError(f"pipeline: {len(self.chunks)} chunks, expected {count} by the schedule", hint=_HINT)
        if self._pipeline.schedule.num_microbatches != self._decisions.microbatches:
            raise ApplyError(
                f"pipeline: a schedule of {self._pipeline.schedule.num_microbatches} microbatches, expected "
                f"{self._decisions.microbatches}",
                hint=_HINT,
            )
        if self.chunks[0].start != 0 or any(len(chunk) == 0 for chunk in self.chunks):
            raise ApplyError("pipeline: a chunk without operators", hint=_HINT)

    def _regions(self) -> tuple[range, ...]:
        found: list[range] = []
        position = number = 0
        for chunk in self.chunks:
            first = number
            while position < chunk.stop:
                position += len(self._decisions.regions[number].operators)
                number += 1
            if position != chunk.stop:
                raise ApplyError(
                    f"pipeline: the stage at {self._graph.operators[chunk.stop].id!r} begins inside a region",
                    hint=_HINT,
                )
            found.append(range(first, number))
        return tuple(found)

    def _transfers(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for index, operator in enumerate(self._graph.operators):
            own = self._chunk_of[index]
            for name in operator.inputs:
                source = None if name is None else self._made_in.get(name)
                if source is None or source == own:
                    continue
                if operator.type != TRANSFER:
                    raise ApplyError(
                        f"pipeline: operator {operator.id!r} reads {name!r} of another stage without a transfer",
                        hint=_HINT,
                    )
                self._check_reads(source, own, name)
                found[source] = (*found.get(source, ()), index)
        return found

    def _check_reads(self, source: int, chunk: int, name: str | None) -> None:
        """Whether the schedule knows that a chunk waits for another one."""
        assert self._pipeline is not None
        reads = self._pipeline.schedule.reads
        if reads and source not in reads[chunk]:
            raise ApplyError(
                f"pipeline: chunk {chunk} reads {name!r} of chunk {source}, which its schedule does not say",
                hint=_HINT,
            )

    def _reading_chunks(self) -> Mapping[str, set[int]]:
        readers: dict[str, set[int]] = {parameter.name: set() for parameter in self._decisions.parameters}
        for index, operator in enumerate(self._graph.operators):
            for name in operator.inputs:
                read = None if name is None else self._graph.tensors[name].read
                if read is not None and read.parameter in readers:
                    readers[read.parameter].add(self._chunk_of[index])
        return readers

    def _check_zero(self) -> None:
        """From ZeRO 2 on what is gathered and reduced together, in every microbatch, lies in one chunk."""
        chunks_of: dict[int, set[int]] = {}
        for parameter in self._decisions.parameters:
            if parameter.zero_level < 2:
                continue
            readers = self._readers[parameter.name]
            if len(readers) > 1:
                raise ApplyError(
                    f"parameter {parameter.name!r}: ZeRO {parameter.zero_level} where several chunks of the pipeline "
                    "read it, expected 0 or 1",
                    hint=_HINT,
                )
            if parameter.bucket is not None and len(chunks_of.setdefault(parameter.bucket, set()) | readers) > 1:
                raise ApplyError(
                    f"bucket {parameter.bucket}: ZeRO {parameter.zero_level} where its parameters lie in different "
                    "chunks of the pipeline, expected 0 or 1",
                    hint=_HINT,
                )
            if parameter.bucket is not None:
                chunks_of[parameter.bucket] |= readers

    def _buckets(self) -> Mapping[int, tuple[int, ...]]:
        found: dict[int, tuple[int, ...]] = {}
        for parameter in self._decisions.parameters:
            if parameter.bucket is None:
                continue
            stages = self.of_parameter[parameter.name]
            if found.setdefault(parameter.bucket, stages) != stages:
                raise ApplyError(f"bucket {parameter.bucket}: its parameters lie in different stages", hint=_HINT)
        return found
