"""Show an estimate as formulas, as a table and as a plot, and write it as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import sympy
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from compile_fsdp.errors import EstimateError
from compile_fsdp.passes.dynamo.fit_memory_budget import MARGIN, BudgetDecision
from compile_fsdp.tools.planning.amounts import B, N, S
from compile_fsdp.tools.planning.estimates import Estimate
from compile_fsdp.tools.planning.network import StepTime

COUNTS = ("all_gathers", "reduce_scatters")
# What the table shows only where it is not 0.
OPTIONAL = ("all_reduced", "received")
# What is shown of each stage of a pipeline.
OF_STAGES = ("parameters", "activations", "peak", "reserved")
# Parts of the memory that the plot shows beside the peak.
LAYERS = ("parameters", "optimizer", "gradients", "unsharded", "activations")

# What a rank holds between two steps.
STATE = ("parameters", "optimizer", "buffers", "batch")


@dataclass(frozen=True, slots=True)
class Scaled:
    """A step on some number of ranks: its time, and the most bytes of a rank."""

    time: StepTime
    peak_bytes: int


def print_estimate(
    estimate: Estimate, worlds: Sequence[int], batch: int, seq_len: int, console: Console, replicas: int
) -> None:
    """Print the formulas of an estimate, then their values for each number of ranks that shard."""
    sets = f", in {replicas} sets (HSDP)," if replicas > 1 else ""
    console.print(f"Bytes per rank and step, for N ranks{sets} and B sequences of S tokens on each:")
    for name, formula in estimate.formulas().items():
        if name not in ("peak", "reserved") and not _is_left_out(name, formula):
            console.print(f"  {name} = {formula}")
    for term, where in largest_terms(estimate.peak, worlds, batch, seq_len).items():
        console.print(f"  peak (N = {', '.join(map(str, where))}) = {term}")
    table = Table(title=f"B = {batch}, S = {seq_len}, per rank", title_justify="left")
    table.add_column("")
    for ranks in worlds:
        table.add_column(f"N = {ranks}", justify="right")
    columns = [estimate.at(ranks, batch, seq_len) for ranks in worlds]
    for name, formula in estimate.formulas().items():
        if _is_left_out(name, formula):
            continue
        table.add_row(name, *(str(each[name]) if name in COUNTS else show_bytes(each[name]) for each in columns))
    console.print(table)


def print_stages(
    by_stage: Mapping[int, Estimate], worlds: Sequence[int], batch: int, seq_len: int, console: Console
) -> None:
    """Print what each stage of a pipeline holds, for each number of ranks that shard."""
    table = Table(title="stages of the pipeline; those between the second and the last hold less", title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("")
    for ranks in worlds:
        table.add_column(f"N = {ranks}", justify="right")
    for stage, estimate in by_stage.items():
        columns = [estimate.at(ranks, batch, seq_len) for ranks in worlds]
        for name in OF_STAGES:
            table.add_row(str(stage), name, *(show_bytes(each[name]) for each in columns))
    console.print(table)


def _is_left_out(name: str, formula: sympy.Expr) -> bool:
    return name in OPTIONAL and formula == 0


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


def print_decisions(
    decisions: Mapping[int, BudgetDecision], estimate: Estimate, batch: int, seq_len: int, console: Console
) -> None:
    """Print what a memory budget decides, by number of ranks."""
    budget = next(iter(decisions.values())).budget
    table = Table(title=f"compiled, with a memory budget of {show_bytes(budget)} for the step", title_justify="left")
    table.add_column("")
    rows: dict[str, list[str]] = {}
    for ranks, decision in decisions.items():
        table.add_column(f"N = {ranks}", justify="right")
        values = estimate.at(ranks, batch, seq_len)
        state = sum(values[name] for name in STATE)
        # What is decided keeps a margin, in which the estimates have it.
        fastest, peak = int(decision.fastest_bytes / MARGIN), int(decision.peak_bytes / MARGIN)
        cells = {
            "fits": "yes" if decision.fits else f"no: give it {show_bytes(decision.peak_bytes)}",
            "state between steps": show_bytes(state),
            "step, fastest": show_bytes(fastest),
            "step, as decided": show_bytes(peak),
            "together": show_bytes(state + peak),
            "groups kept unsharded": str(len(decision.kept)),
            "ops computed again": f"{len(decision.recomputed)} of {decision.ops}",
            "ops whose results are offloaded": str(len(decision.offloaded)),
            "time added": f"{decision.seconds * 1e3:.1f} ms",
        }
        for name, text in cells.items():
            rows.setdefault(name, []).append(text)
    for name, texts in rows.items():
        table.add_row(name, *texts)
    console.print(table)


def print_times(times: Mapping[int, Mapping[str, Scaled]], console: Console) -> None:
    """Print the estimated time of a step by number of ranks, for each way to shard."""
    table = Table(title="step, estimated", title_justify="left")
    for name in ("ranks", "sharded over", "compute", "exposed", "memory"):
        table.add_column(name, justify="right")
    for ranks, by_mesh in times.items():
        for mesh, each in by_mesh.items():
            exposed = f"{each.time.exposed * 1e3:.1f} ms"
            table.add_row(str(ranks), mesh, f"{each.time.compute * 1e3:.1f} ms", exposed, show_bytes(each.peak_bytes))
    console.print(table)


def draw_times(times: Mapping[int, Mapping[str, Scaled]]) -> Figure:
    """Draw compute, exposed communication and memory by the number of ranks, for each way to shard."""
    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    worlds = sorted(times)
    for mesh in dict.fromkeys(mesh for by_mesh in times.values() for mesh in by_mesh):
        scaled = {ranks: times[ranks][mesh] for ranks in worlds if mesh in times[ranks]}
        exposed = [each.time.exposed * 1e3 for each in scaled.values()]
        (line,) = left.plot(list(scaled), exposed, marker="o", label=f"exposed, sharded over {mesh}")
        memory = [each.peak_bytes / 2**30 for each in scaled.values()]
        right.plot(list(scaled), memory, marker="o", color=line.get_color(), label=f"sharded over {mesh}")
    compute = [next(iter(times[ranks].values())).time.compute * 1e3 for ranks in worlds]
    left.plot(worlds, compute, marker="o", color="black", linewidth=2, label="compute")
    for axes, name in ((left, "ms per step"), (right, "GiB per rank")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(worlds, [str(ranks) for ranks in worlds])
        axes.set_xlabel("ranks")
        axes.set_ylabel(name)
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def show_bytes(count: int) -> str:
    """Format bytes in the largest unit that gives at least 1, with three digits or more."""
    for power, unit in ((4, "TiB"), (3, "GiB"), (2, "MiB"), (1, "KiB")):
        if count >= 1024**power:
            return f"{count / 1024**power:,.2f} {unit}"
    return f"{count} B"


def write_json(
    estimate: Estimate,
    worlds: Sequence[int],
    batch: int,
    seq_len: int,
    path: Path,
    decisions: Mapping[int, BudgetDecision],
    replicas: int,
    by_stage: Mapping[int, Estimate],
) -> None:
    """Write an estimate as JSON: formulas as strings, and values for each number of ranks that shard.

    To read the formulas, pass N, B and S as symbols to `sympy.sympify` in `locals`: sympy uses these names itself.
    """
    content: dict[str, Any] = {
        "batch": batch,
        "seq_len": seq_len,
        "replicas": replicas,
        "formulas": {name: str(formula) for name, formula in estimate.formulas().items()},
        "ranks": {str(ranks): estimate.at(ranks, batch, seq_len) for ranks in worlds},
    }
    if by_stage:
        content["stages"] = {
            str(stage): {str(ranks): each.at(ranks, batch, seq_len) for ranks in worlds}
            for stage, each in by_stage.items()
        }
    if decisions:
        content["memory_budget"] = {str(ranks): asdict(decision) for ranks, decision in decisions.items()}
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
