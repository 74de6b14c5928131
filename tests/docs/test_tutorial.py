"""The tutorial's script trains, its diffs apply, and its commands print the documented output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.pages.code_blocks import DOCS, Block, read_blocks
from helpers.ranks.forked import run_forked

PAGE = DOCS / "tutorial.md"
SCRIPT = "train.py"
_NUMBER = re.compile(r"\d[\d.,]*")


def _change(source: str, diff: str) -> str:
    """Apply a diff whose lines are removed ("-"), added ("+") or kept (" ")."""
    lines = diff.splitlines(keepends=True)
    before, after = ("".join(line[1:] for line in lines if line[0] != sign) for sign in "+-")
    assert source.count(before) == 1, f"expected once in {SCRIPT}:\n{before}"
    return source.replace(before, after)


def _scripts() -> Iterator[tuple[Block, str]]:
    """Yield each block of the page with the script after that block."""
    source = ""
    for block in read_blocks(PAGE, "python", "diff", "bash", "text"):
        if block.language == "python":
            source = block.text
        elif block.language == "diff":
            source = _change(source, block.text)
        yield block, source


def test_final_script_trains_and_resumes(tmp_path: Path) -> None:
    *_, (_, last) = _scripts()
    op_by_op = last.replace('options={"', 'options={"inner_backend": "aot_eager", "')
    assert op_by_op != last
    for steps, expected in ((20, ["step 10", "step 20"]), (30, ["step 30"])):
        text = re.sub(r"STEPS = (.*), \d+$", rf"STEPS = \1, {steps}", op_by_op, flags=re.MULTILINE)
        assert text.count(f", {steps}\n") == 1
        (tmp_path / SCRIPT).write_text(text)
        output = run_forked(tmp_path, SCRIPT)
        assert re.findall(r"^step \d+", output, flags=re.MULTILINE) == expected


def _masked(text: str) -> list[str]:
    """Lines with # for each number, because times and sizes depend on the machine."""
    return [" ".join(_NUMBER.sub("#", line).split()) for line in text.splitlines()]


def _run(command: str, folder: Path) -> str:
    """Run a command in a folder; return stdout and stderr."""
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        command.split(), cwd=folder, env=environment, capture_output=True, text=True, timeout=900, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_commands_print_the_documented_output(tmp_path: Path) -> None:
    printed = ""
    for block, source in _scripts():
        (tmp_path / SCRIPT).write_text(source)
        if block.language == "bash":
            commands = [line for line in block.text.splitlines() if SCRIPT in line]
            printed = "".join(_run(each, tmp_path) for each in commands)
        elif block.language == "text":
            missing = [line for line in _masked(block.text) if line not in _masked(printed)]
            assert not missing, f"{PAGE}, line {block.line}: not in the output:\n{printed}"
