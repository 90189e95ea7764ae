"""The link of two namespaces: it is gone afterwards, whatever happened, and says why it cannot be."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.network.namespaces import joined_namespaces, unavailable
from tests.network.places import LINK_BITS_PER_S


@pytest.fixture(autouse=True)
def _allowed() -> None:  # pyright: ignore[reportUnusedFunction]
    reason = unavailable()
    if reason is not None:
        pytest.skip(reason)


def exists(name: str) -> bool:
    """Whether there is a namespace of that name."""
    return Path("/run/netns", name).exists()


def fail_on(names: list[str]) -> None:
    """An error while there is a link, whose names are said first."""
    with joined_namespaces(LINK_BITS_PER_S) as nodes:
        names.extend(node.name for node in nodes)
        assert all(map(exists, names))
        raise ZeroDivisionError


def test_an_error_inside_leaves_nothing() -> None:
    """Both namespaces end with the context, also by an exception."""
    names: list[str] = []
    with pytest.raises(ZeroDivisionError):
        fail_on(names)
    assert len(names) == 2 and not any(map(exists, names))


def test_two_links_at_once() -> None:
    """Names are unique: links of one process do not meet."""
    with joined_namespaces(LINK_BITS_PER_S) as one, joined_namespaces(LINK_BITS_PER_S) as other:
        assert len({node.name for node in (*one, *other)}) == 4


def run(code: str) -> subprocess.CompletedProcess[str]:
    """Run a program that may end itself."""
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/sbin:/usr/bin:/sbin:/bin"}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60, check=False)


def test_what_a_killed_process_left_is_removed() -> None:
    """The namespaces of a process that is no more are removed by the next one; those of living ones stay."""
    killed = run(
        "import os, signal\n"
        "from tests.network.namespaces import joined_namespaces\n"
        "with joined_namespaces(10**8) as nodes:\n"
        "    print(*(node.name for node in nodes), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    names = killed.stdout.split()
    assert len(names) == 2 and all(map(exists, names)), killed.stderr
    with joined_namespaces(LINK_BITS_PER_S) as nodes:
        assert not any(map(exists, names))
        with joined_namespaces(LINK_BITS_PER_S):
            assert all(exists(node.name) for node in nodes)


@pytest.mark.full
def test_ranks_end_with_who_started_them() -> None:
    """Ranks of a killed process end by themselves."""
    killed = run(
        "import os, signal\n"
        "from tests.network.namespaces import joined_namespaces\n"
        "from tests.network.ranks import ranks_on\n"
        "if __name__ == '__main__':\n"
        "    with joined_namespaces(10**8) as nodes, ranks_on(nodes, 1) as ranks:\n"
        "        print(*ranks.call(os.getpid), flush=True)\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    processes = [Path("/proc", pid) for pid in killed.stdout.split()]
    assert len(processes) == 2, killed.stderr
    deadline = time.monotonic() + 20
    while any(process.exists() for process in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(process.exists() for process in processes)


def test_the_reason_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Without the tools there is a reason that a skipped test can give."""
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unavailable() == "no ip and no tc (package iproute2)"
