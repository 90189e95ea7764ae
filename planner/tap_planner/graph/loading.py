"""ONNX files from disk, without weights; every unusable file ends in one line that says why."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tap_planner.errors import ModelError

MIN_OPSET = 7
MAX_OPSET = 23
_LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A parsed ONNX file; external weights have not been touched."""

    path: Path
    proto: onnx.ModelProto
    sha256: str
    opset: int
    """Version of the default domain."""

    @property
    def name(self) -> str:
        """Base name of the file."""
        return self.path.name


def load_model(path: Path) -> ModelFile:
    """Parse an ONNX file without its external data.

    Raises:
        ModelError: the file is absent, is no ONNX model, or has an operator set that is not supported.
    """
    data = _read(path)
    if data.startswith(_LFS_MAGIC):
        raise ModelError(f"{path}: a git-lfs pointer, not a readable ONNX model", hint="run: git lfs pull")
    proto = onnx.ModelProto()
    try:
        proto.ParseFromString(data)
    except (DecodeError, RuntimeError, ValueError) as error:
        raise ModelError(f"{path}: not a readable ONNX model (truncated, or another format)") from error
    if proto.ir_version <= 0 or not proto.HasField("graph"):
        raise ModelError(f"{path}: not a readable ONNX model (no IR version or no graph)")
    return ModelFile(path=path, proto=proto, sha256=hashlib.sha256(data).hexdigest(), opset=_default_opset(path, proto))


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ModelError(f"{path}: no such file", hint="check the path of the model") from error
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error.strerror})") from error
    if not data:
        raise ModelError(f"{path}: an empty file, not a readable ONNX model", hint="fetch or export the model again")
    return data


def _default_opset(path: Path, proto: onnx.ModelProto) -> int:
    versions = [entry.version for entry in proto.opset_import if entry.domain in ("", "ai.onnx")]
    if not versions:
        if proto.graph.node and all(node.domain not in ("", "ai.onnx") for node in proto.graph.node):
            return MAX_OPSET
        raise ModelError(
            f"{path}: no operator set version for the default domain, expected {MIN_OPSET} to {MAX_OPSET}",
            hint="the file is no complete ONNX model; export it again",
        )
    version = versions[0]
    if not MIN_OPSET <= version <= MAX_OPSET:
        raise ModelError(
            f"{path}: operator set {version} is not supported, expected {MIN_OPSET} to {MAX_OPSET}",
            hint="convert it with onnx.version_converter.convert_version, or export it again",
        )
    return version
