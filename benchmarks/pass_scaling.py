"""Does the removal pass stay cheap, and linear, on large graphs?

Synthetic layers, each one window around a gathered parameter (all-gather, wait, resize, copy, transpose,
matmul, activation, residual, resize), until the graph has 1k, 10k and 100k nodes. Sizes take turns in each
round; a graph is built anew for each measurement, outside of the timed part, since the pass takes its windows
out. CPU time is measured, garbage collection included, so that other processes do not count.

    python benchmarks/pass_scaling.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import PassReport, remove_unshard_copies

SIZES = (1_000, 10_000, 100_000)
NODES_PER_LAYER = 11  # a parameter, its shard, and nine ops
LIMIT_US = 20.0  # per node, at the largest size
LIMIT_GROWTH = 1.2  # of the time per node, from one size to any larger one

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Builder:
    """Builds layers quickly: fake tensors are made directly instead of by running every op."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def fresh(self, node: fx.Node) -> fx.Node:
        node.meta["val"] = FakeTensor(self.mode, torch.empty(8, 8, device="meta"), torch.device("cpu"))
        return node

    def view(self, node: fx.Node, base: fx.Node) -> fx.Node:
        node.meta["val"] = base.meta["val"]  # The same size and storage, which is what the pass looks at.
        return node

    def call(self, target: torch._ops.OpOverload, *args: object) -> fx.Node:
        return self.graph.call_function(target, args)


def synthetic_graph(nodes: int) -> fx.Graph:
    """A stack of layers with about this many nodes."""
    build = Builder()
    x = build.fresh(build.graph.placeholder("x"))
    layers = (nodes - 2) // NODES_PER_LAYER
    inputs = [
        (build.fresh(build.graph.placeholder(f"p{i}")), build.fresh(build.graph.placeholder(f"s{i}")))
        for i in range(layers)
    ]
    for weight, shard in inputs:
        gathered = build.fresh(build.call(c10d.all_gather_into_tensor.default, shard, 1, "dp"))
        value = build.fresh(build.call(c10d.wait_tensor.default, gathered))
        build.call(resize_storage_bytes_, weight, 256)
        build.call(copy_, weight, value)
        transposed = build.view(build.call(aten.t.default, weight), weight)
        hidden = build.fresh(build.call(aten.mm.default, x, transposed))
        active = build.fresh(build.call(aten.relu.default, hidden))
        x = build.fresh(build.call(aten.add.Tensor, active, x))
        build.call(resize_storage_bytes_, weight, 0)
    build.graph.output((x,))
    return build.graph


def measure(nodes: int) -> tuple[float, PassReport]:
    """Microseconds per node of one run."""
    graph = synthetic_graph(nodes)
    gc.collect()
    start = time.process_time()
    report = remove_unshard_copies(graph)
    seconds = time.process_time() - start
    assert report.windows_removed == (nodes - 2) // NODES_PER_LAYER and not report.kept
    return seconds * 1e6 / report.nodes_before, report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measurements per size")
    rounds = parser.parse_args().rounds
    measure(SIZES[0])  # Warm up.
    per_node: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            per_node[size].append(measure(size)[0])
    print(f"torch {torch.__version__}, {rounds} rounds; microseconds per node")
    print(f"{'nodes':>8} {'median':>8} {'min':>8} {'max':>8} {'growth':>8}")
    smallest = statistics.median(per_node[SIZES[0]])
    for size, values in per_node.items():
        median = statistics.median(values)
        print(f"{size:>8} {median:>8.2f} {min(values):>8.2f} {max(values):>8.2f} {median / smallest:>8.2f}")
    largest = statistics.median(per_node[SIZES[-1]])
    print(f"at {SIZES[-1]} nodes: {largest:.2f} us per node (limit {LIMIT_US}); ", end="")
    print(f"growth over linear {largest / smallest:.2f} (limit {LIMIT_GROWTH})")


if __name__ == "__main__":
    main()
