"""`compile-fsdp bench --script` measures eager and compiled steps of a script in turns."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import compile_fsdp
from compile_fsdp.cli import main
from compile_fsdp.tools.bench.measure import Result, describe_gain
from compile_fsdp.tools.scripts import run_script

SCRIPT = """\
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from compile_fsdp import fully_shard

dist.init_process_group("gloo")
seen = []

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        {line}
        return self.linear(x).relu()

torch.manual_seed(0)
model = nn.Sequential(Block(), nn.Linear(8, 4))
for module in (model[0], model):
    fully_shard(module)
{compile}
optimizers = []
for part in {parts}:
    no_parameters = {{"params": []}}
    optimizers.append(torch.optim.AdamW([no_parameters, {{"params": part.parameters()}}], lr=0.01))
for step in range(int(sys.argv[1])):
    torch.manual_seed(step)
    loss = model(torch.randn({batch}, 8)).square().mean()
    loss.backward()
    with Path(sys.argv[2], f"rank{{dist.get_rank()}}").open("a") as file:
        print(loss.item(), "eager" if seen else "compiled", file=file)
    seen.clear()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
"""

USUAL = {
    # `is_compiling()` is true while Dynamo traces, so the graph does not contain the append.
    "line": "torch.compiler.is_compiling() or seen.append(1)",
    "compile": 'model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "eager"})',
    "parts": "[model]",
    "batch": "4",
}
ROUNDS = 2


def write(folder: Path, **parts: str) -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(**(USUAL | parts)))
    return path


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set torchrun's variables, with this process as the only rank."""
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    names = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (names | {"MASTER_PORT": free_port()}).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "400")
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def losses(folder: Path) -> list[tuple[float, str]]:
    rows = (line.split() for line in (folder / "rank0").read_text().splitlines())
    return [(float(loss), kind) for loss, kind in rows]


@pytest.mark.usefixtures("alone")
def test_modes_take_turns_and_losses_match_the_eager_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script, found = write(tmp_path), tmp_path / "found.json"
    options = ["--rounds", str(ROUNDS), "--json", str(found)]
    assert main(["bench", *options, "--script", str(script), "1000", str(tmp_path)]) == 0
    assert not dist.is_initialized()
    out = " ".join(capsys.readouterr().out.split())
    assert out.startswith("really trains: the script's own writes happen; needs 35 optimizer steps or fewer, ")
    assert "and measures 35 at most" in out
    assert "| `eager` | 1.00 |" in out and "| `compile` |" in out
    results = json.loads(found.read_text())["results"]["train.py"]
    ratio, collectives = results["compile"]["ratio"], results["compile"]["collectives"]
    assert f"a compiled step takes {ratio:.2f} of an eager step's time (quartiles of 2 rounds" in out
    # A step on one rank has reductions but no all-gathers.
    assert results["eager"]["ratio"] == 1 and results["eager"]["collectives"] == collectives
    assert results["eager"]["first_step_s"] is None and results["compile"]["first_step_s"] > 0
    assert all(each["step_ms"] > 0 and each["peak_mib"] > 0 for each in results.values())

    trained = losses(tmp_path)
    kinds = "".join("e" if kind == "eager" else "c" for _, kind in trained)
    # Eager warm-up, compiling steps, steps that count collectives and memory, two rounds of turns.
    assert re.fullmatch("eec{3,8}" + "e{7}c{7}" + "e{4}c{4}" + "c{4}e{4}", kinds)

    # The script without `bench` and without compilation.
    (tmp_path / "rank0").unlink()
    monkeypatch.setenv("MASTER_PORT", free_port())
    run_script(write(tmp_path, compile=""), [str(len(trained)), str(tmp_path)])
    assert [loss for loss, _ in trained] == pytest.approx([loss for loss, _ in losses(tmp_path)], rel=1e-5)


@pytest.mark.usefixtures("alone")
def test_step_ends_when_every_optimizer_has_stepped(tmp_path: Path) -> None:
    script = write(tmp_path, parts="[model[0], model[1]]")
    assert main(["bench", "--rounds", "2", "--script", str(script), "1000", str(tmp_path)]) == 0
    kinds = "".join("e" if kind == "eager" else "c" for _, kind in losses(tmp_path))
    assert re.fullmatch("e{2,3}c{3,8}" + "e{7}c{7}" + "e{4}c{4}" + "c{4}e{4}", kinds)


@pytest.mark.usefixtures("alone")
def test_evaluation_after_some_steps_counts_in_neither_mode(tmp_path: Path) -> None:
    evaluate = "evaluate = lambda: time.sleep(0.8) or [dist.all_reduce(torch.ones(1)) for _ in range(9)]"
    parts = {"compile": f"{USUAL['compile']}\nimport time\n{evaluate}", "batch": "(step % 3 or evaluate()) and 4"}
    options = ["--rounds", "2", "--json", str(found := tmp_path / "found.json")]
    assert main(["bench", *options, "--script", str(write(tmp_path, **parts)), "50", str(tmp_path)]) == 0
    results = json.loads(found.read_text())["results"]["train.py"].values()
    assert max(each["collectives"] for each in results) < 9
    assert max(each["step_ms"] for each in results) < 250  # a turn's average would have a third of 800 ms


@pytest.mark.parametrize(("upper", "is_clear"), [(0.9, True), (1.2, False)])
def test_gain_is_unclear_if_the_quartiles_include_one(upper: float, is_clear: bool) -> None:
    eager, compiled = (Result(0.8, (0.7, upper), 5.0, peak, 4, None) for peak in (2.0, 3.0))
    gain = describe_gain({"eager": eager, "compile": compiled}, rounds=9, ranks=2)
    assert gain == (
        "Measured on 2 ranks: a compiled step takes 0.80 of an eager step's time (quartiles of 9 rounds 0.70 to "
        f"{upper:.2f}{'' if is_clear else ', so no clear difference'}) and 1.50 of its peak memory."
    )


@pytest.mark.usefixtures("alone")
def test_short_script_is_measured_in_fewer_rounds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--rounds", "15", "--script", str(write(tmp_path)), "50", str(tmp_path)]) == 0
    assert len(losses(tmp_path)) == 50  # the script ran to its end
    assert re.search(r"quartiles of [23]\s+rounds", capsys.readouterr().out)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("steps", "parts", "expected"),
    [
        (9, {}, "to make about 35 optimizer steps or more, got 9; let it train longer"),
        (0, {}, "optimizer steps or more, got 0; let it train longer"),
        (99, {"compile": ""}, "expected a script that compiles its model with compile_fsdp, got no graph in 2 steps"),
        (99, {"compile": "model.compile(backend='eager')"}, "got no graph in 2 steps; compile-fsdp check says why"),
        pytest.param(
            *(99, {"batch": "torch._dynamo.reset() or 4"}, "expected a warm step, got one that was compiled again"),
            marks=pytest.mark.slow,
        ),
        (99, {"line": "raise ValueError('of the script')"}, "got ValueError: of the script at"),
    ],
)
def test_unmeasurable_script_is_a_one_line_error(
    steps: int, parts: dict[str, str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = write(tmp_path, **parts)
    assert main(["bench", "--rounds", "2", "--script", str(script), str(steps), str(tmp_path)]) == 2
    error = capsys.readouterr().err
    said = [line for line in error.splitlines() if line.startswith("compile-fsdp: error")]
    assert len(said) == 1 and expected in said[0]


def test_bench_starts_two_ranks(tmp_path: Path) -> None:
    script = write(tmp_path)
    options = ["--ranks", "2", "--rounds", "2", "--json", "out.json"]
    command = [sys.executable, "-m", "compile_fsdp", "bench", *options, "--script", str(script)]
    done = subprocess.run([*command, "99", "."], cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Measured on 2 ranks") == 1  # by one rank
    results = json.loads((tmp_path / "out.json").read_text())["results"]["train.py"]
    # Two all-gathers and one reduce-scatter for the block, one of each for the root.
    assert {each["collectives"] for each in results.values()} == {5}
    assert (tmp_path / "rank0").read_text().count("eager") == (tmp_path / "rank1").read_text().count("eager")


@pytest.mark.slow
def test_error_on_a_started_rank_ends_the_command(tmp_path: Path) -> None:
    script = write(tmp_path, line="dist.get_rank() == 0 and 1 / 0")
    command = [sys.executable, "-m", "compile_fsdp", "bench", "--script", str(script), "99", "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280)
    assert done.returncode == 2 and "error (rank 0): expected" in done.stderr
