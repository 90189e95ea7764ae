"""The tasks of a graph: forward and backward of its operators, the tensors between them, and who reads them."""

from __future__ import annotations

from tap_planner.cost import ComputeModel
from tap_planner.device_placement.grouping import Groups
from tap_planner.graph import Graph
from tap_planner.operators import ComputeKind, record_of
from tap_planner.schedule import made_gradients

__all__ = ["Tasks"]


class Tasks:
    """Tasks, the tensors between them, and who reads them.

    Forward tasks have their operators' numbers; backward tasks follow in the reverse order of operators.
    """

    def __init__(self, graph: Graph, groups: Groups, compute: ComputeModel, *, training: bool) -> None:
        self.graph, self.groups, self.compute, self.training = graph, groups, compute, training
        self.operator = list(range(len(graph.operators)))
        self.gradients = [made_gradients(graph, operator) if training else () for operator in graph.operators]
        """By operator, per operand whether its backward makes the gradient."""
        self.backward: dict[int, int] = {}
        """The backward task of an operator that has one."""
        for index in reversed(range(len(graph.operators))):
            if any(self.gradients[index]):
                self.backward[index] = len(self.operator)
                self.operator.append(index)
        self.producer: list[int] = []
        self.num_bytes: list[int] = []
        self.edges: list[tuple[int, int]] = []
        self._maker = {name: index for index, operator in enumerate(graph.operators) for name in operator.outputs}
        self._add_activations()
        self._add_gradients()

    def _tensor(self, producer: int, num_bytes: int) -> int:
        self.producer.append(producer)
        self.num_bytes.append(num_bytes)
        return len(self.producer) - 1

    def _bytes(self, name: str) -> int:
        kind = self.graph.tensors[name].type
        return self.compute.tensor_bytes(kind.dtype, kind.num_elements)

    def _add_activations(self) -> None:
        """What operators make, to the operators that read it."""
        numbers: dict[str, int] = {}
        for index, operator in enumerate(self.graph.operators):
            for name in dict.fromkeys(operator.inputs):
                if name is None or name not in self._maker or self._maker[name] in self.groups.everywhere:
                    continue
                source = self._source(name)
                if source not in numbers:
                    numbers[source] = self._tensor(self._maker[source], self._bytes(source))
                self.edges.append((numbers[source], index))

    def _source(self, name: str) -> str:
        """What a tensor is a view of, as far as views are kept with what they read: that is sent, once."""
        while True:
            index = self._maker[name]
            operator = self.graph.operators[index]
            before = operator.inputs[0] if operator.inputs else None
            is_view = record_of(operator.signature).kind is ComputeKind.VIEW
            if not is_view or before is None or before not in self._maker or self._bytes(before) != self._bytes(name):
                return name
            maker = self._maker[before]
            if self.groups.of[maker] != self.groups.of[index] or maker in self.groups.everywhere:
                return name
            name = before

    def _add_gradients(self) -> None:
        """From the backward of each reader to the backward of the maker; the first backward follows its forward."""
        awaited: set[int] = set()
        for index, task in self.backward.items():
            operator = self.graph.operators[index]
            needed = zip(operator.inputs, self.gradients[index], strict=True)
            for name in dict.fromkeys(name for name, wanted in needed if wanted):
                maker = self._maker.get(name or "", -1)
                if name is not None and maker in self.backward:
                    self.edges.append((self._tensor(task, self._bytes(name)), self.backward[maker]))
                    awaited.add(maker)
        for index, task in self.backward.items():
            if index not in awaited:
                self.edges.append((self._tensor(index, 0), task))
