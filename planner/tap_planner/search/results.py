"""What a graph returns, as memory model M counts it in inference: outputs, and the caches that stay on the devices."""

from __future__ import annotations

import numpy as np

from tap_planner.operators import OUTPUT
from tap_planner.search.space import ModelSpace


def result_bytes(space: ModelSpace, index: int) -> np.ndarray:
    """[num_strategies] bytes of what an operator returns from the graph of one microbatch; 0 for all but ``Output``.

    What a cache was before the step lies in the same memory.

    Args:
        space: the graph on the mesh.
        index: of the operator.
    """
    operator, strategies = space.graph.operators[index], space.operator(index).strategies
    if operator.type != OUTPUT:
        return np.zeros(len(strategies), dtype=np.int64)
    tensor = space.graph.tensors[operator.outputs[0]]
    return np.array([space.tensor_bytes(tensor, strategy.outputs[0]) for strategy in strategies], dtype=np.int64)
