"""Notes of the sources have unique titles, which citations name; the package has no banned words."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from helpers.pages.code_blocks import ROOT

_PACKAGE = ("compile_fsdp", "passes", "ops")
_BANNED = re.compile(r"\bfor\s+(?:#\s+)?real\b", flags=re.IGNORECASE)  # also across two lines of a comment
_TITLE = re.compile(r"^[ #]*\[Note: (.+)\]$", flags=re.MULTILINE)
_CITED = re.compile(r"\[Note: ([^\]]+)\]")


def _texts() -> list[str]:
    """Sources, tests and pages, without this file, whose patterns look like notes."""
    sources = [path for folder in (*_PACKAGE, "tests") for path in (ROOT / folder).rglob("*.py")]
    pages = (ROOT / "docs").rglob("*.md")
    return [path.read_text() for path in (*sources, *pages) if path != Path(__file__)]


def _titles() -> list[str]:
    """Titles of all notes; a note begins with a line that has only the title."""
    return [title for text in _texts() for title in _TITLE.findall(text)]


def test_every_note_has_a_unique_title() -> None:
    titles = _titles()
    assert titles
    assert [title for title, count in Counter(titles).items() if count > 1] == []


def test_every_cited_note_exists() -> None:
    # A citation may span two lines of a comment.
    cited = {re.sub(r"\s+(?:# )?", " ", title) for text in _texts() for title in _CITED.findall(text)}
    assert sorted(cited.difference(_titles())) == []


def test_no_banned_words_in_the_package() -> None:
    files = [path for folder in _PACKAGE for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    lines = [(name, text.count("\n", 0, m.start()) + 1) for name, text in texts.items() for m in _BANNED.finditer(text)]
    assert lines == []
