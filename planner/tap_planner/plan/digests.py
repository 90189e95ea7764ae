"""The digests of a plan: one over what the applier obeys, one over the whole text."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace

from tap_planner.errors import PlanFormatError
from tap_planner.plan.canonical import render
from tap_planner.plan.certificate import Certificate
from tap_planner.plan.decisions import Decisions
from tap_planner.plan.document import (
    FORMAT_VERSION,
    CollectiveEntry,
    Digests,
    IdleDevices,
    IdlePlaces,
    MeshSection,
    ModelInput,
    PlanDocument,
    Predicted,
    Producer,
)
from tap_planner.plan.encode import document_to_json
from tap_planner.plan.fold import fold_decisions
from tap_planner.plan.options import PlanOptions
from tap_planner.plan.pipelines import pipeline_section
from tap_planner.plan.placement import PlacementSection

_DECISION_SECTIONS = ("mesh", "pipeline", "parameters", "blocks", "repeats", "redistributions", "buckets")
_DECISION_OPTIONS = ("mode", "loss", "precision", "optimizer")


def compute_digests(document: PlanDocument) -> Digests:
    """The digests that the document should carry."""
    json = document_to_json(replace(document, digests=None))
    options = json["options"]
    assert isinstance(options, dict)
    decisions: dict[str, object] = {key: json[key] for key in _DECISION_SECTIONS}
    decisions |= {key: options[key] for key in _DECISION_OPTIONS}
    if "optimizer" in json:  # only where its states are not the default
        decisions["optimizer_states"] = document.optimizer_states
    return Digests(decisions=_sha256(render(decisions)), plan=_sha256(render(json)))


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def with_digests(document: PlanDocument) -> PlanDocument:
    """The document with its digests computed."""
    return replace(document, digests=compute_digests(document))


def check_digests(document: PlanDocument) -> None:
    """Verify that nobody has edited the plan.

    A plan of a newer minor version may hold keys that are not known here, so that only plans of this version can be
    checked; others pass.

    Raises:
        PlanFormatError: a digest is missing or does not fit.
    """
    if document.digests is None:
        raise PlanFormatError("digests: the plan has none", hint="Write the plan again with tap-plan.")
    if document.format_version != FORMAT_VERSION:
        return
    wanted = compute_digests(document)
    for name, found, expected in (
        ("decisions", document.digests.decisions, wanted.decisions),
        ("plan", document.digests.plan, wanted.plan),
    ):
        if found != expected:
            raise PlanFormatError(
                f"digests.{name}: {found[:12]}, expected {expected[:12]}: the plan was edited after it was written",
                hint="Write the plan again with tap-plan; state wishes as --constraint instead of editing.",
            )


def build_document(
    *,
    producer: Producer,
    model: ModelInput,
    cluster: Mapping[str, object],
    options: PlanOptions,
    decisions: Decisions,
    reads: Mapping[str, str],
    ranks: tuple[tuple[int, ...], ...],
    collectives: tuple[CollectiveEntry, ...],
    predicted: Predicted,
    certificate: Certificate,
    idle: tuple[IdleDevices, ...] = (),
    placement: PlacementSection | None = None,
    left_out: tuple[IdlePlaces, ...] = (),
) -> PlanDocument:
    """Fold decisions into a complete document with digests.

    Args:
        producer: the program that writes the plan.
        model: the model that was planned.
        cluster: ``cluster_to_json``.
        options: as given, with the bound batch and loss filled in.
        decisions: the plan.
        reads: tensor name to the name of the parameter that it reads.
        ranks: place of every rank in the cluster, see ``MeshSection``.
        collectives: counted from the Program.
        predicted: cost of the plan.
        certificate: proof of its quality.
        idle: devices of the mesh that have nothing to do.
        placement: of a device placement, what is said of it.
        left_out: devices of the cluster outside the mesh.
    """
    loss = decisions.loss
    return with_digests(
        PlanDocument(
            producer=producer,
            model=model,
            cluster=cluster,
            options=replace(
                options,
                batch=model.batch,
                loss=None if loss is None else loss.kind,
                loss_output=None if loss is None else loss.output,
            ),
            mesh=MeshSection(axes=decisions.axes, order=decisions.order, ranks=ranks, idle_devices=left_out),
            pipeline=pipeline_section(decisions),
            folded=fold_decisions(decisions, reads),
            optimizer_states=decisions.optimizer_states,
            collectives=collectives,
            idle=idle,
            placement=placement,
            predicted=predicted,
            certificate=certificate,
        )
    )
