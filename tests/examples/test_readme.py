"""The README's example runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.ranks.torchrun import torchrun

README = Path(__file__).parents[2] / "README.md"
COMPILE = 'model.compile(backend="compile_fsdp", fullgraph=True'
OP_BY_OP = f'{COMPILE}, options={{"inner_backend": "aot_eager"}}'


# Inductor has the quickstart, too.
@pytest.mark.parametrize("compile_model", [OP_BY_OP, pytest.param(COMPILE, marks=pytest.mark.slow)])
def test_example_runs_on_two_ranks(compile_model: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert example.count(COMPILE) == 1
    path = tmp_path / "example.py"
    path.write_text(example.replace(COMPILE, compile_model))
    assert "Traceback" not in torchrun(tmp_path, path)  # and its exit status is 0
