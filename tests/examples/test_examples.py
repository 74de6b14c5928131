"""Examples train with the losses of their `--eager` runs, and document their command."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.ranks.forked import run_forked

FOLDER = Path(__file__).parents[2] / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
SIX_STEPS = [path for path in EXAMPLES if path.name != "train.py"]  # test_train.py has its tests


def _losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step \d+: loss (\S+)$", output, flags=re.MULTILINE)]


def _graphs(output: str) -> list[str]:
    """Directions of the graph reports that an example prints."""
    return re.findall(r"^(forward|backward) graph ", output, flags=re.MULTILINE)


# Slow, because `make test` already trains the plain loops of the README and the quick start, and the trainers in
# tests/integrations.
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("example", SIX_STEPS, ids=lambda path: path.stem)
def test_compiled_example_matches_eager_losses(example: Path, tmp_path: Path) -> None:
    eager, compiled = run_forked(tmp_path, example, "--eager"), run_forked(tmp_path, example)
    losses = _losses(compiled)
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.5
    # Inductor adds float32 values in a different order than eager kernels.
    assert losses == pytest.approx(_losses(eager), rel=1e-5)
    assert (_graphs(compiled), _graphs(eager)) == (["forward", "backward"], [])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_command_is_in_docstring_and_readme(example: Path) -> None:
    docstring = example.read_text().split('"""')[1]
    assert f"\ntorchrun --nproc-per-node 2 examples/{example.name}\n" in docstring
    assert f"| [`{example.name}`]({example.name}) |" in (FOLDER / "README.md").read_text()
