"""What each rank holds of the parameters and of their gradients, at every ZeRO level.

Level 0 and 1 keep whole local parts; level 1 and 2 keep optimizer states (and at 2 gradients) of a shard of each
bucket; level 3 keeps only the shard of the parameters too. A bucket is flattened in ``BucketDecision.parameters``
order and padded to a multiple of the shards. Shards lie over the ZeRO axes; over the other data axes of a bucket they
are replicated, and their gradients are summed once a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from tap_planner.apply.communicator import Communicator, Parts, group_index, group_size
from tap_planner.apply.operators import torch_dtype
from tap_planner.apply.optimizer import Optimizer
from tap_planner.apply.weights import WeightSource
from tap_planner.graph import Parameter, ParameterRead
from tap_planner.plan import BucketDecision
from tap_planner.program import Program
from tap_planner.sharding import local_indices


def read_part(part: Tensor, read: ParameterRead) -> Tensor:
    """A local part of a stored parameter as a tensor reads it."""
    kept = [dim for dim in read.dims if dim is not None]
    order = kept + [dim for dim in range(part.dim()) if dim not in kept]
    shape = [1 if dim is None else part.shape[dim] for dim in read.dims]
    return part.permute(order).reshape(shape)


def unread_part(part: Tensor, read: ParameterRead, stored_shape: Sequence[int]) -> Tensor:
    """Inverse of ``read_part`` for gradients."""
    kept = [dim for dim in read.dims if dim is not None]
    order = kept + [dim for dim in range(len(stored_shape)) if dim not in kept]
    permuted = part.reshape([stored_shape[dim] for dim in order])
    return permuted.permute([order.index(dim) for dim in range(len(order))])


class ParameterStore:
    """Parameters, gradients and their reduction on the ranks of this process.

    Args:
        program: what runs.
        communicator: collectives go through it; its stage's parameters are held.
        weights: initial values.
        dtype: type that float parameters are held in.
    """

    def __init__(self, program: Program, communicator: Communicator, weights: WeightSource, dtype: torch.dtype) -> None:
        self._communicator = communicator
        self._dtype = dtype
        self.weights = weights
        held = set(program.parameters[communicator.stage])
        self.decisions = {decision.name: decision for decision in program.decisions.parameters if decision.name in held}
        self._buckets = {
            bucket.id: bucket for bucket in program.decisions.buckets if held.issuperset(bucket.parameters)
        }
        self._values: dict[str, Parts] = {}
        self._shapes: dict[str, list[torch.Size]] = {}
        self._shards: dict[int, Parts] = {}
        """Level 3: the shards of the parameters; levels 1 and 2: updated shards that wait to be gathered."""
        self._gradients: dict[str, Parts] = {}
        self._gradient_shards: dict[int, Parts] = {}
        for parameter in program.graph.parameters:
            if parameter.name in self.decisions:
                self._load(parameter, weights)
        for bucket in self._buckets.values():
            if bucket.zero_level == 3:
                self._shards[bucket.id] = self._own_shards(bucket, self._flattened(bucket, self._values))
                for name in bucket.parameters:
                    del self._values[name]

    def _load(self, parameter: Parameter, weights: WeightSource) -> None:
        decision = self.decisions[parameter.name]
        dtype = torch_dtype(parameter.type.dtype, self._dtype)
        parts: Parts = []
        for coordinates in self._communicator.ranks:
            indices = local_indices(
                parameter.type.shape, decision.placement, self._communicator.mesh_shape, coordinates
            )
            value = torch.from_numpy(plain_array(weights.part(parameter, indices)))
            parts.append(value.to(self._communicator.device, dtype, copy=True).contiguous())
        self._values[parameter.name] = parts
        self._shapes[parameter.name] = [part.shape for part in parts]

    def parts(self, name: str) -> Parts:
        """Local parts of a parameter; at ZeRO 3 its bucket must have been gathered."""
        return self._values[name]

    def is_whole(self, name: str) -> bool:
        """Whether ``parts`` has a parameter now."""
        return name in self._values

    def gather(self, number: int) -> None:
        """Make the parameters of a ZeRO-3 bucket whole."""
        bucket = self._buckets[number]
        if bucket.elements:
            self._spread(bucket, self._communicator.all_gather(self._shards[number], bucket.zero_axes))
        else:
            self._spread(bucket, self._shards[number])

    def forget(self, number: int) -> None:
        """Forget the whole parameters of a ZeRO-3 bucket."""
        for name in self._buckets[number].parameters:
            del self._values[name]

    def is_sharded(self, name: str) -> bool:
        """Whether only a shard of a parameter lasts (ZeRO 3)."""
        return self.decisions[name].zero_level == 3

    def begin_step(self) -> None:
        """Forget the gradients of the step before."""
        self._gradients.clear()
        self._gradient_shards.clear()

    def accumulate(self, name: str, read: ParameterRead, gradients: Sequence[Tensor]) -> None:
        """Add gradients of a read of a parameter, in the placement of ``ParameterDecision.gradient``."""
        stored = [
            unread_part(gradient, read, shape) for gradient, shape in zip(gradients, self._shapes[name], strict=True)
        ]
        known = self._gradients.get(name)
        self._gradients[name] = stored if known is None else [a + b for a, b in zip(known, stored, strict=True)]

    def gradient(self, name: str) -> Parts:
        """What has accumulated of a parameter's gradient."""
        known = self._gradients.get(name)
        if known is not None:
            return known
        device = self._communicator.device
        return [torch.zeros(shape, dtype=self._dtype, device=device) for shape in self._shapes[name]]

    def put_gradient(self, name: str, gradient: Parts) -> None:
        """Put another gradient in the place of what has accumulated."""
        self._gradients[name] = gradient

    def reduce(self, number: int) -> None:
        """Reduce the gradients of a bucket that have accumulated since the last time."""
        bucket = self._buckets[number]
        if not bucket.elements:
            return
        flat = self._flattened(bucket, {name: self.gradient(name) for name in bucket.parameters})
        if bucket.zero_level == 0:
            reduced = self._communicator.all_reduce(flat, bucket.axes)
            self._gradients.update(self._unflattened(bucket, reduced))
            return
        shards = self._num_shards(bucket)
        slots = [part.reshape(shards, part.numel() // shards) for part in flat]
        scattered = self._communicator.reduce_scatter(slots, bucket.zero_axes)
        known = self._gradient_shards.get(number)
        if known is not None:
            scattered = [a + b for a, b in zip(known, scattered, strict=True)]
        self._gradient_shards[number] = scattered
        for name in bucket.parameters:
            self._gradients.pop(name, None)

    def reduce_shards(self, number: int) -> None:
        """Sum a bucket's shards of gradients over the data axes that ZeRO does not shard over."""
        bucket = self._buckets[number]
        if number in self._gradient_shards:
            shards = self._gradient_shards[number]
            self._gradient_shards[number] = self._communicator.all_reduce(shards, bucket.rest_axes)

    def update(self, optimizer: Optimizer) -> None:
        """Run the optimizer on everything that these ranks are responsible for."""
        sharded = {name for bucket in self._buckets.values() if bucket.zero_level for name in bucket.parameters}
        for name, decision in self.decisions.items():
            if decision.trainable and name not in sharded:
                self._values[name] = _updated(optimizer, name, self._values[name], self.gradient(name))
        for bucket in self._buckets.values():
            if not bucket.zero_level or bucket.id not in self._gradient_shards:
                continue
            shards = self._shards.get(bucket.id) if bucket.zero_level == 3 else None
            if shards is None:
                shards = self._own_shards(bucket, self._flattened(bucket, self._values))
            gradients = self._gradient_shards[bucket.id]
            self._shards[bucket.id] = _updated(optimizer, f"bucket {bucket.id}", shards, gradients)

    def gather_updated(self, number: int) -> None:
        """Make the parameters of a bucket whole after its shards were updated (levels 1 and 2)."""
        bucket = self._buckets[number]
        if bucket.elements:
            self._spread(bucket, self._communicator.all_gather(self._shards.pop(number), bucket.zero_axes))

    def final_values(self, communicator: Communicator) -> dict[str, Parts]:
        """Local parts of every trainable parameter now; what is sharded is gathered through ``communicator``."""
        result = {name: self._values[name] for name in self._values if self.decisions[name].trainable}
        for number, shards in self._shards.items():
            result.update(self._whole(self._buckets[number], shards, communicator))
        return result

    def final_gradients(self, communicator: Communicator) -> dict[str, Parts]:
        """Reduced local gradients of every trainable parameter, likewise."""
        result = {name: self.gradient(name) for name, decision in self.decisions.items() if decision.trainable}
        for number, shards in self._gradient_shards.items():
            result.update(self._whole(self._buckets[number], shards, communicator))
        return result

    def _num_shards(self, bucket: BucketDecision) -> int:
        return group_size(self._communicator.mesh_shape, bucket.zero_axes)

    def _flattened(self, bucket: BucketDecision, values: dict[str, Parts]) -> Parts:
        """Per rank the flat concatenation, padded where the bucket is sharded."""
        shards = self._num_shards(bucket) if bucket.zero_level else 1
        result: Parts = []
        for rank in range(len(self._communicator.ranks)):
            flat = torch.cat([values[name][rank].reshape(-1) for name in bucket.parameters])
            missing = -flat.numel() % shards
            result.append(torch.cat([flat, flat.new_zeros(missing)]) if missing else flat)
        return result

    def _unflattened(self, bucket: BucketDecision, flat: Sequence[Tensor]) -> dict[str, Parts]:
        result: dict[str, Parts] = {name: [] for name in bucket.parameters}
        for rank, part in enumerate(flat):
            position = 0
            for name in bucket.parameters:
                shape = self._shapes[name][rank]
                result[name].append(part[position : position + shape.numel()].reshape(shape))
                position += shape.numel()
        return result

    def _own_shards(self, bucket: BucketDecision, flat: Sequence[Tensor]) -> Parts:
        shards = self._num_shards(bucket)
        mesh_shape = self._communicator.mesh_shape
        return [
            part.reshape(shards, part.numel() // shards)[group_index(mesh_shape, bucket.zero_axes, rank)].clone()
            for rank, part in zip(self._communicator.ranks, flat, strict=True)
        ]

    def _spread(self, bucket: BucketDecision, gathered: Sequence[Tensor]) -> None:
        self._values.update(self._unflattened(bucket, [part.reshape(-1) for part in gathered]))

    def _whole(self, bucket: BucketDecision, shards: Sequence[Tensor], communicator: Communicator) -> dict[str, Parts]:
        gathered = communicator.all_gather(shards, bucket.zero_axes)
        return self._unflattened(bucket, [part.reshape(-1) for part in gathered])


def _updated(optimizer: Optimizer, name: str, values: Sequence[Tensor], gradients: Sequence[Tensor]) -> Parts:
    return [
        optimizer.update((name, rank), value, gradient)
        for rank, (value, gradient) in enumerate(zip(values, gradients, strict=True))
    ]


def plain_array(value: np.ndarray) -> np.ndarray:
    """A writable array of a type that torch knows (bfloat16 and unsigned types are widened)."""
    if value.dtype.kind in "fV" and value.dtype not in (np.float32, np.float64):
        return value.astype(np.float64)
    if value.dtype.kind == "u" and value.dtype != np.uint8:
        return value.astype(np.int64)
    return value if value.flags.writeable and value.flags.c_contiguous else np.array(value, order="C")
