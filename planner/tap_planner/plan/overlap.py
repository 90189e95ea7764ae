"""What of its communication the runtime that runs a plan hides behind something else."""

from __future__ import annotations

import enum


class Overlap(enum.Enum):
    """How much runs behind computation (``--overlap``)."""

    NONE = "none"
    """Nothing: every collective and every transfer is waited for."""
    DATA = "data"
    """Reductions of gradients, ZeRO-3 gathers, transfers between pipeline stages."""
    ALL = "all"
    """Besides, collectives before and after a product, behind that product."""


AS_LIBRARY = "auto"
"""The option's value for what the cluster's library can do, see ``overlap_of``."""


def overlap_of(option: str, library: str) -> Overlap:
    """What an option stands for.

    Args:
        option: ``auto``, or a value of ``Overlap``.
        library: the cluster's; gloo's collectives need the cores that compute, and hide nothing.
    """
    if option != AS_LIBRARY:
        return Overlap(option)
    return Overlap.NONE if library == "gloo" else Overlap.DATA
