"""Operator sets: which version of which domain a file is written in, and old ones brought up to date."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tap_planner.errors import ModelError
from tap_planner.graph.native import NativeError, isolated
from tap_planner.graph.subgraphs import all_nodes

OLDEST_OPSET = 1
"""Older than this nothing is read; up to ``MIN_OPSET`` the file is upgraded first."""
MIN_OPSET = 7
"""The oldest version that is read as it is."""
MAX_OPSET = 28
_RANGE = f"{OLDEST_OPSET} to {MAX_OPSET}"
_DEFAULT = ("", "ai.onnx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """A model whose domains and versions are known."""

    proto: onnx.ModelProto
    opset: int
    """Version of the default domain."""
    notes: tuple[str, ...]


def settle_opsets(path: Path, proto: onnx.ModelProto) -> Settled:
    """Write the default domain as the empty text, complete missing imports, and upgrade old operator sets.

    Raises:
        ModelError: the version of the default domain is absent, not supported, or cannot be upgraded.
    """
    opset = _default_opset(path, proto)
    notes = _settle_domains(proto, opset)
    if opset < MIN_OPSET:
        proto = _upgraded(path, proto, opset)
        notes.append(f"the model is written in operator set {opset}; it was upgraded to {MIN_OPSET}")
        opset = MIN_OPSET
    return Settled(proto=proto, opset=opset, notes=tuple(notes))


def _default_opset(path: Path, proto: onnx.ModelProto) -> int:
    versions = sorted({entry.version for entry in proto.opset_import if entry.domain in _DEFAULT})
    if not versions:
        if proto.graph.node and all(node.domain not in _DEFAULT for node in proto.graph.node):
            return MAX_OPSET
        raise ModelError(
            f"{path}: no operator set version for the default domain, expected {_RANGE}",
            hint="the file is no complete ONNX model; export it again",
        )
    if len(versions) > 1:
        raise ModelError(f"{path}: two operator set versions for the default domain, {versions[0]} and {versions[-1]}")
    version = versions[0]
    if not OLDEST_OPSET <= version <= MAX_OPSET:
        raise ModelError(
            f"{path}: operator set {version} is not supported, expected {_RANGE}",
            hint="convert it with onnx.version_converter.convert_version, or export it again",
        )
    return version


def _settle_domains(proto: onnx.ModelProto, opset: int) -> list[str]:
    """Uniform names of domains in imports and nodes; a domain without import is version 1."""
    imported = {entry.domain for entry in proto.opset_import} | {function.domain for function in proto.functions}
    notes: list[str] = []
    for nodes in (proto.graph.node, *(function.node for function in proto.functions)):
        for node in all_nodes(nodes):
            domain = node.domain
            if not domain:
                continue
            if domain == "ai.onnx":
                node.domain = ""
            elif domain not in imported:
                imported.add(domain)
                proto.opset_import.add(domain=domain, version=1)
                label = node.name or next(iter(node.output), "")
                notes.append(
                    f"domain {domain!r} has no operator set version in the file (first met at node {label!r}, "
                    f"{node.op_type}): version 1 is assumed"
                )
    others = [(entry.domain, entry.version) for entry in proto.opset_import if entry.domain not in _DEFAULT]
    del proto.opset_import[:]
    for domain, version in [("", opset), *dict(others).items()]:
        proto.opset_import.add(domain=domain, version=version)
    for function in proto.functions:
        for entry in function.opset_import:
            if entry.domain == "ai.onnx":
                entry.domain = ""
    return notes


def _upgraded(path: Path, proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    from onnx import version_converter

    if not proto.graph.name:
        proto.graph.name = "graph"

    def convert() -> bytes:
        return version_converter.convert_version(proto, MIN_OPSET).SerializeToString()

    try:
        return onnx.ModelProto.FromString(isolated(convert, proto.ByteSize()))
    except (NativeError, DecodeError) as error:
        where = _culprit(proto, str(error))
        # The converter puts its own source line in front.
        text = re.sub(r"^.*Assertion .* failed: ", "", str(error))
        raise ModelError(
            f"{path}: {where}operator set {opset} cannot be upgraded to {MIN_OPSET} ({text.strip()})",
            hint=f"the lowest operator set that needs no upgrade is {MIN_OPSET}; export with it or a newer one",
        ) from error


def _culprit(proto: onnx.ModelProto, text: str) -> str:
    """The first node whose operator the message names, or that MIN_OPSET does not know."""
    adapter = re.search(r"adapt_([a-z]+)_", text)
    words = set(re.findall(r"\w+", text))
    for node in all_nodes(proto.graph.node):
        named = node.op_type in words or (adapter is not None and node.op_type.lower() == adapter[1])
        if named or (not node.domain and not onnx.defs.has(node.op_type, MIN_OPSET)):
            return f"node {node.name or next(iter(node.output), '')!r} ({node.op_type}): "
    return ""
