"""Torch functions that users bring for operators without one. Loading them runs the code of the user's file."""

from __future__ import annotations

import difflib
import importlib.util
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import cast

import torch
from torch import Tensor

from tap_planner.apply.operators.context import FUNCTIONS, Operands, OperatorContext, TorchFunction, torch_dtype
from tap_planner.errors import ApplyError, TapError
from tap_planner.operators import record_of

__all__ = [
    "NO_CUSTOM",
    "CustomFunctions",
    "check_executable",
    "custom_operator",
    "failed",
    "load_custom_operators",
    "run_custom",
]

CustomFunctions = Mapping[str, TorchFunction]
"""Torch functions of the user's by operator type."""

NO_CUSTOM: CustomFunctions = {}

_MARK = "__tap_operator_types__"
_DOCUMENT = "see docs/custom-rules.md"


def custom_operator(*types: str) -> Callable[[TorchFunction], TorchFunction]:
    """Marks a function in a ``--custom-ops`` file as that of operator types.

    Args:
        types: as ``acme.ops::FlashThing``.
    """

    def mark(function: TorchFunction) -> TorchFunction:
        setattr(function, _MARK, (*getattr(function, _MARK, ()), *types))
        return function

    return mark


def load_custom_operators(paths: Sequence[Path]) -> CustomFunctions:
    """Run Python files and collect the functions that they define: a dict ``OPERATORS``, or ``custom_operator``.

    Raises:
        ApplyError: a file cannot be run, defines no operator, or one that another file defines too.
    """
    found: dict[str, TorchFunction] = {}
    origin: dict[str, Path] = {}
    for number, path in enumerate(paths):
        functions = _functions(path, _run_file(path, f"tap_planner_custom_ops_{number}"))
        for type, function in functions.items():
            if type in found:
                raise ApplyError(f"{path}: operator {type} is defined in {origin[type]} too", hint="keep one of them")
            found[type], origin[type] = function, path
    return found


def _run_file(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ApplyError(f"--custom-ops {path}: no such Python file", hint="give the path of a .py file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look modules up by name
    try:
        spec.loader.exec_module(module)
    except TapError:
        raise
    except (Exception, SystemExit) as error:
        where = f"--custom-ops {path}{_line(error, path)}"
        raise ApplyError(f"{where}: {_reason(error)}", hint="run the file by itself") from error
    return module


def _line(error: BaseException, path: Path) -> str:
    """``:LINE`` of the user's file where the error arose, as far as it is known."""
    if isinstance(error, SyntaxError) and error.lineno is not None:
        return f":{error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f":{lines[-1]}" if lines else ""


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _functions(path: Path, module: ModuleType) -> dict[str, TorchFunction]:
    table = getattr(module, "OPERATORS", {})
    if not isinstance(table, Mapping) or not all(isinstance(key, str) and callable(f) for key, f in table.items()):
        raise ApplyError(
            f"--custom-ops {path}: OPERATORS is no mapping from operator type to function",
            hint='write OPERATORS = {"acme.ops::FlashThing": function}',
        )
    functions: dict[str, TorchFunction] = dict(table)
    for function in cast(list[TorchFunction], [member for member in vars(module).values() if callable(member)]):
        marked = getattr(function, _MARK, ())
        for type in marked if isinstance(marked, tuple) else ():
            if functions.setdefault(type, function) is not function:
                raise ApplyError(f"--custom-ops {path}: operator {type} is defined twice", hint="keep one of them")
    if not functions:
        raise ApplyError(
            f"--custom-ops {path}: it defines no operator, expected OPERATORS = {{type: function}} or @custom_operator",
            hint=_DOCUMENT,
        )
    return functions


def check_executable(types: Iterable[str], ruled: Collection[str], custom: CustomFunctions) -> None:
    """Check that every operator has a torch function, and that none replaces a built-in one unasked.

    Args:
        types: of all operators of the plan.
        ruled: types that have a custom rule.
        custom: the user's functions.

    Raises:
        ApplyError: it has not; the message names all types.
    """
    counts = Counter(types)
    missing = sorted(type for type in counts if type != "Loss" and type not in FUNCTIONS and type not in custom)
    if missing:
        shown = ", ".join(f"{type} ({counts[type]} operator{'s' if counts[type] > 1 else ''})" for type in missing)
        near = difflib.get_close_matches(missing[0], list(custom), n=1, cutoff=0.6)
        meant = f"{near[0]!r} is defined, did you mean {missing[0]!r}? " if near else ""
        raise ApplyError(
            f"no torch function is known for {shown}",
            hint=f"{meant}give one with --custom-ops FILE.py, which runs the code of that file ({_DOCUMENT})",
        )
    for type in sorted(custom):
        if type in counts and type in FUNCTIONS and type not in ruled:
            raise ApplyError(
                f"--custom-ops defines {type}, which has a built-in function",
                hint=f"leave it out, or plan with a custom rule for {type} that says override: true",
            )


def run_custom(function: TorchFunction, context: OperatorContext, operands: Operands) -> tuple[Tensor, ...]:
    """Run a user's function and check what it does, apart from the shapes of its results.

    Raises:
        ApplyError: it fails, changes an operand, returns no tensors, or loses the gradient.
    """
    versions = [None if operand is None else operand._version for operand in operands]
    try:
        result = function(context, operands)
    except TapError:
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and "modified inplace" in str(error):  # of a view that autograd watches
            place = _place(function, error)
            raise ApplyError(
                f"operator {context.signature.type}: its function in {place} changed an operand in place, expected a "
                "new tensor",
                hint=_DOCUMENT,
            ) from error
        raise failed(function, context.signature.type, error) from error
    outputs = tuple(result) if isinstance(result, tuple | list) else (result,)
    wrong = _wrong_result(context, operands, versions, outputs)
    if wrong:
        raise ApplyError(
            f"operator {context.signature.type}: its function in {_place(function)} {wrong}", hint=_DOCUMENT
        )
    return outputs


def failed(function: TorchFunction, type: str, error: Exception, what: str = "failed") -> ApplyError:
    """The error for a user's function that raised one."""
    return ApplyError(
        f"operator {type}: its function in {_place(function, error)} {what}: {_reason(error)}",
        hint="mend the file after --custom-ops",
    )


def _place(function: TorchFunction, error: Exception | None = None) -> str:
    code = getattr(function, "__code__", None)
    if code is None:
        return repr(function)
    frames = traceback.extract_tb(error.__traceback__) if error is not None else []
    lines = [frame.lineno for frame in frames if frame.filename == code.co_filename]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"


def _wrong_result(
    context: OperatorContext, operands: Operands, versions: Sequence[int | None], outputs: tuple[object, ...]
) -> str:
    """What is wrong with a result, in words; empty if nothing is."""
    signature = context.signature
    for index, (operand, version) in enumerate(zip(operands, versions, strict=True)):
        if operand is not None and operand._version != version:
            return f"changed operand {index} in place, expected a new tensor"
    if len(outputs) != len(signature.outputs):
        return f"returned {len(outputs)} results, expected {len(signature.outputs)}"
    for index, (output, type_) in enumerate(zip(outputs, signature.outputs, strict=True)):
        if not isinstance(output, Tensor):
            return f"returned {type(output).__name__} as output {index}, expected a tensor"
        expected = torch_dtype(type_.dtype, context.dtype)
        if output.dtype != expected:
            return f"returned {output.dtype} as output {index}, expected {expected}"
    if torch.is_grad_enabled() and _wants_gradient(context, operands):
        results = [output for output in outputs if isinstance(output, Tensor)]
        if not any(result.requires_grad for result in results):
            return "lost the gradient: no result depends on the operands for autograd"
    return ""


def _wants_gradient(context: OperatorContext, operands: Operands) -> bool:
    allowed = record_of(context.signature).differentiable_operands
    return any(output.is_float for output in context.signature.outputs) and any(
        operand is not None and operand.requires_grad and (allowed is None or index in allowed)
        for index, operand in enumerate(operands)
    )
