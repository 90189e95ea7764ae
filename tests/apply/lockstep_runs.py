"""Plans run in lockstep, and what they list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from tap_planner.apply import LockstepCommunicator, RandomWeights, VerificationReport, synthetic_inputs, verify_program
from tap_planner.graph import Graph
from tap_planner.plan import Decisions
from tap_planner.program import Collective, Phase, collectives, lower


def verified(graph: Graph, decisions: Decisions, inputs: Mapping[str, np.ndarray] | None = None) -> VerificationReport:
    """The report on one run with random weights, and synthetic inputs if none are given."""
    report = verify_program(
        lower(graph, decisions),
        LockstepCommunicator(decisions.mesh_shape),
        RandomWeights(graph),
        synthetic_inputs(graph) if inputs is None else inputs,
    )
    assert report is not None
    return report


def listed(graph: Graph, decisions: Decisions, kind: str) -> tuple[Collective, ...]:
    """The collectives of a kind that a plan lists."""
    return tuple(found for found in collectives(lower(graph, decisions)) if found.kind == kind)


def calls_by_phase(found: tuple[Collective, ...]) -> Counter[Phase]:
    """How often collectives are called."""
    counted: Counter[Phase] = Counter()
    for entry in found:
        counted[entry.phase] += entry.count
    return counted
