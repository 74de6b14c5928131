"""Show an estimate as formulas, as a table and as a plot, and write it as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import sympy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.amounts import B, N, S
from compile_fsdp.tools.planning.estimates import Estimate

COUNTS = ("all_gathers", "reduce_scatters")
# Parts of the memory that the plot shows beside the peak.
LAYERS = ("parameters", "optimizer", "gradients", "unsharded", "activations")


def print_estimate(estimate: Estimate, worlds: Sequence[int], batch: int, seq_len: int, console: Console) -> None:
    """Print the formulas of an estimate, then their values for each number of ranks."""
    console.print("Bytes per rank and step, for N ranks and B sequences of S tokens on each:")
    for name, formula in estimate.formulas().items():
        if name != "peak":
            console.print(f"  {name} = {formula}")
    for term, where in largest_terms(estimate.peak, worlds, batch, seq_len).items():
        console.print(f"  peak (N = {', '.join(map(str, where))}) = {term}")
    table = Table(title=f"B = {batch}, S = {seq_len}, per rank", title_justify="left")
    table.add_column("")
    for ranks in worlds:
        table.add_column(f"N = {ranks}", justify="right")
    columns = [estimate.at(ranks, batch, seq_len) for ranks in worlds]
    for name in estimate.formulas():
        table.add_row(name, *(str(each[name]) if name in COUNTS else show_bytes(each[name]) for each in columns))
    console.print(table)


def largest_terms(
    peak: sympy.Expr, worlds: Sequence[int], batch: int, seq_len: int
) -> dict[sympy.Expr, list[int]]:
    """The operands of a maximum that are the largest for some numbers of ranks, each with these numbers."""
    operands = peak.args if isinstance(peak, sympy.Max) else (peak,)
    found: dict[sympy.Expr, list[int]] = {}
    for ranks in worlds:
        values = {N: ranks, B: batch, S: seq_len}
        found.setdefault(max(operands, key=lambda each: each.subs(values)), []).append(ranks)
    return found


def show_bytes(count: int) -> str:
    """Format bytes in the largest unit that gives at least 1, with three digits or more."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.2f} {unit}"
    return f"{count} B"


def write_json(estimate: Estimate, worlds: Sequence[int], batch: int, seq_len: int, path: Path) -> None:
    """Write an estimate as JSON: formulas as strings, and values for each number of ranks.

    To read the formulas, pass N, B and S as symbols to `sympy.sympify` in `locals`: sympy uses these names itself.
    """
    content: dict[str, Any] = {
        "batch": batch,
        "seq_len": seq_len,
        "formulas": {name: str(formula) for name, formula in estimate.formulas().items()},
        "ranks": {str(ranks): estimate.at(ranks, batch, seq_len) for ranks in worlds},
    }
    _write(path, lambda: path.write_text(json.dumps(content, indent=1) + "\n"))


def draw(estimate: Estimate, worlds: Sequence[int], batch: int, seq_len: int) -> Figure:
    """Draw memory by the number of ranks: the parts, and the peak."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    worlds = sorted(worlds)
    columns = [estimate.at(ranks, batch, seq_len) for ranks in worlds]
    for name in LAYERS:
        axes.plot(worlds, [each[name] / 2**30 for each in columns], marker="o", label=name)
    axes.plot(worlds, [each["peak"] / 2**30 for each in columns], marker="o", color="black", linewidth=2, label="peak")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(worlds, [str(ranks) for ranks in worlds])
    axes.set_xlabel("ranks")
    axes.set_ylabel("GiB per rank")
    axes.set_title(f"{batch} x {seq_len} tokens on each rank")
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def write_plot(figure: Figure, path: Path) -> None:
    _write(path, lambda: figure.savefig(path, dpi=120))


def _write(path: Path, write: Any) -> None:
    try:
        write()
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for a suffix that it does not know
        raise EstimateError(f"expected a file to write to, got {path}: {error}; pass another path") from error
