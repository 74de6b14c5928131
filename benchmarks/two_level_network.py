"""Would measured costs pay on a network of hosts that is slower than the built-in costs expect? By the estimate.

A step is decided by the built-in costs of a GPU, or by the costs of the network, and timed by the costs of the network.
Each host has 8 ranks and one link. Nothing is computed.

    python benchmarks/two_level_network.py [--layers 8] [--ranks 64 512] [--link 240 100 50 25 12.5]
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.tools.bench.llama import ModelConfig, Transformer
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.report import Report
from compile_fsdp.tools.explain.timeline import place
from compile_fsdp.tools.plan.trace import Network, Settings, trace_step

TOKENS = 8192
TIGHT = 0.8  # budget by the bytes that a step without one takes


def trace(layers: int, settings: Settings, network: Network) -> Report:
    """Trace a step of a decoder with layers like those of Llama 3 8B, decided by the costs of `network`."""
    config = ModelConfig(dim=4096, layers=layers, heads=32, hidden=14_336, vocab_size=32_000)

    def build() -> tuple[nn.Module, Mapping[str, Any]]:
        tokens = torch.zeros(1, TOKENS, dtype=torch.int64)
        return Transformer(config, TOKENS), {"tokens": tokens, "targets": tokens}

    return trace_step(build, settings, network)


def seconds(report: Report, ranks: int, costs: Costs) -> float:
    """Return the seconds of a step whose collectives take what `costs` say."""
    graphs: list[list[Any]] = [[] for _ in report.graphs]
    for placed in report.timeline:
        event = placed.event
        if event.kind in (Kind.GATHER, Kind.REDUCE):
            event = replace(event, seconds=costs.collective(event.size_bytes // ranks, ranks))
        graphs[placed.graph].append(event)
    return sum(replace(report, timeline=tuple(place(graphs, ()))).graph_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--link", type=float, nargs="+", default=[240, 100, 50, 25, 12.5], help="GB/s of a host")
    args = parser.parse_args()
    print("| ranks | GB/s of a host | budget, GiB | built-in, s | network's, s | ratio | GiB, built-in | network's |")
    print("| ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    built_in = COSTS["cuda"]
    for ranks in args.ranks:
        one_host = Network(built_in, ranks_per_host=ranks)
        plain = trace(args.layers, Settings(ranks), one_host)
        for budget in (None, int(TIGHT * plain.allocated_bytes)):
            settings = Settings(ranks, memory_budget=budget)
            expected = plain if budget is None else trace(args.layers, settings, one_host)
            for link in args.link:
                network = Network(built_in, host_bandwidth=link * 1e9)
                costs = network.shard_costs(ranks)
                known = trace(args.layers, settings, network)
                times = [seconds(report, ranks, costs) for report in (expected, known)]
                memory = [report.allocated_bytes / 2**30 for report in (expected, known)]
                limit = "-" if budget is None else f"{budget / 2**30:.1f}"
                row = [ranks, f"{link:g}", limit, *(f"{each:.3f}" for each in times), f"{times[1] / times[0]:.2f}"]
                print("| " + " | ".join(map(str, [*row, *(f"{each:.1f}" for each in memory)])) + " |", flush=True)


if __name__ == "__main__":
    main()
