"""From a search result to the plan document: the decisions, lowered, priced, predicted and certified."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from tap_planner.pipelining import PipelineCuts, sharing_transfers
from tap_planner.plan import (
    AS_LIBRARY,
    Certificate,
    CollectiveEntry,
    IdlePlaces,
    ModelInput,
    Overlap,
    PlanDocument,
    Predicted,
    Producer,
    build_document,
    gap_basis_points,
    idle_devices,
    overlap_of,
)
from tap_planner.requests import PreparedSearch, times_of
from tap_planner.verification import lagrangian_bound, proof_entries, stages_of

if TYPE_CHECKING:
    from tap_planner.cluster import Cluster, Mesh
    from tap_planner.graph import Graph
    from tap_planner.program import Program
    from tap_planner.search import SearchResult
    from tap_planner.simulate import Prediction, Price

__all__ = ["LoweredResult", "document_of", "lower_result", "model_input", "new_tokens", "producer"]

_log = logging.getLogger("tap_planner")

NOT_IN_OBJECTIVE = ("bucket latency", "overlap", "transient memory")
"""What objective A and memory model M leave out; docs/cost-model.md says how each enters the prediction."""
NOT_IN_OBJECTIVE_OF_INFERENCE = ("overlap", "live activations", "transient memory")
"""The same in inference."""
NOT_IN_SENT_BYTES = ("bucket padding", "algorithms that send more", "transient memory")
"""What sent bytes and memory model M leave out, where these are the objective."""
NOT_IN_SENT_BYTES_OF_INFERENCE = ("algorithms that send more", "live activations", "transient memory")
"""The same in inference."""
NOT_IN_VOLUMES = ("topology and latency of communication",)
"""What is left out besides where communication is priced by its volume."""
NOT_IN_PIPELINES = ("queues of transfers",)
"""What is left out besides where there are pipeline stages."""
MANY_TIMES = 2
"""A plan of the least communication whose operators take so many times as long as they must is worth a warning."""


@dataclass(frozen=True, kw_only=True)
class LoweredResult:
    """A search result as a Program on the devices that it uses."""

    result: SearchResult
    used: Cluster
    """The devices that the plan uses."""
    program: Program
    overlap: Overlap
    """What the runtime that will run it hides."""
    cuts: PipelineCuts | None = None
    """Where it is in stages, how else it may be cut."""

    def within(self, limits_bytes: Sequence[int], recomputes: Sequence[str]) -> LoweredResult | None:
        """The same plan in other stages, of which none holds more than its limit, and whose repeats run again no more
        than that needs; None where none are known."""
        program = None if self.cuts is None else self.cuts.within(limits_bytes, self.price.stage_bytes, recomputes)
        return None if program is None else replace(self, program=program)

    def sharing_transfers(self) -> Iterator[LoweredResult]:
        """The same plan, with transfers between its stages shared out over axes of the mesh in other ways."""
        for program in sharing_transfers(self.program, self.used):
            yield replace(self, program=program)

    @cached_property
    def prediction(self) -> Prediction:
        """The step with the latency of every collective, less what is hidden behind compute."""
        from tap_planner.simulate import predict

        return predict(self.program, self.used, overlap=self.overlap)

    @cached_property
    def price(self) -> Price:
        """Objective A and memory model M."""
        from tap_planner.simulate import price_program

        return price_program(self.program, self.used)

    def certified_by(self, best: SearchResult) -> LoweredResult:
        """The same plan, as the answer of a search that found another one of less objective."""
        if self.result is best:
            return self
        decisions = self.result.decisions
        result = replace(
            self.result,
            write=lambda: decisions,
            bound_ns=best.bound_ns,
            leaves=best.leaves,
            statistics=replace(best.statistics, strategies=self.result.statistics.strategies),
            smallest=best.smallest,
            contenders=best.contenders,
        )
        return replace(self, result=result)


def lower_result(result: SearchResult, cluster: Cluster, overlap: str = AS_LIBRARY) -> LoweredResult:
    """Write a search result out, in stages of about equal time where it is for a pipeline.

    Args:
        result: what the search found.
        cluster: all devices.
        overlap: the option, see ``PlanOptions``.
    """
    from tap_planner.cluster import part_of
    from tap_planner.program import lower

    used, hidden = part_of(cluster, result.mesh), overlap_of(overlap, cluster.library)
    if result.pipeline is not None:
        cuts = PipelineCuts(result, used)
        return LoweredResult(result=result, used=used, program=cuts.even(), overlap=hidden, cuts=cuts)
    return LoweredResult(result=result, used=used, program=lower(result.folded.graph, result.decisions), overlap=hidden)


def document_of(prepared: PreparedSearch, lowered: LoweredResult) -> PlanDocument:
    """The document of a search result; its objective and collectives are counted from the lowered Program."""
    from tap_planner.cluster import cluster_to_json, idle_boxes, mesh_places
    from tap_planner.simulate import price_program, sent_by_program

    result, program, used = lowered.result, lowered.program, lowered.used
    graph, decisions = program.graph, program.decisions
    price = price_program(program, used, times_of(prepared.options))
    sent = prepared.options.objective == "communication"
    objective = sent_by_program(program, used) if sent else price.objective_ns
    if result.pipeline is None and (objective, price.memory_bytes) != (result.objective_ns, result.memory_bytes):
        unit = "bytes sent" if sent else "ns"
        raise AssertionError(
            f"the search priced the plan at {result.objective_ns} {unit} and {result.memory_bytes} bytes, "
            f"its program costs {objective} {unit} and {price.memory_bytes} bytes"
        )
    if sent:
        _warn_of_repeated_work(prepared, price, used, objective)
    collectives = _collective_entries(program, used, result.mesh)
    return build_document(
        producer=producer(),
        model=model_input(prepared.graph),
        cluster=cluster_to_json(prepared.cluster),
        options=prepared.options,
        decisions=decisions,
        reads={name: tensor.read.parameter for name, tensor in graph.tensors.items() if tensor.read is not None},
        ranks=mesh_places(prepared.cluster, result.mesh),
        left_out=tuple(IdlePlaces(first=f, last=last) for f, last in idle_boxes(prepared.cluster, result.mesh)),
        collectives=collectives,
        predicted=_predicted(lowered, price),
        certificate=_certificate(prepared, result, price),
        idle=idle_devices(decisions, {name: tensor.type.shape for name, tensor in graph.tensors.items()}),
    )


def _warn_of_repeated_work(prepared: PreparedSearch, price: Price, used: Cluster, sent_bytes: int) -> None:
    """Devices that all repeat the work have nothing to send: say so where that is the plan of least communication."""
    from tap_planner.search import least_ns

    least = least_ns(prepared.graph, used, prepared.options.precision)
    if price.compute_ns >= MANY_TIMES * max(least, 1):
        _log.warning(
            f"a device sends {sent_bytes} bytes, but a step takes {price.objective_ns / 1e6:.3f} ms (objective A): its "
            f"operators take {price.compute_ns / least:.1f} times as long as split over all devices, as devices repeat "
            "work instead of sharing results; --objective time finds the fastest plan"
        )


def producer() -> Producer:
    """This program."""
    from importlib.metadata import version

    return Producer(version=version("tap-planner"), ortools=version("ortools"))


def model_input(graph: Graph) -> ModelInput:
    """What a plan says of its model.

    Args:
        graph: bound with the global batch.
    """
    return ModelInput(
        name=graph.name,
        file_sha256=graph.file_sha256,
        graph_digest=graph.digest,
        dims=dict(graph.dims),
        batch=graph.batch,
    )


def _collective_entries(program: Program, cluster: Cluster, mesh: Mesh) -> tuple[CollectiveEntry, ...]:
    from tap_planner.cluster import PIPELINE
    from tap_planner.cost import CollectiveModel, ComputeModel
    from tap_planner.program import collectives

    model = CollectiveModel(cluster, mesh)
    compute = ComputeModel(cluster.device, program.decisions.precision)
    entries: list[CollectiveEntry] = []
    for collective in collectives(program):
        payload = compute.tensor_bytes(collective.dtype, collective.elements)
        cost = model.cost(collective.kind, collective.axes or (PIPELINE,), payload)
        entries.append(
            CollectiveEntry(
                phase=collective.phase.value,
                kind=collective.kind,
                axes=tuple(mesh.axes[axis].name for axis in collective.axes),
                algorithm=cost.algorithm,
                elements=collective.elements,
                bytes=payload,
                count=collective.count,
                time_ns=cost.ns,
            )
        )
    return tuple(entries)


def _predicted(lowered: LoweredResult, price: Price) -> Predicted:
    prediction = lowered.prediction
    return Predicted(
        step_ns=prediction.step_ns,
        compute_ns=prediction.compute_ns,
        communication_ns=prediction.communication_ns,
        hidden_ns=prediction.hidden_ns,
        memory_bytes=_memory_by_kind(price, lowered.program.decisions.mode),
        stage_memory_bytes=price.stage_bytes,
        tokens=new_tokens(lowered.program),
    )


def _memory_by_kind(price: Price, mode: str) -> dict[str, int]:
    if mode == "infer":
        return {
            "parameters": price.parameter_bytes,
            "caches": price.cache_bytes,
            "inputs": price.input_bytes,
            "outputs": price.output_bytes,
            **({"workspace": price.workspace_bytes} if price.workspace_bytes else {}),
        }
    return {
        "parameters": price.parameter_bytes,
        "gradients": price.gradient_bytes,
        "optimizer": price.optimizer_bytes,
        "activations": price.activation_bytes,
        **({"unsharded": price.unsharded_bytes} if price.unsharded_bytes else {}),
        "workspace": price.workspace_bytes,
    }


def new_tokens(program: Program) -> int | None:
    """New tokens of a step over the whole batch, where a decoder's caches say how many each sequence gets."""
    new = program.graph.new_positions
    return None if new is None else new * program.graph.batch * program.decisions.microbatches


def _certificate(prepared: PreparedSearch, result: SearchResult, price: Price) -> Certificate:
    options = prepared.options
    objective = options.objective
    proof = proof_entries(result.leaves)
    if result.pipeline is not None:
        result = replace(result, objective_ns=price.objective_ns)
    lagrangian = lagrangian_bound(proof, result.objective_ns, stages_of(prepared))
    bound = max(result.bound_ns, lagrangian)
    gap = gap_basis_points(result.objective_ns, bound)
    training, statistics = result.decisions.mode == "train", result.statistics
    left_out = NOT_IN_OBJECTIVE if training else NOT_IN_OBJECTIVE_OF_INFERENCE
    proven: dict[str, Any] = {"bound_ns": bound, "lagrangian_bound_ns": lagrangian, "gap_basis_points": gap}
    optimal = result.objective_ns == bound
    if objective == "communication":
        left_out = NOT_IN_SENT_BYTES if training else NOT_IN_SENT_BYTES_OF_INFERENCE
        proven = {"objective_bytes": result.objective_ns, "bound_bytes": bound, "lagrangian_bound_bytes": lagrangian}
        proven["gap_basis_points"] = gap
    elif objective == "memory":
        assert result.smallest is not None
        least = min(result.smallest.bound_bytes, result.memory_bytes)
        optimal = optimal and least == result.memory_bytes
        proven |= {"objective_bytes": result.memory_bytes, "bound_bytes": least, "time_gap_basis_points": gap}
        proven["gap_basis_points"] = gap_basis_points(result.memory_bytes, least)
        proven["memory_proof"] = proof_entries(result.smallest.leaves)
    if result.pipeline is not None:
        left_out = (*left_out, *NOT_IN_PIPELINES)
    if options.cost == "volume":
        left_out = (*left_out, *NOT_IN_VOLUMES)
    return Certificate(
        objective_ns=price.objective_ns,
        proof=proof,
        status="optimal" if optimal else "feasible",
        **proven,
        space={
            "meshes": statistics.meshes,
            "configurations": statistics.configurations,
            "solved": statistics.solved,
            "pruned": statistics.pruned,
            "strategies": statistics.strategies,
        },
        not_in_objective=left_out,
        near=result.near,
        states=result.states,
    )
