"""Two network namespaces joined by a link of limited rate, on one machine, and what passes over the link.

Each namespace plays a node: processes inside one speak through its loopback, those of different ones over the link.
Both ends of the link are shaped (token bucket), so each direction has the rate to itself, as on a switched network.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

LINK = "link0"
"""Name of the link's end in each namespace."""
_HEADER_BYTES = 14 + 20 + 32
"""Ethernet, IPv4, and TCP with time stamps: of each packet, as the interface counts it."""
_MTU_BYTES = 9000
_BURST_BYTES = 64 * 1024
"""What a token bucket lets pass at once after a pause: 5 ms at 100 Mbit/s."""
_QUEUE_BYTES = 16 * 1024 * 1024
"""Waits in the bucket before packets are dropped: more than TCP has under way, so that nothing is sent twice."""
_TAIL_PROBES = "/proc/sys/net/ipv4/tcp_early_retrans"
"""Packets that wait in the bucket look lost; neither these probes nor a time-out shall send them again."""
_PREFIX = "taplink"
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Namespace:
    """One node."""

    name: str
    address: str

    def enter(self) -> None:
        """Move this thread, and the threads and processes that it will start, into the namespace."""
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open("rb") as file:
            if libc.setns(file.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.name}: {os.strerror(ctypes.get_errno())}")

    def sent_bytes(self) -> int:
        """Payload of all TCP packets that have left over the link, headers taken off."""
        found = json.loads(_run("ip", "-n", self.name, "-s", "-j", "link", "show", "dev", LINK))[0]["stats64"]["tx"]
        if found["errors"] or found["dropped"]:
            raise AssertionError(f"the link of {self.name} lost packets: {found}")
        return found["bytes"] - _HEADER_BYTES * found["packets"]


@contextmanager
def joined_namespaces(bits_per_s: int) -> Iterator[tuple[Namespace, Namespace]]:
    """Two namespaces joined by a link; both are gone at the end, whatever happens inside.

    What a process left that was killed is removed by the next one that comes here.

    Args:
        bits_per_s: rate of the link, per direction, headers included.

    Raises:
        OSError: namespaces or token buckets are not allowed here.
    """
    _remove_orphans()
    number = next(_numbers)
    nodes = tuple(
        Namespace(name=f"{_PREFIX}-{os.getpid()}-{number}{side}", address=f"10.77.0.{host}")
        for host, side in enumerate("ab", start=1)
    )
    with ExitStack() as stack:
        for node in nodes:
            _run("ip", "netns", "add", node.name)
            stack.callback(_run, "ip", "netns", "delete", node.name)
        first, second = nodes
        ends = ("type", "veth", "peer", "name", LINK, "netns", second.name)
        _run("ip", "-n", first.name, "link", "add", LINK, *ends)
        for node in nodes:
            _set_up(node, bits_per_s)
        yield first, second


def _set_up(node: Namespace, bits_per_s: int) -> None:
    _run("ip", "-n", node.name, "link", "set", "lo", "up")
    _run("ip", "-n", node.name, "address", "add", f"{node.address}/24", "dev", LINK)
    _run("ip", "-n", node.name, "link", "set", LINK, "mtu", str(_MTU_BYTES), "addrgenmode", "none", "up")
    network = f"{node.address.rpartition('.')[0]}.0/24"
    _run("ip", "-n", node.name, "route", "change", network, "dev", LINK, "proto", "kernel", "rto_min", "2s")
    _run("ip", "netns", "exec", node.name, "sh", "-c", f"echo 0 > {_TAIL_PROBES}")
    bucket = ("rate", f"{bits_per_s}bit", "burst", str(_BURST_BYTES), "limit", str(_QUEUE_BYTES))
    _run("tc", "-n", node.name, "qdisc", "add", "dev", LINK, "root", "tbf", *bucket)


def unavailable() -> str | None:
    """Why there can be no such link here; None: there can."""
    absent = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if absent:
        return f"no {' and no '.join(absent)} (package iproute2)"
    try:
        with joined_namespaces(10**8):
            return None
    except OSError as error:
        return f"no network namespaces: {error}"


def _remove_orphans() -> None:
    """Namespaces of processes that are no more."""
    for path in Path("/run/netns").glob(f"{_PREFIX}-*"):
        owner = re.fullmatch(rf"{_PREFIX}-(\d+)-\d+[ab]", path.name)
        if owner and not Path("/proc", owner[1]).exists():
            subprocess.run(("ip", "netns", "delete", path.name), capture_output=True, check=False)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(f"{' '.join(command)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout
