"""The command line, on one rank and on two."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from compile_fsdp.cli import build_parser, main
from compile_fsdp.tools.train import loop
from compile_fsdp.tools.train.command import parse_options
from compile_fsdp.tools.train.config import TrainOptions

Train = Callable[..., dict[str, Any]]
TINY_MODE = ["--mode", "eager", "--device", "cpu"]


def test_eager_run_learns_and_leaves_its_files(
    train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = train("--steps", 8)
    assert len(summary["losses"]) == 8
    assert summary["losses"][-1] < summary["losses"][0] - 0.5
    assert len(summary["cold_step_s"]) + len(summary["warm_step_s"]) == 8
    assert summary["compiled"]["forward_graphs"] == 0
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    for part in ("training 0.9 M parameters", "1 rank, cpu", "step 8/8", "Summary", "peak RSS", "loss.png"):
        assert part in out


def test_same_seed_same_losses(train: Train) -> None:
    first, second, other = (train("--steps", 2, "--seed", seed)["losses"] for seed in (3, 3, 4))
    assert first == second != other


def test_tied_embeddings_and_bfloat16(train: Train) -> None:
    summary = train("--steps", 2, "--tie-embeddings", "--precision", "bfloat16")
    assert summary["parameters"] == 869_504 - 256 * 128


def test_learning_rate_rises_and_stays() -> None:
    options = parse_options(parsed("--lr", "0.1", "--warmup-steps", "4"))
    rates = [loop.learning_rate(options, step) for step in range(6)]
    assert rates == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1, 0.1])


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--data", "no/such/folder"], "no/such/folder, which does not exist"),
        (["--steps", "0", "--lr", "-1"], "learning_rate=-1.0, steps=0"),
        (["--inner-backend", "aot_eager"], "expected --mode compile"),
        (["--lr", "1e30", "--warmup-steps", "0"], "the loss is nan at step"),
    ],
)
def test_a_users_mistake_is_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], expected: str
) -> None:
    output = ["--output", str(tmp_path / "out"), "--batch-size", "1", "--seq-len", "16"]
    assert main(["train", *TINY_MODE, *output, "--data", str(text), *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compile-fsdp: error: ")
    assert expected in error
    assert error.count("\n") == 1
    assert not dist.is_initialized()


def test_unknown_inner_backend_is_one_line(
    text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--device", "cpu", "--data", str(text), "--output", str(tmp_path), "--inner-backend", "nonsense"]
    assert main(["train", *args]) == 2
    error = capsys.readouterr().err
    assert error.startswith("compile-fsdp: error: expected inner_backend to be one of")
    assert error.count("\n") == 1


def test_process_group_is_destroyed_on_any_error(monkeypatch: pytest.MonkeyPatch, text: Path) -> None:
    def fail(options: TrainOptions, world: object) -> None:
        assert dist.is_initialized()
        raise ZeroDivisionError

    monkeypatch.setattr(loop, "build_model", fail)
    with pytest.raises(ZeroDivisionError):
        main(["train", *TINY_MODE, "--data", str(text)])
    assert not dist.is_initialized()


@pytest.mark.parametrize("missing", ["rich", "matplotlib"])
def test_missing_extra_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    class Blocker:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == missing:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for name in [name for name in sys.modules if name.partition(".")[0] == missing]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Blocker(), *sys.meta_path])
    assert main(["train"]) == 2
    assert f"needs {missing}; install it with: pip install 'compile-fsdp[train]'" in capsys.readouterr().err


def test_command_line_does_not_import_what_only_training_needs(tmp_path: Path) -> None:
    code = "import sys; from compile_fsdp import cli; cli.build_parser(); print({'rich'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"


def test_module_and_script_print_the_same_help(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-m", "compile_fsdp", "train", "--help"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    with pytest.raises(SystemExit):
        main(["train", "--help"])
    assert re.sub(r"\s+", " ", done.stdout) == re.sub(r"\s+", " ", capsys.readouterr().out)


@pytest.mark.timeout(1200)
def test_compiled_losses_equal_eager_ones_on_two_ranks(train_on_two_ranks: Train, eager_on_two_ranks: Any) -> None:
    eager = eager_on_two_ranks.whole
    compiled = train_on_two_ranks("--mode", "compile", "--steps", 5)
    assert compiled["world_size"] == eager["world_size"] == 2
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    figures = compiled["compiled"]
    assert (figures["forward_graphs"], figures["backward_graphs"]) == (1, 1)
    assert (figures["graph_breaks"], figures["recompiles"]) == (0, 0)
    assert figures["copies_removed"] > 0
    assert len(compiled["cold_step_s"]) == 1


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_compiled_losses_equal_eager_ones_on_two_accelerators(train_on_two_devices: Train) -> None:
    eager = train_on_two_devices("--mode", "eager", "--steps", 3)
    compiled = train_on_two_devices("--mode", "compile", "--steps", 3)
    assert compiled["device"] == eager["device"] == "emulated"
    assert compiled["losses"] == pytest.approx(eager["losses"], rel=1e-5)
    assert compiled["peak_memory_bytes"] > 0
    figures = compiled["compiled"]
    assert (figures["forward_graphs"], figures["backward_graphs"]) == (1, 1)
    assert (figures["graph_breaks"], figures["recompiles"]) == (0, 0)


@pytest.mark.timeout(1200)
def test_compiled_run_resumes_an_eager_one(
    train_on_two_ranks: Train, eager_on_two_ranks: Any, tmp_path: Path
) -> None:
    checkpoint = eager_on_two_ranks.checkpoint(tmp_path / "ck")
    resumed = train_on_two_ranks("--inner-backend", "aot_eager", "--steps", 4, "--checkpoint", checkpoint)
    assert resumed["first_step"] == 2
    assert resumed["losses"] == pytest.approx(eager_on_two_ranks.whole["losses"][:4], rel=1e-5)


def parsed(*args: str) -> Any:
    return build_parser().parse_args(["train", *args])
