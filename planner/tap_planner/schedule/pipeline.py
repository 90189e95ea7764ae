"""A pipeline schedule as data: what each rank does with which microbatch of which part of the model, in which order."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from tap_planner.errors import UsageError


class Work(Enum):
    """What a slot computes. The values are the letters of the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    """Gradients of inputs and of parameters together."""
    INPUT_BACKWARD = "I"
    """Gradients of the inputs alone ("B" in the papers on zero bubble): what the stage before waits for."""
    WEIGHT_BACKWARD = "W"
    """Gradients of the parameters alone: nobody waits for them before the end of the step."""


class ChunkOrder(Enum):
    """How the model's chunks (virtual stages, in model order) lie on the ranks."""

    INTERLEAVED = "interleaved"
    """Virtual stage k on rank k % p (Narayanan et al. 2021, "Efficient Large-Scale Language Model Training on GPU
    Clusters Using Megatron-LM", section 2.2); with one chunk per rank the plain pipeline."""
    VEE = "vee"
    """Two chunks per rank, down and up again: virtual stage k on rank k, or 2p-1-k where k >= p (Qi et al. 2024,
    "Pipeline Parallelism with Controllable Memory", section 3.2)."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One piece of work of a rank."""

    work: Work
    microbatch: int
    """From 0."""
    chunk: int = 0
    """Which of the rank's chunks, from 0, in model order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """An order of work for every rank of a pipeline.

    Nothing is checked here: ``check`` says whether an order is complete and can run.
    """

    name: str
    """One of ``SCHEDULES``, or whatever the maker of an order calls it."""
    num_stages: int
    """p: ranks of the pipeline."""
    num_microbatches: int
    """m."""
    num_chunks: int = 1
    """v: chunks of the model per rank; the most of any rank where ``places`` says where chunks lie."""
    chunk_order: ChunkOrder = ChunkOrder.INTERLEAVED
    places: tuple[int, ...] = ()
    """Per chunk, in model order, its rank: in place of ``chunk_order``, where the maker of an order says so."""
    reads: tuple[tuple[int, ...], ...] = ()
    """Per chunk the earlier chunks that make what it reads, ascending; empty: each reads of the one before it."""
    orders: tuple[tuple[Slot, ...], ...]
    """Per rank what it does, first to last."""

    @property
    def num_virtual_stages(self) -> int:
        """Chunks that the model is cut into: p * v, unless ``places`` says otherwise."""
        return len(self.places) or self.num_stages * self.num_chunks

    @property
    def num_slots(self) -> int:
        """Slots of all ranks."""
        return sum(len(order) for order in self.orders)

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """Where in the model a rank's chunks lie, ascending."""
        if self.places:
            return _by_rank(self.places, self.num_stages)[rank]
        return tuple(self.virtual_stage(rank, chunk) for chunk in range(self.num_chunks))

    def virtual_stage(self, rank: int, chunk: int) -> int:
        """Where in the model a rank's chunk lies, from 0."""
        if self.places:
            return self.chunks_of(rank)[chunk]
        if self.chunk_order is ChunkOrder.VEE and chunk == 1:
            return 2 * self.num_stages - 1 - rank
        return chunk * self.num_stages + rank

    @property
    def copies(self) -> tuple[tuple[int, ...], ...]:
        """Per virtual stage those of ``reads`` on its own rank: what they have got from elsewhere, it need not be sent
        again; empty where the schedule does not say what is read."""
        ranks = self.places or [self.rank_and_chunk(number)[0] for number in range(len(self.reads))]
        return tuple(
            tuple(read for read in reads if ranks[read] == ranks[number]) for number, reads in enumerate(self.reads)
        )

    def sources(self, virtual_stage: int) -> tuple[int, ...]:
        """The virtual stages whose results one reads."""
        if self.reads:
            return self.reads[virtual_stage]
        return (virtual_stage - 1,) if virtual_stage else ()

    def rank_and_chunk(self, virtual_stage: int) -> tuple[int, int]:
        """The rank of a virtual stage, and which of its chunks it is."""
        if self.places:
            rank = self.places[virtual_stage]
            return rank, self.places[:virtual_stage].count(rank)
        chunk, rank = divmod(virtual_stage, self.num_stages)
        if self.chunk_order is ChunkOrder.VEE and chunk == 1:
            return self.num_stages - 1 - rank, 1
        return rank, chunk

    def slot_text(self, slot: Slot) -> str:
        """A slot as ``F3``, or as ``F3.1`` where ranks have several chunks (or the slot says so)."""
        return f"{slot.work.value}{slot.microbatch}" + (f".{slot.chunk}" if self.num_chunks > 1 or slot.chunk else "")


@lru_cache(maxsize=64)
def _by_rank(places: tuple[int, ...], num_stages: int) -> tuple[tuple[int, ...], ...]:
    """Per rank, its chunks."""
    return tuple(tuple(chunk for chunk, own in enumerate(places) if own == rank) for rank in range(num_stages))


def check_counts(name: str, **counts: int) -> None:
    """Refuse counts under 1.

    Args:
        name: of the schedule, for the message.
        counts: by the name of the argument.

    Raises:
        UsageError: names the first such argument and its value.
    """
    for what, count in counts.items():
        if count < 1:
            raise UsageError(
                f"pipeline schedule {name!r}: {what} is {count}, expected at least 1",
                hint=f"Choose {what} of 1 or more.",
            )
