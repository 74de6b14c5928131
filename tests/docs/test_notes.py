"""docs/notes.md lists every note of the sources with its file, and every cited note exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
_TITLE = re.compile(r"^[ #]*\[Note: (.+)\]$", flags=re.MULTILINE)
_CITED = re.compile(r"\[Note: ([^\]]+)\]")
_ROW = re.compile(r"^\| (.+) \| `(.+)` \|$", flags=re.MULTILINE)


def _sources() -> list[Path]:
    return [path for folder in ("compile_fsdp", "passes", "ops") for path in sorted((ROOT / folder).rglob("*.py"))]


def _notes() -> list[tuple[str, str]]:
    """Titles and files of all notes; a note begins with a line that has only the title."""
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in _sources()}
    return [(title, path) for path, text in texts.items() for title in _TITLE.findall(text)]


def test_every_note_is_listed_with_its_file() -> None:
    notes = _notes()
    assert notes
    assert sorted(_ROW.findall((DOCS / "notes.md").read_text())) == sorted(notes)


def test_every_cited_note_exists() -> None:
    titles = {title for title, _ in _notes()}
    # A citation may span two lines of a comment.
    cited = {re.sub(r"\s+(?:# )?", " ", title) for path in _sources() for title in _CITED.findall(path.read_text())}
    assert sorted(cited - titles) == []
