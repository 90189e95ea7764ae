"""Every error that a user can meet.

    TapError                     2   root: a message, a hint, an exit code
    ├── UsageError               2   options that do not fit together
    ├── ModelError               2   the ONNX file cannot be read or understood
    │   ├── UnboundDimError      2   a symbolic dim has no value
    │   └── UnsupportedGraphError 2  the graph needs something that cannot be planned
    ├── ClusterError             2   cluster.yaml or the NxM:device shorthand is wrong
    ├── CustomRuleError          2   a file of custom rules is wrong
    ├── PlanFormatError          2   a plan file cannot be read
    ├── CaptureError             2   a torch module cannot be written as an ONNX file
    ├── InfeasibleError          3   proven: no plan fits (holds the least memory needed)
    ├── LimitReachedError        4   a limit was reached before any plan was found
    └── ApplyError               5   a plan was refused, or its execution failed
        └── VerificationError    1   execution differs from the plan or the reference

Exit codes are those of the command line: 0 done, 1 negative answer, 2 wrong input, 3 infeasible, 4 limit,
5 apply refused, 70 our bug, 130 interrupted, 143 terminated.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "ApplyError",
    "CaptureError",
    "ClusterError",
    "CustomRuleError",
    "InfeasibleError",
    "LimitReachedError",
    "ModelError",
    "PlanFormatError",
    "TapError",
    "UnboundDimError",
    "UnsupportedGraphError",
    "UsageError",
    "VerificationError",
]


_MAX_LENGTH = 1500
"""Longer messages (which quote a list or a name from a damaged file) are cut."""


def _one_line(text: str) -> str:
    """Text that a terminal shows as one line: names from files may hold line ends, escapes, or a million letters."""
    if len(text) > _MAX_LENGTH:
        text = f"{text[: _MAX_LENGTH - 40]} ... ({len(text)} characters)"
    if text.isprintable():
        return text
    words = " ".join(text.split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)


class TapError(Exception):
    """Root of all errors that are the user's to mend.

    Args:
        message: what went wrong, where, what was got and what was expected; made one printable line of bounded length.
        hint: one next thing to do, or an empty string.
    """

    exit_code = 2

    def __init__(self, message: str, *, hint: str = "") -> None:
        self.message = _one_line(message)
        self.hint = hint
        super().__init__(self.message)

    @property
    def hint(self) -> str:
        """One next thing to do, in one printable line, or an empty text."""
        return self._hint

    @hint.setter
    def hint(self, hint: str) -> None:
        self._hint = _one_line(hint)

    @property
    def hints(self) -> tuple[str, ...]:
        """All things that can be done, each in one printable line."""
        return (self.hint,) if self.hint else ()


class UsageError(TapError):
    """Command-line options that do not fit together or with the model."""


class ModelError(TapError):
    """The ONNX file cannot be read or understood."""


class UnboundDimError(ModelError):
    """A symbolic dim of the model has no value."""


class UnsupportedGraphError(ModelError):
    """The graph needs something that cannot be planned; the message names the operator."""


class ClusterError(TapError):
    """A cluster description is wrong; the message names file, line, key and value."""


class CustomRuleError(TapError):
    """A file of custom rules is wrong; the message names file, line, key and value."""


class PlanFormatError(TapError):
    """A plan file cannot be read."""


class CaptureError(TapError):
    """A torch module cannot be written as an ONNX file; the message says what stands in the way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """A change with which a plan fits; one was found."""

    kind: str
    """What is changed: ``zero``, ``recompute``, ``microbatches``, ``mesh``, ``rule``, ``target``, ``together``,
    ``idle``, ``states``, ``memory`` or ``nodes``."""
    text: str
    """What to do, in one line."""
    options: tuple[str, ...]
    """The change as options of ``tap-plan``, to add or in place of those given; empty where it is not one of these."""
    objective_ns: int
    """Of the plan that was found: the best one takes no longer."""
    memory_bytes: int
    """Per device, of that plan."""


class InfeasibleError(TapError):
    """Proven: no plan of the enumerated space fits the memory limit.

    Args:
        message: the answer in one line.
        hint: what to change.
        least_memory_bytes: the least memory per device that any plan of the space needs.
        limit_bytes: the memory limit per device.
        conflicts: options that conflict with the limit: without any one of them a plan fits.
        remedies: changes with which a plan fits, each checked by planning, the cheapest first.
    """

    exit_code = 3

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        least_memory_bytes: int,
        limit_bytes: int,
        conflicts: tuple[str, ...] = (),
        remedies: tuple[Remedy, ...] = (),
    ) -> None:
        super().__init__(message, hint=hint)
        self.least_memory_bytes = least_memory_bytes
        self.limit_bytes = limit_bytes
        self.conflicts = conflicts
        self.remedies = remedies

    @property
    def hints(self) -> tuple[str, ...]:
        """One for each remedy; without any what is said generally."""
        return tuple(_one_line(remedy.text) for remedy in self.remedies) or super().hints


class LimitReachedError(TapError):
    """A limit on effort was reached before any plan was found."""

    exit_code = 4


class ApplyError(TapError):
    """A plan was refused by the applier, or its execution failed."""

    exit_code = 5


class VerificationError(ApplyError):
    """Execution differs from the plan or from single-process execution."""

    exit_code = 1
