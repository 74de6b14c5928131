"""Examples train with the losses of their `--eager` runs, and document their command; the README's example runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from helpers.pages.code_blocks import ROOT
from helpers.ranks.forked import run_forked
from helpers.ranks.torchrun import torchrun

FOLDER = ROOT / "examples"
EXAMPLES = sorted(FOLDER.glob("*.py"))
SIX_STEPS = [path for path in EXAMPLES if path.name != "train.py"]  # test_train.py has its tests
COMPILE = 'model.compile(backend="compile_fsdp", fullgraph=True'
OP_BY_OP = f'{COMPILE}, options={{"inner_backend": "aot_eager"}}'


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


# Inductor has the quickstart, too.
@pytest.mark.parametrize("compile_model", [OP_BY_OP, pytest.param(COMPILE, marks=pytest.mark.slow)])
def test_readmes_example_runs_on_two_ranks(compile_model: str, tmp_path: Path) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert example.count(COMPILE) == 1
    path = tmp_path / "example.py"
    path.write_text(example.replace(COMPILE, compile_model))
    assert "Traceback" not in torchrun(tmp_path, path)  # and its exit status is 0
