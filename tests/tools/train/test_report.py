"""The summary says what happened, and the curve is a picture."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import pytest
from matplotlib import image
from rich.console import Console

from compile_fsdp.tools.train.progress import show_progress
from compile_fsdp.tools.train.report import CompileFigures, RunSummary, print_summary, running_mean, write_outputs

COMPILED = RunSummary(
    mode="compile",
    world_size=2,
    device="cpu",
    parameters=1_000_000,
    first_step=1,
    losses=(5.5, 5.0, 4.0, 3.0, 2.5),
    tokens_per_step=1000,
    cold_step_s=(30.0,),
    warm_step_s=(0.1, 0.2, 0.4),
    compiled=CompileFigures(
        forward_graphs=1,
        backward_graphs=1,
        recompiles=2,
        windows_removed=8,
        copies_removed=18,
        resizes_removed=36,
        nodes_before=500,
        nodes_after=440,
        kept=(("embedding.weight", "open at return"), ("norm.weight", "open at return")),
        advice=("Estimated: a memory_budget would take 3 ms off a step.",),
    ),
    peak_memory_bytes=512 * 2**20,
)


def test_rows_of_a_compiled_run() -> None:
    assert COMPILED.rows() == [
        ("steps", "4 (1 to 5)"),
        ("loss", "5.0000 -> 2.5000 nats per byte"),
        ("graphs", "1 forward, 1 backward"),
        ("graph breaks", "0"),
        ("recompiles", "2"),
        ("ops removed", "18 copies and 36 resizes of 8 windows; 500 -> 440 nodes"),
        ("windows kept", "2 (open at return: 2)"),
        ("gained", "not measured here: compare the step time with that of --mode eager"),
        ("to gain more", "Estimated: a memory_budget would take 3 ms off a step."),
        ("cold steps", "1, 30.0 s in all"),
        ("warm step time", "median 200.0 ms (min 100.0, max 400.0, steps 3)"),
        ("throughput", "5,000 tokens/s over 2 ranks"),
        ("peak memory", "512 MiB per rank (peak RSS of the whole process)"),
    ]


def test_rows_of_an_eager_run_on_a_gpu() -> None:
    names = dict(dataclasses.replace(COMPILED, mode="eager", device="cuda").rows())
    assert "graphs" not in names
    assert "allocated on the GPU" in names["peak memory"]


def test_rows_of_a_run_without_warm_steps() -> None:
    names = dict(dataclasses.replace(COMPILED, warm_step_s=(), losses=(5.5, 5.0)).rows())
    assert "warm step time" not in names
    assert names["steps"] == "1 (1 to 2)"


def test_printed_summary_has_every_row() -> None:
    stream = io.StringIO()
    print_summary(COMPILED, Console(file=stream, width=100))
    for name, text in COMPILED.rows():
        assert name in stream.getvalue()
        assert text in stream.getvalue()


@pytest.mark.parametrize("steps", [1, 5, 400])
def test_loss_curve_is_a_picture(tmp_path: Path, steps: int) -> None:
    summary = dataclasses.replace(COMPILED, first_step=0, losses=tuple(5.0 / (1 + i) for i in range(steps)))
    _, curve = write_outputs(summary, tmp_path / "new" / "folder")
    assert curve.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(curve)
    height, width, _ = pixels.shape
    assert (height, width) == (480, 840)
    assert pixels.min() < 0.5 < pixels.max()


def test_running_mean() -> None:
    assert running_mean((1.0, 3.0, 5.0, 7.0), window=2) == [1.0, 2.0, 4.0, 6.0]


def shown(is_terminal: bool) -> str:
    stream = io.StringIO()
    with show_progress(
        Console(file=stream, force_terminal=is_terminal, width=120), first=0, total=40
    ) as view:
        view.phase("compiling forward")
        view.step(1, loss=5.5, tokens_per_s=1234.5)
        for done in range(2, 41):
            view.phase("training")
            view.step(done, loss=2.25, tokens_per_s=99.0)
    return stream.getvalue()


def test_progress_in_a_log_is_few_plain_lines() -> None:
    lines = shown(is_terminal=False).splitlines()
    assert lines[:4] == [
        "compiling forward ...",
        "step 1/40  loss 5.5000  1,234 tokens/s",
        "training ...",
        "step 2/40  loss 2.2500  99 tokens/s",
    ]
    assert lines[-1] == "step 40/40  loss 2.2500  99 tokens/s"
    assert len(lines) < 30


def test_progress_on_a_terminal_has_phase_loss_and_throughput() -> None:
    text = shown(is_terminal=True)
    for part in ("done", "40/40", "loss 2.2500", "99 tokens/s"):
        assert part in text


def test_other_ranks_show_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with show_progress(Console(quiet=True), first=0, total=2) as view:
        view.phase("training")
        view.step(1, loss=1.0, tokens_per_s=1.0)
    assert capsys.readouterr().out == ""
