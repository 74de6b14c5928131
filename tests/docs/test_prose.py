"""The package's sources contain no banned words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
BANNED = re.compile(r"\bfor\s+(?:#\s+)?real\b", flags=re.IGNORECASE)  # also across two lines of a comment


def test_no_banned_words_in_the_package() -> None:
    files = [path for folder in ("compile_fsdp", "passes", "ops") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert files
    texts = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    lines = [(name, text.count("\n", 0, m.start()) + 1) for name, text in texts.items() for m in BANNED.finditer(text)]
    assert lines == []
