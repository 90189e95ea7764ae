"""Values of tensors while a microbatch runs: where an operator's operands come from."""

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


class TensorValues:
    """Local parts of inputs, constants, parameters, activations and of what redistributions made of them.

    Args:
        program: what runs.
        communicator: collectives go through it.
        store: the parameters.
        dtype: what floats are held in.
    """

    def __init__(self, program: Program, communicator: Communicator, store: ParameterStore, dtype: torch.dtype) -> None:
        self._graph = program.graph
        self._decisions = program.decisions
        self._communicator = communicator
        self._store = store
        self._dtype = dtype
        self._edge_of = program.decisions.redistribution_of()
        self._sources = {
            output.tensor: output.placement for operator in self._decisions.operators for output in operator.outputs
        }
        self._constants: dict[tuple[str, Placements], Parts] = {}
        self._fed: dict[str, Tensor] = {}
        self._inputs: dict[tuple[str, Placements], Parts] = {}
        self._activations: dict[str, Parts] = {}
        self._edges: dict[int, Parts] = {}

    def begin(self, inputs: Mapping[str, np.ndarray], microbatch: int) -> None:
        """Forget everything but constants and take a microbatch's slice of the whole inputs."""
        self.clear()
        for name in self._graph.inputs:
            value, dim = inputs[name], self._graph.batch_dims.get(name)
            if dim is not None and self._decisions.microbatches > 1:
                size = self._graph.tensors[name].type.shape[dim]
                value = np.take(value, range(microbatch * size, (microbatch + 1) * size), dim)
            self._fed[name] = self._tensor(value, self._graph.tensors[name].type.dtype)

    def clear(self) -> None:
        """Forget everything but constants."""
        for kept in (self._fed, self._inputs, self._activations, self._edges):
            kept.clear()

    def edge_of(self, operand: OperandDecision) -> int | None:
        """The redistribution that an operand reads from; None where it reads the tensor itself."""
        return self._edge_of.get((operand.tensor, operand.placement, operand.gradient))

    def operand(self, operand: OperandDecision) -> Parts:
        """Local parts as an operator reads them."""
        edge = self.edge_of(operand)
        return self._source(operand.tensor, operand.placement) if edge is None else self._edges[edge]

    def put(self, name: str, parts: Parts) -> None:
        """Keep what an operator made."""
        self._activations[name] = parts

    def get(self, name: str) -> Parts:
        """Local parts of a graph output or the loss, in ``output_placement``."""
        return self._source(name, self.output_placement(name))

    def output_placement(self, name: str) -> Placements:
        """Placement in which a tensor is left where it is made (R for inputs and constants)."""
        if name in self._sources:
            return self._sources[name]
        read = self._graph.tensors[name].read
        if read is not None:
            placements = read_placements(read, self._store.decisions[read.parameter].placement)
            assert placements is not None, "a plan stores no parameter split along a dim that a read drops"
            return placements
        return (REPLICATE,) * len(self._communicator.mesh_shape)

    def redistribute(self, index: int) -> None:
        """Run the forward steps of a redistribution."""
        decision = self._decisions.redistributions[index]
        value = self._source(decision.tensor, decision.source)
        shape = self._graph.tensors[decision.tensor].type.shape
        made = redistribute(self._communicator, value, shape, decision.source, decision.forward)
        read = self._graph.tensors[decision.tensor].read
        if read is not None and self._store.is_sharded(read.parameter):
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
        found = {(name, self._sources[name]): parts for name, parts in self._activations.items()}
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
            return [read_part(part, read) for part in self._store.parts(read.parameter)]
        is_input = tensor.kind is TensorKind.INPUT
        cache = self._inputs if is_input else self._constants
        key = (name, placement)
        if key not in cache:
            whole = self._fed[name] if is_input else self._constant(name)
            mesh_shape = self._communicator.mesh_shape
            cache[key] = [place(whole, placement, mesh_shape, rank) for rank in self._communicator.ranks]
        return cache[key]

    def _constant(self, name: str) -> Tensor:
        value = self._graph.constants.value(name, self._store.weights.constant)
        return self._tensor(value, self._graph.tensors[name].type.dtype)

    def _tensor(self, value: np.ndarray, dtype: str) -> Tensor:
        tensor = torch.from_numpy(plain_array(value))
        return tensor.to(self._communicator.device, torch_dtype(dtype, self._dtype))
