"""Options and help of the command line."""

from __future__ import annotations

import pytest

from compile_fsdp.cli import main
from compile_fsdp.passes.text import WIDTH, fill


@pytest.mark.parametrize("options", [["check", "--stric"], ["explain", "--out", "page.html", "--wor", "4"]])
def test_abbreviated_option_is_refused(options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([*options, "train.py", "--step", "3"])  # the script's own option stays as it is
    assert capsys.readouterr().err.endswith(f"error: unrecognized arguments: {options[-1 - ('4' in options)]}\n")


@pytest.mark.parametrize("command", ["check", "explain", "precompile", "bench", "calibrate", "doctor"])
def test_help_fits_the_width_of_paragraphs(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= WIDTH


def test_paragraph_is_broken_between_words_only() -> None:
    lines = fill("word " * 30 + "x" * 100 + " a-b", "  ", "    ").splitlines()
    assert [len(line) for line in lines] == [76, 78, 104, 7]
    assert lines[0].startswith("  word") and lines[-1] == "    a-b"
