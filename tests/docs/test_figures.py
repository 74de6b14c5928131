"""Tables of figures in README.md and docs/ equal the result files, and no page repeats a figure by hand."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from helpers.pages.code_blocks import DOCS, ROOT


def _load() -> ModuleType:
    """Import docs/figures.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("figures", DOCS / "figures.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look it up
    spec.loader.exec_module(module)
    return module


figures = _load()


def test_pages_have_current_figures_and_repeat_none() -> None:
    assert figures.problems() == []


def test_every_table_is_on_a_page() -> None:
    pages = "".join(page.read_text() for page in figures.pages())
    assert [name for name in figures.FIGURES if f"<!-- figures: {name} -->" not in pages] == []


def test_changed_table_is_written_anew() -> None:
    text = (ROOT / "README.md").read_text()
    ratio = figures.newest("steps_cpu", "compile", "compute").rows["compile"][0]
    changed = text.replace(f"| {ratio}, ", "| 0.01, ")
    assert changed != text
    assert figures.current(changed) == text


@pytest.mark.parametrize(
    "text", ["a step takes 0.43 of the time", "| `compute` | 183.4 |", "in 100 MiB", "takes 77 ms"]
)
def test_figure_outside_of_a_table_is_found(text: str) -> None:
    assert len(figures.repeated(text, {"0.43", "183.4", "100 MiB", "77 ms"})) == 1


@pytest.mark.parametrize(
    "text",
    [
        "torch 2.13 or later",
        "`memory_budget=0.43`",
        "rank 0 of 77 ranks",
        "[figures](../benchmarks/0.43.md)",
        "<!-- figures: steps -->\n0.43\n<!-- end of figures -->",
        "```text\n0.43\n```",
    ],
)
def test_versions_code_links_and_tables_are_no_repetitions(text: str) -> None:
    assert figures.repeated(text, {"2.13", "0.43", "77 ms"}) == []


def test_newest_table_wins() -> None:
    tables = list(
        figures.read("2026-01-01\n\n| a | b |\n| --- | --- |\n| `x` | 1 |\n\n2026-01-02\n\n| a |\n| - |\n| y |\n")
    )
    assert [(table.date, table.rows) for table in tables] == [("2026-01-01", {"x": ["1"]}), ("2026-01-02", {"y": []})]


def test_newest_table_of_all_months_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "benchmarks/results"
    folder.mkdir(parents=True)
    table = "\n\n| mid | ms |\n| --- | ---: |\n| `compile` | {} |\n\n"
    old, new, newest = (
        f"## {date}{table.format(i)}" for i, date in enumerate(["2026-11-01", "2026-11-02", "2026-12-01"])
    )
    (folder / "steps_cpu_202611.md").write_text(f"# Title\n\n{new}{old}{new.replace('| 1 |', '| 3 |')}")
    monkeypatch.setattr(figures, "ROOT", tmp_path)
    assert figures.newest("steps_cpu", "compile", "mid").rows == {"compile": ["3"]}  # of equally new ones the last
    (folder / "steps_cpu_202612.md").write_text(newest)
    assert figures.newest("steps_cpu", "compile", "mid").rows == {"compile": ["2"]}
