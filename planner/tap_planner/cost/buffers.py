"""Memory that communication takes on a device, whatever a plan decides: the library's buffers and one bucket."""

from __future__ import annotations

from collections.abc import Sequence

from tap_planner.cluster import Cluster
from tap_planner.cost.memory import parameter_bytes
from tap_planner.graph import Graph
from tap_planner.schedule import BUCKET_ELEMENTS


def num_communicators(mesh_shape: Sequence[int], num_stages: int = 1) -> int:
    """Communicators that a device takes part in: one for each axis of more than one device, one along the stages of a
    pipeline, and that of all devices; along a single axis these are one and the same.

    Args:
        mesh_shape: sizes of the axes, of one stage.
        num_stages: stages of a pipeline.
    """
    axes = sum(size > 1 for size in (num_stages, *mesh_shape))
    return axes + 1 if axes > 1 else axes


def workspace_bytes(
    cluster: Cluster, mesh_shape: Sequence[int], graph: Graph, precision: str, *, training: bool, num_stages: int = 1
) -> int:
    """Buffers of all communicators and, in training, the flat copy of one bucket of gradients.

    It depends on the mesh alone, so that it is the same for every plan on it. The copy counts as a full bucket, or as
    the gradients of all that is trained where these are less. Where the library has no buffers, nothing counts.

    Args:
        cluster: says what one communicator takes.
        mesh_shape: sizes of the axes.
        graph: its parameters.
        precision: ``fp32``, ``bf16``, ``fp16`` or ``fp64``.
        training: whether gradients are reduced.
        num_stages: stages of a pipeline; what is returned is that of a device of one of them.
    """
    communicators = num_communicators(mesh_shape, num_stages)
    buffers = communicators * cluster.collective_buffers_bytes
    if not buffers or not training:
        return buffers
    trained = sum(parameter.type.num_elements for parameter in graph.parameters if parameter.trainable)
    return buffers + min(trained, BUCKET_ELEMENTS) * parameter_bytes(precision, "sgd").gradient
