"""The README's example runs as it stands."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

README = Path(__file__).parents[3] / "README.md"


def test_example_runs_on_two_ranks(tmp_path: Path, run_on_two_ranks: Callable[..., str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    path = tmp_path / "example.py"
    path.write_text(example)
    assert "Traceback" not in run_on_two_ranks(path)  # and its exit status is 0
