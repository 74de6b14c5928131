"""Code blocks of the docs run and print the output shown below them.

tests/examples/test_examples.py runs the README's example under torchrun.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from compile_fsdp.cli import main
from helpers.pages.code_blocks import DOCS, ROOT, Setting, read_blocks, run_page
from helpers.releases.skip import skip_before

README = ROOT / "README.md"

# A sharded model and its optimizer, and the optimizer state of an unsharded run.
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

# An unsharded model.
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

batch = torch.ones(4, 16)
"""

# Model and dataset for a trainer.
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
    "options.md": Setting(before=GIVEN),
    "performance.md": Setting(before=GIVEN),
    "quickstart.md": Setting(inner_backend="inductor"),
    "state_dicts.md": Setting(before=GIVEN),
}


PAGES = [page for page in sorted(DOCS.rglob("*.md")) if read_blocks(page, "python", "py")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_python_blocks(page: Path, tmp_path: Path) -> None:
    if page.stem == "performance":
        skip_before("2.13")  # whose bundles the page shows
    run_page(page, SETTINGS.get(page.name, Setting()), tmp_path)


def _shell_lines(program: str) -> list[str]:
    """Lines of all bash blocks that run a program, without comments."""
    blocks = [block for page in (README, *DOCS.rglob("*.md")) for block in read_blocks(page, "bash")]
    lines = [line.partition("  #")[0].strip() for block in blocks for line in block.text.splitlines()]
    return [line for line in lines if line.startswith(f"{program} ")]


def test_documented_help_commands_work(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.split()[1:] for line in _shell_lines("compile-fsdp") if line.endswith("--help")]
    assert lines
    for arguments in lines:
        with pytest.raises(SystemExit) as end:
            main(arguments)
        assert end.value.code == 0
        assert "usage: compile-fsdp" in capsys.readouterr().out


def test_documented_make_targets_exist() -> None:
    targets = {target for line in _shell_lines("make") for target in line.split()[1:] if "=" not in target}
    assert targets
    assert targets <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))


def test_documented_python_scripts_exist() -> None:
    files = {word for line in _shell_lines("python") for word in line.split() if word.endswith(".py")}
    assert files
    assert [file for file in sorted(files) if not (ROOT / file).exists()] == []
