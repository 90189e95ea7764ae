"""ONNX files from disk, without weights; every unusable file ends in one line that says why.

What comes out is uniform, so that no later part meets a dialect: the default domain is written as the empty text, old
operator sets are upgraded, local functions are inlined, and subgraphs read their constants from the main graph.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from tap_planner.errors import ModelError
from tap_planner.graph.functions import inline_functions
from tap_planner.graph.hoisting import hoist_constants
from tap_planner.graph.upgrade import settle_opsets

_LFS_MAGIC = b"version https://git-lfs"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFile:
    """A parsed ONNX file; external weights have not been touched."""

    path: Path
    proto: onnx.ModelProto
    """Without local functions and with constants in the main graph alone."""
    sha256: str
    opset: int
    """Version of the default domain."""
    notes: tuple[str, ...] = ()
    """What was assumed or changed to read the file."""

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
        raise ModelError(
            f"{path}: not a readable ONNX model (truncated, nested too deeply, or another format)",
            hint="check the file with onnx.checker, or export it again",
        ) from error
    if proto.ir_version <= 0 or not proto.HasField("graph"):
        raise ModelError(f"{path}: not a readable ONNX model (no IR version or no graph)")
    try:
        settled = settle_opsets(path, proto)
        proto = hoist_constants(inline_functions(path, settled.proto))
    except (LookupError, TypeError, AttributeError, UnicodeDecodeError) as error:
        message = f"{path}: not a valid ONNX graph ({type(error).__name__}: {error})"
        raise ModelError(message, hint="check the file with onnx.checker") from error
    sha256 = hashlib.sha256(data).hexdigest()
    return ModelFile(path=path, proto=proto, sha256=sha256, opset=settled.opset, notes=settled.notes)


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
