"""`compile-fsdp plan`, with configurations small enough to trace in seconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import sympy

from compile_fsdp.cli import main
from compile_fsdp.tools.planning.configs import PRESETS, build_model
from helpers.models.configs import LLAMA

SMALL = LLAMA | {"num_hidden_layers": 3}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return path


def planned(config: Path, *options: str) -> dict[str, Any]:
    output = config.parent / "plan.json"
    assert main(["plan", "--hf-config", str(config), "--seq-len", "64", "--json", str(output), *options]) == 0
    content: dict[str, Any] = json.loads(output.read_text())
    return content


def test_table_formulas_and_files(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = config.parent / "plan.png"
    content = planned(config, "--world", "8,64", "--batch-size", "2", "--plot", str(plot))
    out = capsys.readouterr().out
    for part in ("parameters = ", "peak (N = 8", "N = 64", "all_gathers", "KiB", f"wrote {plot}"):
        assert part in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert set(content["ranks"]) == {"8", "64"}
    symbols = {name: sympy.Symbol(name, integer=True, positive=True) for name in "NBS"}
    for ranks, values in content["ranks"].items():
        for name, formula in content["formulas"].items():
            expression = sympy.sympify(formula, locals=symbols)
            sizes = {symbols["N"]: int(ranks), symbols["B"]: 2, symbols["S"]: 64}
            assert expression.subs(sizes) == values[name]
    # Each of 3 layers twice, and the root once.
    assert (content["ranks"]["8"]["all_gathers"], content["ranks"]["8"]["reduce_scatters"]) == (7, 4)


def test_attention_has_no_mask(config: Path) -> None:
    formulas = planned(config)["formulas"]
    assert "S**2" not in formulas["activations"] and "B*S" in formulas["activations"]


@pytest.mark.slow
def test_options_change_what_they_say(config: Path) -> None:
    def at_8(*options: str) -> dict[str, int]:
        values: dict[str, int] = planned(config, *options)["ranks"]["8"]
        return values

    base = at_8()
    assert base["optimizer"] > 0
    other = at_8("--optimizer", "sgd", "--param-dtype", "float32", "--reduce-dtype", "bfloat16")
    assert (other["optimizer"], other["gathered"]) == (0, 2 * base["gathered"])
    assert other["reduced"] * 2 == base["reduced"]
    other = at_8("--keep-unsharded", "--checkpoint-layers")
    assert (base["all_gathers"], other["all_gathers"]) == (7, 4)
    assert other["activations"] < base["activations"] / 2
    assert at_8("--forward-prefetch", "2")["unsharded"] > base["unsharded"]
    # Where activations are most of the peak, collectives' copies are elsewhere.
    assert at_8("--seq-len", "8", "--backend", "gloo")["peak"] > at_8("--seq-len", "8")["peak"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--hf-config", "no/such.json"], "no/such.json"),
        (["--preset", "8B", "--world", "0"], "expected at least 2 ranks and 1 token, got --world 0"),
        (["--preset", "8B", "--backward-prefetch", "0"], "backward_prefetch of at least 1"),
    ],
)
def test_mistakes_get_one_line(options: list[str], expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compile-fsdp: error: ") and expected in line


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("{", "expected a config.json of transformers"),
        ("{}", "without; add the model's type"),
        ('{"model_type": "no_such_model"}', "'no_such_model'"),
        (json.dumps(SMALL | {"num_attention_heads": "four"}), "correct the configuration"),
    ],
)
def test_wrong_configurations_get_one_line(
    content: str, expected: str, config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(content)
    assert main(["plan", "--hf-config", str(config)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("compile-fsdp: error: ") and expected in line


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_size_in_their_name(name: str) -> None:
    billions = sum(parameter.numel() for parameter in build_model(PRESETS[name]).parameters()) / 1e9
    assert billions == pytest.approx(float(name.removesuffix("B")), rel=0.01)


def test_a_memory_budget_and_a_network(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = config.parent / "network.png"
    options = ["--world", "8,64", "--memory-budget", "1MiB", "--network", str(picture), "--costs", "cpu"]
    content = planned(config, *options)
    out = capsys.readouterr().out
    for part in ("a memory budget of 1.00 MiB", "ops computed again", "step, as decided", "a host (HSDP)", "exposed"):
        assert part in out
    assert picture.read_bytes().startswith(b"\x89PNG")
    decisions = content["memory_budget"]
    assert set(decisions) == {"8", "64"}
    for decision in decisions.values():
        assert decision["budget"] == 2**20
        assert decision["fits"] is (decision["peak_bytes"] <= 2**20)


@pytest.mark.parametrize("size", ["much", "3XiB", "1GB2"])
def test_a_size_that_is_none_is_refused(config: Path, size: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--hf-config", str(config), "--memory-budget", size])


@pytest.mark.parametrize("options", [["--ranks-per-host", "0"], ["--host-bandwidth", "-1"]])
def test_a_network_that_is_none_is_refused(
    config: Path, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--hf-config", str(config), *options]) == 2
    assert "expected at least 1 rank on a host and a bandwidth" in capsys.readouterr().err
