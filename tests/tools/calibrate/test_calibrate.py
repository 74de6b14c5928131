"""`compile-fsdp calibrate` measures each mesh dim and refuses invalid options."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_fsdp.cli import main
from compile_fsdp.options import Options


def test_every_mesh_dim_is_measured_and_the_file_is_an_option(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    assert main(["calibrate", "--ranks", "4", "--mesh", "2x2", "--dtype", "float32", "--output", str(path)]) == 0
    printed = capfd.readouterr().out
    for text in ("mesh dim 0, 2 ranks, float32", "mesh dim 1, 2 ranks, float32", "all-gather", "reduce-scatter"):
        assert text in printed
    assert f"costs over dim 1 in {path}" in printed
    assert Options.parse({"costs": str(path)}).costs is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "1"], "expected two ranks or more in the last dim, got 1"),
        (["--ranks", "4", "--mesh", "2x3"], "got 2x3 for 4"),
    ],
)
def test_single_rank_or_wrong_mesh_size_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert main(["calibrate", "--ranks", "4"]) == 2
    assert "expected at most one rank per GPU of this host, got --ranks 4 for 2" in capsys.readouterr().err


def test_failed_rank_is_a_one_line_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert main(["calibrate", "--ranks", "2"]) == 2
    error = capfd.readouterr().err.splitlines()[-1]
    assert error.startswith("compile-fsdp: error: expected 2 ranks on this host, got a failed rank: ")


@pytest.mark.parametrize("arguments", [["--dtype", "int8"], ["--dtype", "float33"], ["--mesh", "2by2"]])
def test_invalid_dtype_or_mesh_is_refused(arguments: list[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["calibrate", *arguments])
