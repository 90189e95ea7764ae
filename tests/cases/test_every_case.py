"""Every case has a test."""

from __future__ import annotations

import re
from pathlib import Path

from tests.cases.running import CASES

_USED = re.compile(r'\bCase\("([a-z0-9_]+)"\)')


def test_every_folder_has_a_test_and_every_test_a_folder() -> None:
    """The folders under tests/data/cases are those that the modules beside this one name."""
    sources = (path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__))
    named = {name for path in sources for name in _USED.findall(path.read_text(encoding="utf-8"))}
    folders = {path.name for path in CASES.iterdir() if path.is_dir()}
    assert named == folders


def test_every_folder_says_what_is_right() -> None:
    """A case without its README could not be judged."""
    for folder in CASES.iterdir():
        if folder.is_dir():
            assert "\nRight: " in (folder / "README.md").read_text(encoding="utf-8"), folder.name
