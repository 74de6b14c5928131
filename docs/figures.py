"""Write the tables of measured figures in README.md and docs/ from the files in benchmarks/results.

    python docs/figures.py

A table stands between `<!-- figures: NAME -->` and `<!-- end of figures -->`. MkDocs runs this file as a hook: the
build fails if a table is not current, or if a page repeats a figure of a result file outside of these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

# Pages that a test run writes, and a page of estimates.
LEFT_OUT = {"parity.md", "compatibility.md", "planning.md"}

NAMES = {
    "eager": "torch's FSDP2, eager",
    "checkpointed": "torch's FSDP2, eager, each block checkpointed",
    "block": "torch's FSDP2, each block compiled",
    "simple": "SimpleFSDP",
    "simple_bucket": "SimpleFSDP, a single bucket",
    "simple_block": "SimpleFSDP, one bucket per block",
    "compile": "`compile_fsdp`",
    "compile_kept": "`compile_fsdp`, all parameters kept",
    "bound": "the unsharded model, compiled",
}
SIZES = {"overhead": "d=64, 8 blocks", "mid": "d=256, 8 blocks", "compute": "d=512, 6 blocks"}

_REGION = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", flags=re.DOTALL)
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# A decimal, or an integer with its unit.
_FIGURE = re.compile(
    r"(?<![\w.,/#-])(?:\d+\.\d+(?![\w/-]|\.\d)|(\d[\d,]+) ?(ms|us|s|seconds|KiB|MiB|GiB|MB|GB|GB/s|times|%)(?!\w))"
)
# Parts of a page that have numbers but no figures: code, link targets, and versions.
_NO_FIGURES = re.compile(
    r"^```.*?^```$|`[^`\n]+`|\]\([^)]*\)|(?:torch|Python|torchtitan|Fabric|arXiv|version) [\d.]+(?: to [\d.]+)?",
    flags=re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Table:
    """A table of a result file.

    Attributes:
        corner: First cell of the header.
        date: Last date in the text above the table.
        rows: Cells by the row's first cell without backquotes, then by column.
    """

    corner: str
    date: str
    rows: dict[str, list[str]]


def read(text: str) -> Iterator[Table]:
    """Read the tables of a result file, in order."""
    for found in re.finditer(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        header, _, *lines = ([cell.strip() for cell in line.strip("|").split("|")] for line in found[0].splitlines())
        dates = _DATE.findall(text[: found.start()])
        yield Table(header[0], dates[-1] if dates else "", {row[0].strip("`"): row[1:] for row in lines})


def newest(name: str, row: str, corner: str | None = None) -> Table:
    """Return the newest table of a benchmark's result files that has the row; of equally new tables the last."""
    pages = (path.read_text() for path in sorted((ROOT / "benchmarks/results").glob(f"{name}_*.md")))
    every = (table for page in pages for table in read(page))
    fitting = [each for each in every if row in each.rows and corner in (None, each.corner)]
    return max(reversed(fitting), key=lambda each: each.date)


def _render(header: list[str], rows: list[list[str]], *dates: str) -> str:
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    return f"{table}\nMeasured on {' and '.join(sorted(set(dates)))}.\n" if dates else table


def _steps() -> str:
    found = {size: newest("steps_cpu", "compile_kept", size) for size in SIZES}
    modes = [mode for mode in NAMES if all(mode in table.rows for table in found.values())]
    rows = [
        [NAMES[mode], *(f"{table.rows[mode][0]}, {table.rows[mode][3]} MiB" for table in found.values())]
        for mode in modes
    ]
    dates = [table.date for table in found.values()]
    return _render(["", *(f"{size}: {text}" for size, text in SIZES.items())], rows, *dates)


def _first_step() -> str:
    table = newest("first_step_cpu", "compile")
    rows = [[NAMES[mode], *cells] for mode, cells in table.rows.items()]
    header = [text for count in (8, 32, 80) for text in (f"{count} blocks, cold", "warm")]
    return _render(["", *header], rows, table.date)


def _budget() -> str:
    table = newest("memory_budget_cpu", "budget_84")
    names = {mode: f"`memory_budget` of {mode.removeprefix('budget_')} MiB" for mode in table.rows}
    modes = ["checkpointed", "compile", *(mode for mode in table.rows if mode.startswith("budget_"))]
    rows = [[NAMES.get(mode, names[mode]), table.rows[mode][0], table.rows[mode][3]] for mode in modes]
    return _render(["`compute`", "step / eager", "peak, MiB"], rows, table.date)


def _gpu() -> str:
    table = newest("gpu_h200", "bound`, without sharding")
    rows = [[NAMES[mode.split("`")[0]], cells[0], cells[3], cells[5]] for mode, cells in table.rows.items()]
    first_step = "first step, cold and warm (torch 2.11 has no bundles), s"
    return _render(["one H200", "step, ms", "peak, GiB", first_step], rows, table.date)


def _passes() -> str:
    found = [newest("passes_cpu", "no_passes", size) for size in ("mid", "compute")]
    names = {"compile": "all passes", "no_passes": "no passes"}
    rows = [
        [
            names.get(mode, f"without `{mode.removeprefix('no_')}`"),
            *(f"{table.rows[mode][0]}, {table.rows[mode][3]} MiB" for table in found),
        ]
        for mode in found[0].rows
        if mode != "eager"
    ]
    return _render(["", "mid", "compute"], rows, *(table.date for table in found))


def _optimizer_state() -> str:
    text = (ROOT / "benchmarks/results/full_optim_state_cpu_202611.md").read_text()
    ours, torchs = re.findall(r"^\| \| 1 \| .* \| ([\d.]+) \| [\d.]+ \|$", text, flags=re.MULTILINE)
    rows = [["`state.optim_state_dict`", ours], ["torch's `get_optimizer_state_dict`", torchs]]
    return _render(["", "peak of rank 1 / its sharded state"], rows, _DATE.findall(text)[0])


FIGURES: dict[str, Callable[[], str]] = {
    "steps": _steps,
    "first_step": _first_step,
    "budget": _budget,
    "gpu": _gpu,
    "passes": _passes,
    "optimizer_state": _optimizer_state,
}


def current(text: str) -> str:
    """Return a page with its tables written anew."""
    return _REGION.sub(lambda found: found[1] + FIGURES[found[2]]() + found[3], text)


def figures_in(text: str) -> list[str]:
    """Return the decimals in a text, and its integers with units."""
    return [" ".join(filter(None, found.groups())) or found[0] for found in _FIGURE.finditer(_DATE.sub("", text))]


def measured() -> set[str]:
    """Return all figures of the result files."""
    return {each for path in (ROOT / "benchmarks" / "results").glob("*.md") for each in figures_in(path.read_text())}


def repeated(text: str, known: set[str]) -> list[str]:
    """Return the known figures in a page's prose and handwritten tables."""
    return [each for each in figures_in(_NO_FIGURES.sub("", _REGION.sub("", text))) if each in known]


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").glob("*.md") if path.name not in LEFT_OUT)]


def problems() -> list[str]:
    """Return a line for each table that is not current and each figure that a page repeats by hand."""
    known = measured()
    found = []
    for path in pages():
        text = path.read_text()
        name = path.relative_to(ROOT)
        if current(text) != text:
            found.append(f"{name}: tables of figures are not current; run python docs/figures.py")
        if by_hand := repeated(text, known):
            found.append(f"{name}: figures of benchmarks/results repeated by hand: {', '.join(by_hand)}")
    return found


def on_pre_build(config: object) -> None:
    """Stop MkDocs if there are problems."""
    if found := problems():
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    for page in pages():
        page.write_text(current(page.read_text()))
