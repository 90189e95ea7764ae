"""What the exporter of torch says when it fails, in one line with a remedy."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import torch

from tap_planner.errors import CaptureError

_TORCH = Path(torch.__file__).parent
_OWN = Path(__file__).parent
_MOST = 240
"""Characters of a foreign message that are shown."""
_OPERATOR = re.compile(r"op='([^']+)'")
_RETURN = re.compile(r"translating node return ")
_FIXED = (
    re.compile(r"inferred a static shape of (?P<size>\d+) for dimension (?P<what>\S+\])"),
    re.compile(r"marked (?P<what>\S+) as dynamic but your code specialized it to be a constant \((?P<size>\d+)\)"),
)
"""How torch.export says that a dim cannot stay open."""
_SEE = "see docs/exporting.md, 'When the exporter fails'"


def explained(error: Exception, module: torch.nn.Module) -> CaptureError:
    """The error for the user.

    Args:
        error: what ``torch.onnx.export`` raised.
        module: what was exported.
    """
    name = type(module).__name__
    causes = list(_causes(error))
    text = "\n".join(str(cause) for cause in causes)
    operator = _missing_operator(causes)
    if operator:
        return CaptureError(
            f"{name}: torch's exporter has no ONNX operator for {operator}",
            hint=f"compute it from other operators, or emit one of your own by torch.onnx.ops.symbolic; {_SEE}",
        )
    if _RETURN.search(text):
        return CaptureError(
            f"{name}: forward returns something that is neither a tensor nor None",
            hint="wrap the module in one that returns only tensors",
        )
    fixed = next((found for found in (pattern.search(text) for pattern in _FIXED) if found), None)
    if fixed is not None:
        return CaptureError(
            f"{name}: {_argument(fixed['what'])} was to stay open, but the module fixes it to {fixed['size']}",
            hint="leave that dim out of dynamic_dims, or take its size from the input inside forward",
        )
    place = _place(causes)
    if "data-dependent" in text or "DataDependent" in text:
        return CaptureError(
            f"{name}: forward decides by a tensor's value{place}",
            hint=f"use torch.where or torch.cond, or pass the value as a Python number; {_SEE}",
        )
    root = causes[-1]
    return CaptureError(
        f"{name} cannot be traced{place}: {type(root).__name__}: {_line(str(root))}",
        hint=f"check that module(*example_inputs) runs; {_SEE}",
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and what it came from, outermost first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


def _missing_operator(causes: list[BaseException]) -> str:
    for cause in causes:
        if type(cause).__name__ == "DispatchError":
            found = _OPERATOR.search(str(cause))
            return found[1] if found else _line(str(cause))
    return ""


def _argument(expression: str) -> str:
    """``L['x'].size()[1]`` as people say it."""
    found = re.search(r"\['([^']+)'\].*\.(?:size\(\)|shape)\[(\d+)\]", expression)
    return f"dim {found[2]} of {found[1]!r}" if found else expression


def _place(causes: list[BaseException]) -> str:
    """File and line of the module's code where the innermost error arose."""
    for cause in reversed(causes):
        for frame in reversed(traceback.extract_tb(cause.__traceback__)):
            path = Path(frame.filename)
            inside = path.is_relative_to(_TORCH) or path.is_relative_to(_OWN)
            if not inside and path.suffix == ".py" and path.exists():
                return f" at {path.name}:{frame.lineno} in {frame.name}"
    return ""


def _line(text: str) -> str:
    """The first paragraph, on one line, without colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text).strip()
    first = " ".join(plain.split("\n\n")[0].split())
    return first if len(first) <= _MOST else f"{first[:_MOST]}..."
