"""The example of docs/wrap.md prints what stands below it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from harness import fake_world

DOCS = Path(__file__).parents[2] / "docs" / "wrap.md"


def test_example(capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCS.read_text()
    example, expected = (re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL)[0] for kind in ("python", "text"))
    with fake_world(2):
        exec(example, {})
    assert capsys.readouterr().out == expected
