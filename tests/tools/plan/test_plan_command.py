"""`compile-fsdp plan` on the command line: table, JSON and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from compile_fsdp.cli import main
from compile_fsdp.passes import COSTS
from compile_fsdp.tools.plan.models import PRESETS, build_from_config
from compile_fsdp.tools.plan.trace import Network, Settings, trace_step
from helpers.models import planned

# The config.json of a transformers model.
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 500,
}

FACTORY = f"{planned.__file__}:build"

TABLE = """\
┏━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━━━┳━━━━━━━━┳━━━━━━━━━┓
┃ settings                                   ┃ shards   ┃ optimizer ┃ step     ┃ peak     ┃ time   ┃ exposed ┃
┡━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━━━╇━━━━━━━━╇━━━━━━━━━┩
│ 8 ranks, float32                           │ 48.2 KiB │ 96.5 KiB  │ 2.69 MiB │ 2.83 MiB │ 106 us │ 102 us  │
│ 8 ranks, checkpoint full, float32          │ 48.2 KiB │ 96.5 KiB  │ 1.69 MiB │ 1.83 MiB │ 107 us │ 101 us  │
│ 8 ranks, 2 replicas, float32               │ 96.5 KiB │ 193 KiB   │ 2.69 MiB │ 2.97 MiB │ 229 us │ 224 us  │
│ 8 ranks, 2 replicas, checkpoint full,      │ 96.5 KiB │ 193 KiB   │ 1.69 MiB │ 1.97 MiB │ 231 us │ 224 us  │
│ float32                                    │          │           │          │          │        │         │
└────────────────────────────────────────────┴──────────┴───────────┴──────────┴──────────┴────────┴─────────┘
shards, optimizer: bytes that a rank holds between steps. step: most bytes above them in forward and backward.
peak: all three. Times are estimates. Not planned: tensor parallelism, pipeline parallelism, float8.
"""


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")


def fails(options: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line of error text that the command prints."""
    assert main(["plan", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("compile-fsdp: error: ")


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    options = ["--world", "8", "--replicate", "1,2", "--checkpoint", "none,full", "--param-dtype", "float32"]
    assert main(["plan", "--factory", FACTORY, *options, "--json", str(output)]) == 0
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert "\n".join(printed).partition("wrote")[0] == TABLE
    first, *others = json.loads(output.read_text())
    assert len(others) == 3
    assert first["settings"] == {
        "ranks": 8,
        "replicas": 1,
        "checkpoint": "none",
        "param_dtype": "float32",
        "reduce_dtype": "float32",
        "memory_budget": None,
    }
    total = 3 * planned.BLOCK_BYTES + planned.HEAD_BYTES
    figures = first["figures"]
    assert (figures["shard_bytes"], figures["optimizer_bytes"]) == (total // 8, total // 4)
    assert figures["peak_bytes"] == total // 8 + total // 4 + figures["step_bytes"]


def test_budget_that_is_too_small(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "plan.json"
    assert main(["plan", "--factory", FACTORY, "--memory-budget", "1KiB", "--json", str(output)]) == 0
    assert "budget 1 KiB" in (out := capsys.readouterr().out) and "does not fit" in out
    (row,) = json.loads(output.read_text())
    assert row["settings"]["memory_budget"] == 1024 and row["figures"] is None
    assert row["reason"].startswith("expected a memory_budget of at least")


@pytest.mark.parametrize(
    ("option", "name"),
    [
        (["--tp", "8"], "tensor parallelism; leave out --tp"),
        (["--pp", "2"], "pipeline parallelism; leave out --pp"),
        (["--float8"], "float8; leave out --float8"),
    ],
)
def test_unplanned_settings_are_refused(option: list[str], name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert fails(["--preset", "8B", *option], capsys) == f"compile-fsdp plan does not plan {name}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--hf-config", "no/such.json"], "no/such.json"),
        (["--factory", "no_such_module:build"], "No module named 'no_such_module'"),
        (["--factory", f"{planned.__file__}:missing"], "has no attribute 'missing'"),
        (["--preset", "8B", "--world", "1"], "at least 2 ranks each, got --world 1 and --replicate 1"),
        (["--preset", "8B", "--replicate", "3"], "got --world 8 and --replicate 3"),
        (["--preset", "8B", "--host-bandwidth", "0"], "expected positive numbers"),
        (["--factory", FACTORY, "--json", "no/such/folder.json"], "expected a file that can be written"),
    ],
)
def test_mistakes_get_one_line(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert expected in fails(options, capsys)


@pytest.mark.parametrize("option", [["--memory-budget", "3XiB"], ["--checkpoint", "some"], ["--param-dtype", "int8"]])
def test_unknown_values_are_refused(option: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--factory", FACTORY, *option])


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "expected a config.json of transformers"),
        ("{}", "without; add the model's type"),
        ('{"model_type": "no_such_model"}', "'no_such_model'"),
        (json.dumps(LLAMA | {"num_attention_heads": "four"}), "correct the configuration"),
    ],
)
def test_wrong_configurations_get_one_line(
    content: str, expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "config.json"
    config.write_text(content)
    assert expected in fails(["--hf-config", str(config)], capsys)


@pytest.mark.slow
def test_attention_of_config_has_no_mask() -> None:
    def step_bytes(length: int) -> int:
        report = trace_step(lambda: build_from_config(LLAMA, 1, length), Settings(2), Network(COSTS["cuda"]))
        return report.allocated_bytes

    short, middle, long = map(step_bytes, (256, 512, 768))
    assert long - middle == middle - short


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_in_their_name(name: str) -> None:
    with torch.device("meta"):
        model, _ = build_from_config(PRESETS[name], 1, 8)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    assert billions == pytest.approx(float(name.removesuffix("B")), rel=0.01)
