"""What the pages say in code is so: every block runs, and prints what stands below it.

The example of the README itself runs under torchrun, in tests/tools/train/test_readme.py, and the tutorial in
test_tutorial.py.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_fsdp.cli import main
from helpers.pages.code_blocks import DOCS, ROOT, Setting, read_blocks, run_page
from helpers.releases.skip import skip_before

README = ROOT / "README.md"

# A sharded model with an optimizer, and the state of the same optimizer in a run without sharding.
GIVEN = """
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from compile_fsdp.wrap import auto_shard

def build(shard):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(2)))
    if shard:
        auto_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer

mesh = init_device_mesh("cpu", (1,))
rank, step = 0, 1
batch = torch.ones(4, 16)
torch.save(build(shard=False)[1].state_dict(), "optim.pt")
model, optimizer = build(shard=True)
"""

# A model that is not sharded yet.
BUILD = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.mean()

build, batch = Model, torch.ones(4, 16)
"""

# What a trainer is given.
TRAINER = """
import os

os.environ["ACCELERATE_USE_CPU"] = "true"
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = LlamaForCausalLM(config)
dataset = [{"input_ids": [1, 2], "labels": [1, 2]}]
"""

SETTINGS = {
    "explain.md": Setting(before=f"{BUILD}import torch.distributed as dist\nmodel = Model()\n", fake_ranks=64),
    # accelerate does not shard on a CPU.
    "integrations.md": Setting(before=BUILD + TRAINER, languages=("python",)),
    "migration.md": Setting(before=BUILD),
    "options.md": Setting(before=GIVEN),
    "performance.md": Setting(before=GIVEN),
    "quickstart.md": Setting(inner_backend="inductor"),
    "state_dicts.md": Setting(before=GIVEN),
    "wrap.md": Setting(fake_ranks=2),
}


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if read_blocks(page, "python", "py") and page.stem != "tutorial"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks(page: Path, tmp_path: Path) -> None:
    if page.stem == "migration":
        skip_before("2.13")  # it prints the error of that release, in which a setting went
    run_page(page, SETTINGS.get(page.name, Setting()), tmp_path)


def test_readme_saves_and_resumes(tmp_path: Path) -> None:
    assert read_blocks(README, "py")
    run_page(README, Setting(before=GIVEN, languages=("py",)), tmp_path)


def _shell_lines(program: str) -> list[str]:
    """The lines of all shell blocks that start a program, without their comments."""
    blocks = [block for page in (README, *DOCS.rglob("*.md")) for block in read_blocks(page, "bash")]
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.text.splitlines()]
    return [line for line in lines if line.startswith(f"{program} ")]


def test_help_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split()[1:] for line in _shell_lines("compile-fsdp") if line.endswith("--help")]
    assert lines
    for arguments in lines:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        assert "usage: compile-fsdp" in capsys.readouterr().out


def test_make_targets_exist() -> None:
    targets = {target for line in _shell_lines("make") for target in line.split()[1:] if "=" not in target}
    assert targets
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_files_that_are_started_exist() -> None:
    files = {word for line in _shell_lines("python") for word in line.split() if word.endswith(".py")}
    assert files
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
