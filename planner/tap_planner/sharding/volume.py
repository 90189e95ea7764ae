"""The least that one rank sends in a collective, whatever algorithm runs it."""

from __future__ import annotations

_SHARES = {
    "all_reduce": 2,
    "all_gather": 1,
    "reduce_scatter": 1,
    "all_to_all": 1,
}
"""How often a rank sends all of the payload but its own part of it."""
_DIRECT = ("broadcast", "send_recv", "halo_exchange", "ring_exchange")
"""The payload is what is sent."""
SENDING_KINDS = (*_SHARES, *_DIRECT)
"""All collectives."""


def sent_bytes(kind: str, ranks: int, num_bytes: int) -> int:
    """Bytes that one rank sends, rounded up; 0 in a group of one.

    With a payload of N bytes in a group of g ranks: all_reduce 2 N (g - 1) / g, all_gather, reduce_scatter and
    all_to_all N (g - 1) / g: the least that each can do with (Patarasuk, Yuan, "Bandwidth optimal all-reduce
    algorithms", 2009; Chan, Heimlich, Purkayastha, van de Geijn, "Collective communication: theory, practice, and
    experience", 2007). Exchanges between two ranks send what they are given.

    Args:
        kind: name of the collective.
        ranks: size of the group.
        num_bytes: logical payload, as ``step_elements`` counts it.

    Raises:
        ValueError: there is no such collective.
    """
    if kind not in SENDING_KINDS:
        raise ValueError(f"collective {kind!r}, expected one of {', '.join(SENDING_KINDS)}")
    if ranks < 2 or num_bytes <= 0:
        return 0
    if kind in _DIRECT:
        return num_bytes
    return -(-_SHARES[kind] * num_bytes * (ranks - 1) // ranks)
