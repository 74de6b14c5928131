"""Draw a step before and after the passes, as `compile_fsdp.explain` has it: the picture that README opens with.

    python benchmarks/draw_step.py docs/images/step.png

A model of four blocks on one of eight ranks; times and bytes are estimates, see docs/explain.md.
"""

from __future__ import annotations

import sys
from typing import Any

import matplotlib
import torch

import compile_fsdp
from compile_fsdp.passes import PASSES, Costs
from compile_fsdp.tools.bench.llama import ModelConfig, Transformer

RANKS, ROWS = 8, 4
# So that a block's gather takes about as long as its forward, as on many clusters.
COSTS = Costs(latency=2e-4, comm_bandwidth=2e9, memory_bandwidth=2e10, flops=1.2e12)
MODEL = ModelConfig(dim=512, layers=4, heads=8, hidden=1408)
LANES = {
    "compute": ("compute", "copy"),
    "all-gather": ("gather",),
    "reduce-scatter": ("reduce",),
}
COLORS = {"compute": "#5b7899", "copy": "#cf8f57", "gather": "#2a9187", "reduce": "#d99432"}


class WithLoss(torch.nn.Module):
    """Makes one argument of the two that the model takes."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(MODEL, 128)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.model(tokens[:, :-1], tokens[:, 1:])
        return loss


def figures(disabled: frozenset[str]) -> dict[str, Any]:
    """The report of a step without these passes."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    tokens = torch.randint(0, MODEL.vocab_size, (ROWS, 129))
    options = {"costs": COSTS, "disabled_passes": disabled, "progress": False}
    return compile_fsdp.explain(WithLoss(), tokens, world_size=RANKS, options=options).to_dict()


def draw(path: str) -> None:
    matplotlib.use("agg")
    matplotlib.rcParams.update({"font.size": 9})
    import matplotlib.pyplot as plt

    names = frozenset(each.__name__ for each in PASSES)
    reports = {"as traced": figures(names), "after the passes": figures(frozenset())}
    end = 1e3 * max(sum(report["figures"]["graph_s"]) for report in reports.values())
    most = max(report["figures"]["peak_bytes"] for report in reports.values()) / 2**20
    figure, axes = plt.subplots(4, 1, figsize=(10, 5.2), sharex=True, height_ratios=[3, 2, 3, 2])
    for (title, report), lanes, memory in zip(reports.items(), axes[::2], axes[1::2], strict=True):
        events = [{**each["event"], **each} for each in report["timeline"]]
        for event in events:
            row = next((i for i, kinds in enumerate(LANES.values()) if event["kind"] in kinds), None)
            if row is not None:
                span = (1e3 * event["start_s"], 1e3 * event["seconds"])
                lanes.broken_barh([span], (-row - 0.4, 0.8), color=COLORS[event["kind"]], edgecolor="white", lw=0.2)
        lanes.set_yticks([-i for i in range(len(LANES))], list(LANES))
        found = report["figures"]
        lanes.set_title(
            f"{title}: {1e3 * sum(found['graph_s']):.1f} ms, of which {1e3 * found['exposed_s']:.1f} wait for "
            f"communication; {found['peak_bytes'] / 2**20:.0f} MiB of unsharded parameters at a time",
            loc="left",
        )
        memory.fill_between(
            [1e3 * event["at_s"] for event in events],
            [event["alive_bytes"] / 2**20 for event in events],
            step="post",
            color=COLORS["gather"],
            alpha=0.35,
        )
        memory.set_ylabel("MiB")
        memory.set_ylim(0, most * 1.08)
        backward = min(1e3 * event["at_s"] for event in events if event["graph"] == 1)
        for axis in (lanes, memory):
            axis.axvline(backward, color="#98a2b1", lw=0.8, ls="--")
            axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlim(0, end * 1.01)
    axes[-1].set_xlabel("ms; forward, then backward")
    figure.tight_layout()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    draw(sys.argv[1])
