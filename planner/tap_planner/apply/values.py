"""Values of tensors while microbatches run: where an operator's operands come from."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Communicator, Parts
from tap_planner.apply.operators import torch_dtype
from tap_planner.apply.parameters import ParameterStore, plain_array, read_part
from tap_planner.apply.placing import place
from tap_planner.apply.redistribute import redistribute
from tap_planner.graph import TensorKind
from tap_planner.plan import OperandDecision
from tap_planner.program import Program, Release
from tap_planner.sharding import REPLICATE, Placements, read_placements


def output_placement(program: Program, name: str) -> Placements:
    """Placement in which a tensor is left where it is made (R for inputs and constants)."""
    made = (output for operator in program.decisions.operators for output in operator.outputs if output.tensor == name)
    found = next(made, None)
    if found is not None:
        return found.placement
    read = program.graph.tensors[name].read
    if read is None:
        return (REPLICATE,) * len(program.decisions.mesh_shape)
    (stored,) = (each.placement for each in program.decisions.parameters if each.name == read.parameter)
    placements = read_placements(read, stored)
    assert placements is not None, "a plan stores no parameter split along a dim that a read drops"
    return placements


class TensorSources:
    """Where tensors come from, in all microbatches alike; and constants.

    Args:
        program: what runs.
        communicator: collectives go through it.
        store: the parameters.
        dtype: what floats are held in.
    """

    def __init__(self, program: Program, communicator: Communicator, store: ParameterStore, dtype: torch.dtype) -> None:
        self.program = program
        self.graph = program.graph
        self.decisions = program.decisions
        self.communicator = communicator
        self.store = store
        self._dtype = dtype
        self._edge_of = program.decisions.redistribution_of()
        self.placements: Mapping[str, Placements] = {
            output.tensor: output.placement for operator in self.decisions.operators for output in operator.outputs
        }
        """Of activations, where they are made."""
        self._constants: dict[tuple[str, Placements], Parts] = {}

    def edge_of(self, operand: OperandDecision) -> int | None:
        """The redistribution that an operand reads from; None where it reads the tensor itself."""
        return self._edge_of.get((operand.tensor, operand.placement, operand.gradient))

    def constant(self, name: str, placement: Placements) -> Parts:
        """Local parts of a constant."""
        key = (name, placement)
        if key not in self._constants:
            value = self.graph.constants.value(name, self.store.weights.constant)
            self._constants[key] = self.placed(self.tensor(name, value), placement)
        return self._constants[key]

    def placed(self, whole: Tensor, placement: Placements) -> Parts:
        """Local parts of a whole tensor."""
        mesh_shape = self.communicator.mesh_shape
        return [place(whole, placement, mesh_shape, rank) for rank in self.communicator.ranks]

    def tensor(self, name: str, value: np.ndarray) -> Tensor:
        """A whole value of a tensor, as it is held."""
        tensor = torch.from_numpy(plain_array(value))
        return tensor.to(self.communicator.device, torch_dtype(self.graph.tensors[name].type.dtype, self._dtype))


class TensorValues:
    """Local parts of inputs, constants, parameters, activations and of what redistributions made of them.

    Args:
        sources: where they come from.
        inputs: whole graph inputs of the global batch, by name.
        microbatch: which one.
    """

    def __init__(self, sources: TensorSources, inputs: Mapping[str, np.ndarray], microbatch: int) -> None:
        self._sources = sources
        self._graph = sources.graph
        self._decisions = sources.decisions
        self._whole = inputs
        self._microbatch = microbatch
        self._fed: dict[str, Tensor] = {}
        self._inputs: dict[tuple[str, Placements], Parts] = {}
        self._activations: dict[str, Parts] = {}
        self._edges: dict[int, Parts] = {}

    def clear(self) -> None:
        """Forget everything."""
        for kept in (self._fed, self._inputs, self._activations, self._edges):
            kept.clear()

    def operand(self, operand: OperandDecision) -> Parts:
        """Local parts as an operator reads them."""
        edge = self._sources.edge_of(operand)
        return self._source(operand.tensor, operand.placement) if edge is None else self._edges[edge]

    def has(self, operand: OperandDecision) -> bool:
        """Whether an operand is there now."""
        edge, tensor = self._sources.edge_of(operand), self._graph.tensors[operand.tensor]
        if edge is not None:
            return edge in self._edges
        if tensor.read is not None:
            return self._sources.store.is_whole(tensor.read.parameter)
        return tensor.kind is not TensorKind.ACTIVATION or operand.tensor in self._activations

    def put(self, name: str, parts: Parts) -> None:
        """Keep what an operator made."""
        self._activations[name] = parts

    def get(self, name: str) -> Parts:
        """Local parts of a graph output or the loss, in ``output_placement``."""
        return self._source(name, output_placement(self._sources.program, name))

    def redistribute(self, index: int) -> None:
        """Run the forward steps of a redistribution."""
        decision = self._decisions.redistributions[index]
        value = self._source(decision.tensor, decision.source)
        tensor = self._graph.tensors[decision.tensor]
        communicator, store = self._sources.communicator, self._sources.store
        made = redistribute(communicator, value, tensor.type.shape, decision.source, decision.forward)
        if tensor.read is not None and store.is_sharded(tensor.read.parameter):
            made = [part.clone() for part in made]  # a view would keep the whole parameter
        self._edges[index] = made

    def forget(self, release: Release) -> None:
        """Drop activations, placed inputs and redistributed values."""
        for name in release.tensors:
            self._activations.pop(name, None)
        for key in release.inputs:
            self._inputs.pop(key, None)
        for edge in release.redistributions:
            self._edges.pop(edge, None)

    def held(self) -> dict[tuple[str, Placements], Parts]:
        """What is held now, by tensor and placement; of copies of parameters nothing."""
        found = {(name, self._sources.placements[name]): parts for name, parts in self._activations.items()}
        for edge, parts in self._edges.items():
            decision = self._decisions.redistributions[edge]
            if self._graph.tensors[decision.tensor].kind is not TensorKind.PARAMETER:
                found[decision.tensor, decision.to] = parts
        return found | self._inputs

    def _source(self, name: str, placement: Placements) -> Parts:
        """A tensor as its producer left it; constants and inputs directly in ``placement``."""
        tensor = self._graph.tensors[name]
        if tensor.kind is TensorKind.ACTIVATION:
            return self._activations[name]
        if tensor.read is not None:
            read = tensor.read
            return [read_part(part, read) for part in self._sources.store.parts(read.parameter)]
        if tensor.kind is not TensorKind.INPUT:
            return self._sources.constant(name, placement)
        key = (name, placement)
        if key not in self._inputs:
            self._inputs[key] = self._sources.placed(self._input(name), placement)
        return self._inputs[key]

    def _input(self, name: str) -> Tensor:
        """The microbatch's slice of a graph input."""
        if name not in self._fed:
            value, dim = self._whole[name], self._graph.batch_dims.get(name)
            if dim is not None and self._decisions.microbatches > 1:
                size = self._graph.tensors[name].type.shape[dim]
                value = np.take(value, range(self._microbatch * size, (self._microbatch + 1) * size), dim)
            self._fed[name] = self._sources.tensor(name, value)
        return self._fed[name]
