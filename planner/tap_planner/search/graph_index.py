"""What the search asks about a folded graph again and again, on whatever mesh: found out once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tap_planner.folding import FoldedGraph
from tap_planner.graph import TensorKind
from tap_planner.search.places import Places

Readers = tuple[tuple[int, int], ...]
"""(operator, operand) pairs, in graph order."""


class GraphIndex:
    """Who makes and who reads each tensor of a graph, and where its operators are in the folded one.

    Everything here takes time in the size of the whole graph. Models of meshes look at the operators that stand for all
    others only, so that their time does not grow with the number of repeats.

    Args:
        folded: the graph and its runs.
    """

    def __init__(self, folded: FoldedGraph) -> None:
        self.folded = folded
        self.graph = graph = folded.graph
        self.places = Places(folded)
        self.producers: Mapping[str, int] = {
            name: index for index, operator in enumerate(graph.operators) for name in operator.outputs
        }
        """Per tensor the index of the operator that makes it."""
        self.caches: Mapping[str, int] = graph.caches
        """Per cache that a step reads, the ``Output`` operator whose strategy says where it lies between steps."""
        self.consumers = self._consumers()
        """Per tensor its readers."""
        self.parameter_reads = self._parameter_reads()
        """Per parameter the tensors that read it, in order of first use."""
        self.shared_parameters: Mapping[str, int] = {
            parameter.name: number
            for number, parameter in enumerate(graph.parameters)
            if sum(len(self.consumers[name]) for name in self.parameter_reads[parameter.name]) > 1
        }
        """Numbers of the parameters that several operands read."""
        self.skeleton = self._skeleton()
        """Operators that stand for all: those outside runs, and of every run the first, second and last occurrence."""
        self.couplings = tuple(self._couplings())
        """The tensors that couple them: (name, its readers, whether occurrences of a run share it)."""

    def maker(self, name: str) -> int | None:
        """The operator whose strategy says where a tensor is made; of a cache, the one that left it to this step."""
        producer = self.producers.get(name)
        return self.caches.get(name) if producer is None else producer

    def is_stored_input(self, name: str) -> bool:
        """Whether a tensor is a graph input that memory model M counts as it is read: in inference, if no cache."""
        is_input = self.graph.tensors[name].kind is TensorKind.INPUT
        return is_input and self.graph.loss is None and name not in self.caches

    def _consumers(self) -> Mapping[str, Readers]:
        found: dict[str, list[tuple[int, int]]] = {}
        for index, operator in enumerate(self.graph.operators):
            for position, name in enumerate(operator.inputs):
                if name is not None:
                    found.setdefault(name, []).append((index, position))
        return {name: tuple(slots) for name, slots in found.items()}

    def _parameter_reads(self) -> Mapping[str, tuple[str, ...]]:
        found: dict[str, list[str]] = {parameter.name: [] for parameter in self.graph.parameters}
        for name in self.consumers:
            read = self.graph.tensors[name].read
            if read is not None:
                found[read.parameter].append(name)
        return {name: tuple(reads) for name, reads in found.items()}

    def _skeleton(self) -> tuple[int, ...]:
        chosen: list[int] = []
        position = 0
        for run in self.folded.runs:
            chosen.extend(range(position, run.start + 2 * run.period))
            last = run.start + (run.count - 1) * run.period
            chosen.extend(range(max(last, run.start + 2 * run.period), last + run.period))
            position = run.start + run.count * run.period
        chosen.extend(range(position, len(self.graph.operators)))
        return tuple(chosen)

    def _couplings(self) -> Iterator[tuple[str, Readers, bool]]:
        skeleton = set(self.skeleton)
        operators = [self.graph.operators[index] for index in self.skeleton]
        near = {name for operator in operators for name in (*operator.inputs, *operator.outputs)}
        run_of = self.places.run_of.tolist()
        for name, readers in self.consumers.items():
            if name not in near and name in self.producers:
                run = run_of[self.producers[name]]
                if all(run_of[index] == run for index, _ in readers):  # inside later occurrences
                    continue
            if self.graph.tensors[name].kind is TensorKind.CONSTANT:
                continue
            shared = self._is_shared(name, readers)
            if shared or any(index in skeleton for index, _ in readers):
                yield name, readers, shared

    def _is_shared(self, name: str, readers: Readers) -> bool:
        """Whether a tensor from outside is read by a later occurrence of some run."""
        places, producer = self.places, self.maker(name)
        return any(
            places.occurrence_of[index] > 0 and (producer is None or places.run_of[producer] != places.run_of[index])
            for index, _ in readers
        ) and (producer is not None or len({int(places.region_of[index]) for index, _ in readers}) > 1)
