"""The graphs of a request, one for each microbatch count, with what is found out about each once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property

from tap_planner.cluster import Cluster
from tap_planner.cost import StageShare
from tap_planner.folding import FoldedGraph
from tap_planner.search.capacity import Sizes, least_of_stages, sizes_of
from tap_planner.search.configuration import Pipeline
from tap_planner.search.graph_index import GraphIndex
from tap_planner.search.stage_weights import stage_shares
from tap_planner.sharding import BatchMap, block_hints, map_batch

Hints = Mapping[str, tuple[tuple[int, ...], ...]]
"""Per operator id, per factor of its rule, the block counts in which it may be split."""


class MicrobatchGraphs:
    """Graphs of microbatches.

    Args:
        folded: microbatch count -> the graph bound with the batch of one microbatch, folded.
    """

    def __init__(self, folded: Callable[[int], FoldedGraph]) -> None:
        self._bind = folded
        self._folded: dict[int, FoldedGraph] = {}
        self._batches: dict[int, BatchMap] = {}
        self._hints: dict[int, Hints] = {}
        self._indices: dict[int, GraphIndex] = {}
        self._least: dict[tuple[object, ...], tuple[int, int]] = {}
        self._shares: dict[tuple[object, ...], tuple[StageShare, ...]] = {}

    def folded(self, microbatches: int) -> FoldedGraph:
        """The graph of one microbatch, folded."""
        if microbatches not in self._folded:
            self._folded[microbatches] = self._bind(microbatches)
        return self._folded[microbatches]

    def index(self, microbatches: int) -> GraphIndex:
        """Who makes and reads its tensors, and where its operators are."""
        if microbatches not in self._indices:
            self._indices[microbatches] = GraphIndex(self.folded(microbatches))
        return self._indices[microbatches]

    @cached_property
    def sizes(self) -> Sizes:
        """What the graph of the whole batch holds."""
        return sizes_of(self.folded(1).graph)

    def least_of_stages(
        self,
        microbatches: int,
        cluster: Cluster,
        precision: str,
        num_stages: int = 1,
        shares: tuple[StageShare, ...] = (),
    ) -> tuple[int, int]:
        """What one microbatch takes at least, forward and backward (see ``capacity.least_of_stages``)."""
        weights = tuple((share.stage, share.repeated, share.backward) for share in shares)
        key = (microbatches, repr(cluster.device), cluster.num_devices, precision, num_stages, weights)
        if key not in self._least:
            graph = self.folded(microbatches).graph
            self._least[key] = least_of_stages(graph, cluster, precision, num_stages, shares)
        return self._least[key]

    def stage_shares(
        self, cluster: Cluster, precision: str, pipeline: Pipeline | None, microbatches: int | None
    ) -> tuple[StageShare, ...]:
        """What unlike stages count (see ``stage_weights.stage_shares``); none without a pipeline."""
        if pipeline is None or microbatches is None or not cluster.node_groups:
            return ()
        key = (repr(cluster.node_groups), precision, pipeline, microbatches)
        if key not in self._shares:
            self._shares[key] = stage_shares(self.folded(1).graph, cluster, precision, pipeline, microbatches)
        return self._shares[key]

    def batch(self, microbatches: int) -> BatchMap:
        """Where the batch is in that graph."""
        if microbatches not in self._batches:
            self._batches[microbatches] = map_batch(self.folded(microbatches).graph)
        return self._batches[microbatches]

    def hints(self, microbatches: int) -> Hints:
        """In which blocks its dims may be split."""
        if microbatches not in self._hints:
            self._hints[microbatches] = block_hints(self.folded(microbatches).graph)
        return self._hints[microbatches]
