"""The slots of a Program: what each does, and in which order its stages run them."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cluster import Cluster
from tap_planner.plan import AS_LIBRARY, Overlap, overlap_of
from tap_planner.program import Program
from tap_planner.schedule import PipelineSchedule, Work
from tap_planner.simulate.closing import Closing
from tap_planner.simulate.devices import Channels
from tap_planner.simulate.durations import Durations
from tap_planner.simulate.passes import Pass, Passes
from tap_planner.simulate.places import Places
from tap_planner.simulate.routes import Routes
from tap_planner.simulate.sending import StageOrder

_Order = tuple[tuple[int, ...], tuple[int, ...]]
"""Per slot of a stage the index of its pass, and its microbatch."""


def ways(overlap: Overlap | None) -> tuple[Overlap | None, ...]:
    """How a step may be run, of which the faster way counts.

    What runs behind a product uses links that something in the background may have needed then: where that costs more
    than it gains, products are left alone.
    """
    return (overlap, Overlap.DATA) if overlap is Overlap.ALL else (overlap,)


class Slots:
    """Everything that playing a Program needs.

    Without a pipeline a whole microbatch is one slot: what runs behind its forward may go on behind its backward.

    Args:
        program: the plan, lowered.
        cluster: the devices that its stages use; with ``devices``, all that there are.
        overlap: what runs behind something else; None: as the cluster's library can.
        devices: by stage, the rank in ``cluster`` of its one device, see ``Durations``.
    """

    def __init__(
        self, program: Program, cluster: Cluster, *, overlap: Overlap | None = None, devices: Sequence[int] = ()
    ) -> None:
        self._program = program
        overlap = overlap or overlap_of(AS_LIBRARY, cluster.library)
        self.places = Places(program)
        """Where parameters lie."""
        durations = Durations(program, cluster, devices=devices)
        self.channels = Channels(cluster, devices) if devices else None
        """What transfers between stages occupy, where these are devices of the cluster."""
        routes = Routes(program, self.places, durations, None if devices else cluster)
        self._making = Passes(program, durations, routes, overlap=overlap)
        self.closing = Closing(program, self.places, durations, overlap=overlap)
        """The end of the step."""
        pipeline = program.decisions.pipeline
        passes, orders = self._plain() if pipeline is None else self._scheduled(pipeline.schedule)
        self.passes: tuple[Pass, ...] = tuple(passes)
        """What slots do."""
        self.orders: tuple[StageOrder, ...] = tuple(
            StageOrder(passes=order, microbatches=numbers, loose=self.closing.loose(stage, self.passes, order))
            for stage, (order, numbers) in enumerate(orders)
        )
        """Per stage."""

    def _plain(self) -> tuple[list[Pass], list[_Order]]:
        works = (Work.FORWARD, Work.BACKWARD) if self._program.decisions.mode == "train" else (Work.FORWARD,)
        count = self._program.decisions.microbatches
        return list(self._making.of_chunk(0, [works])), [((0,) * count, tuple(range(count)))]

    def _scheduled(self, schedule: PipelineSchedule) -> tuple[list[Pass], list[_Order]]:
        keys = [[(id(slot.work), slot.chunk) for slot in order] for order in schedule.orders]  # ids are hashed faster
        kinds = [set(of_stage) for of_stage in keys]
        passes: list[Pass] = []
        index: Sequence[dict[tuple[int, int], int]] = [{} for _ in keys]
        for number in range(len(self._program.chunks)):
            stage, own = schedule.rank_and_chunk(number)
            works = [work for work in Work if (id(work), own) in kinds[stage]]
            for work, made in zip(works, self._making.of_chunk(number, [(work,) for work in works]), strict=True):
                index[stage][id(work), own] = len(passes)
                passes.append(made)
        orders: list[_Order] = []
        for known, of_stage, order in zip(index, keys, schedule.orders, strict=True):
            orders.append((tuple([known[key] for key in of_stage]), tuple([slot.microbatch for slot in order])))
        return passes, orders
