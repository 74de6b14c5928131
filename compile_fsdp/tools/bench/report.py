"""Format the results of a benchmark as tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from compile_fsdp.tools.bench.measure import Result


def format_table(name: str, table: Mapping[str, Result]) -> str:
    """Format the results of one workload as a table in Markdown."""
    lines = [
        f"| {name} | step / eager | quartiles | ms | peak MiB | collectives | first step, s |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for mode, result in table.items():
        lower, upper = result.spread
        first = "-" if result.first_step_s is None else f"{result.first_step_s:.1f}"
        lines.append(
            f"| `{mode}` | {result.ratio:.2f} | {lower:.2f} to {upper:.2f} | {result.step_ms:.1f} | "
            f"{result.peak_mib:.1f} | {result.collectives} | {first} |"
        )
    return "\n".join([*lines, ""])


def describe_gain(table: Mapping[str, Result], rounds: int, ranks: int) -> str:
    """Compare a step of "compile" with a step of "eager" in one sentence."""
    eager, compiled = table["eager"], table["compile"]
    lower, upper = compiled.spread
    # On a CPU, the peak counts only memory that the step allocates, so it can be 0.
    memory = f" and {compiled.peak_mib / eager.peak_mib:.2f} of its peak memory" if eager.peak_mib > 0 else ""
    unclear = ", so no clear difference" if lower <= 1 <= upper else ""
    return (
        f"Measured on {ranks} ranks: a compiled step takes {compiled.ratio:.2f} of an eager step's time (quartiles of "
        f"{rounds} rounds {lower:.2f} to {upper:.2f}{unclear}){memory}."
    )


def write_json(tables: Mapping[str, Mapping[str, Result]], ranks: int, path: Path) -> None:
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    results = {name: {mode: asdict(result) for mode, result in table.items()} for name, table in tables.items()}
    head = {"torch": torch.__version__, "ranks": ranks, "device": device.type}
    path.write_text(json.dumps({**head, "results": results}, indent=1) + "\n")
