"""The documents say what is true: examples run, options and files that they name exist."""

from __future__ import annotations

import doctest
import importlib.util
import re
import shlex
from pathlib import Path
from types import ModuleType

import click
import pytest

from tap_planner_cli.errors import invoke

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    ROOT / "plans" / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
COMMANDS = ("plan", "show", "diff", "apply", "calibrate")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_TAP = re.compile(r"\btap-(plan|show|diff|apply|calibrate)\b((?:[^`\n|]|\\\n)*)")
_FOREIGN = {
    "--json",
    "--runs",
    "--data",
    "--models",
    "--clusters",
    "--cases",
    "--markdown",
    "--count",
    "--seed",
    "--refit",
    "--attention",
    "--rows",
    "--whole-steps",
    "--write",
    "--like",
    "--device",
}
"""Options of the benchmarks."""


def _name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _command(name: str) -> click.Command:
    module = __import__(f"tap_planner_cli.{name}", fromlist=["command"])
    command: click.Command = module.command
    return command


def _options(name: str) -> set[str]:
    return {option for parameter in _command(name).params for option in parameter.opts} | {"--help"}


def _refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh_documents", ROOT / "docs" / "refresh.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_links_lead_somewhere(path: Path) -> None:
    """Every relative link names a file, and every anchor a heading in it."""
    for target in _LINK.findall(path.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        file, _, anchor = target.partition("#")
        found = path if not file else path.parent / file
        assert found.exists(), f"{_name(path)} links to {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in headings}


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_options_exist(path: Path) -> None:
    """An option after the name of a command is one of that command, any other of some command."""
    text = path.read_text(encoding="utf-8")
    for name, rest in _TAP.findall(text):
        unknown = set(_OPTION.findall(rest)) - _options(name)
        assert not unknown, f"{_name(path)}: tap-{name} has no {unknown}"
    everywhere = set().union(*(_options(name) for name in COMMANDS)) | _FOREIGN
    assert set(_OPTION.findall(text)) <= everywhere


def test_readme_names_every_command() -> None:
    """Each installed command is shown with a real call."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"$ tap-{name} " in text for name in COMMANDS)


@pytest.mark.parametrize("path", DOCUMENTS, ids=_name)
def test_no_paths_of_a_machine(path: Path) -> None:
    """Documents name no home, work or temporary folder of whoever wrote them."""
    text = path.read_text(encoding="utf-8")
    assert not re.findall(r"(?:/home/|/root/|/Users/|/tmp/(?!plans-before))\S*", text)


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if ">>>" in p.read_text(encoding="utf-8")], ids=_name)
def test_python_examples_run(path: Path) -> None:
    """Interactive examples give what they show."""
    result = doctest.testfile(str(path), module_relative=False)
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize("path", [p for p in DOCUMENTS if "<!-- run" in p.read_text(encoding="utf-8")], ids=_name)
def test_commands_run(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of runnable blocks work, in order, and each block shows some output.

    Blocks that are run in place (``make demo``) are not run here.
    """
    refresh = _refresh()
    refresh.prepare(tmp_path)
    monkeypatch.chdir(tmp_path)
    for match in refresh.BLOCK.finditer(path.read_text(encoding="utf-8")):
        if match["place"]:
            continue
        commands = refresh.commands(match["body"])
        assert len(match["body"].splitlines()) > len("\n".join(commands).splitlines()), f"no output of {commands[0]}"
        for text in commands:
            program, *arguments = shlex.split(text.replace("\\\n", " "))
            code = invoke(_command(program.removeprefix("tap-")), program, arguments)
            expected = {3} if "error: no plan fits" in match["body"] else {0}
            assert code in expected, f"{text}\n{capsys.readouterr().err}"
