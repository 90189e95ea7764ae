"""tap-show: tables of a plan and of a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from tap_planner_cli.errors import invoke
from tap_planner_cli.show import command

Capture = pytest.CaptureFixture[str]


def _run(*arguments: str) -> int:
    return invoke(command, "tap-show", arguments)


def test_plan(new: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mesh, time, memory, collectives and each variant of each block, within 100 columns."""
    monkeypatch.setenv("COLUMNS", "100")
    assert _run(new) == 0
    out = capsys.readouterr().out
    lines = [line.rstrip() for line in out.splitlines()]
    assert max(map(len, lines)) <= 100
    assert "Mesh of 4 devices" in lines
    assert "dp       2  network" in lines
    assert "Time per step: 1.400 ms predicted" in lines
    assert "Memory per device: 1.875 KiB of 4.000 GiB" in lines
    assert "forward   all_reduce      tp        3       128 B  384 B  ring       450.0 us" in lines
    assert any("occurs 3 times, i = 0,1,11" in line for line in lines)
    assert any("occurs 9 times, i = 2..10" in line for line in lines)
    assert any(line.split()[:4] == ["h.{i}.fc", "MatMul", "m", "n"] for line in lines)
    assert any(line.split()[:3] == ["h.{i}.w1", "8x16", "float32"] for line in lines)


def test_edited_plan_is_shown_with_a_warning(new: str, capsys: Capture) -> None:
    """Showing needs no intact digests, but says so."""
    path = Path(new)
    path.write_text(path.read_text().replace('"tp": "n"', '"tp": "m"', 1))
    assert _run(new) == 0
    assert "warning: digests.decisions" in capsys.readouterr().err


def test_cluster(capsys: Capture) -> None:
    """A cluster is shown as it was understood."""
    assert _run("--cluster", "4x8:h100-sxm5-80gb", "--strict") == 0
    out = capsys.readouterr().out
    assert "32 devices, nccl" in out
    assert "80.00 GiB" in out


def test_bandwidths_by_group_size(tmp_path: Path, capsys: Capture) -> None:
    """Bandwidths that depend on the size of a group are listed, of rings and all-to-all apart, and the host's."""
    path = tmp_path / "cluster.yaml"
    links = "{host_bandwidth: 40 GB/s, group_bandwidths: {2: 25 GB/s, 8: 150 GB/s}, exchange_bandwidths: {8: 10 GB/s}}"
    path.write_text(f"device: v100-sxm2-32gb\nnodes: 2\ndevices_per_node: 8\nintra_node: {links}\n")
    assert _run("--cluster", str(path)) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    start = lines.index("Level node: bandwidth by group size")
    assert lines[start + 1 : start + 6] == [
        "devices along bandwidth",
        "2 rings 25 GB/s",
        "8 rings 150 GB/s",
        "8 all-to-all 10 GB/s",
        "all through the host 40 GB/s",
    ]
    assert "Level network: bandwidth by group size" not in lines


def test_no_bandwidths_by_group_size(capsys: Capture) -> None:
    """Where one bandwidth holds for all groups there is no such table."""
    assert _run("--cluster", "4x8:h100-sxm5-80gb") == 0
    assert "by group size" not in capsys.readouterr().out


def test_nothing_to_show(capsys: Capture) -> None:
    """Without a plan or a cluster there is nothing to do."""
    assert _run() == 2
    assert "give a PLAN or --cluster FILE" in capsys.readouterr().err


def test_model_as_plan(tmp_path: Path, capsys: Capture) -> None:
    """A model instead of a plan is an error that says so."""
    (tmp_path / "model.onnx").write_bytes(b"\x08\x07\xff")
    assert _run(str(tmp_path / "model.onnx")) == 2
    assert "not UTF-8" in capsys.readouterr().err
