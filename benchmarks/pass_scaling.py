"""Do the passes stay cheap, and linear, on large graphs?

Synthetic layers, each with two parameters that are gathered in one pack (all-gather, wait, split, resize, copy), a
matmul, a gradient of each, and one reduce-scatter for both, until the graph has 1k, 10k and 100k nodes. Sizes take
turns in each round; a graph is built anew for each measurement, outside of the timed part, since the passes change it.
CPU time is measured, garbage collection included, so that other processes do not count.

    python benchmarks/pass_scaling.py [--rounds 7]
"""

from __future__ import annotations

import argparse
import gc
import operator
import statistics
import time
from collections.abc import Callable

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from compile_fsdp.ops import copy_, resize_storage_bytes_
from compile_fsdp.passes import Costs, Pipeline, WindowReport, pipelines
from compile_fsdp.passes.report import Report, node_name

SIZES = (1_000, 10_000, 100_000)
NODES_PER_LAYER = 37  # two parameters, their shards, and 33 ops
LIMIT_US = 60.0  # microseconds per node, at the largest size
LIMIT_GROWTH = 1.2  # most growth of the time per node from the smallest to the largest size
RANKS = 2

aten = torch.ops.aten
c10d = torch.ops._c10d_functional


class Builder:
    """Builds layers quickly: fake tensors are made directly instead of by running every op."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()

    def fresh(self, node: fx.Node, *shape: int) -> fx.Node:
        node.meta["val"] = FakeTensor(self.mode, torch.empty(*shape, device="meta"), torch.device("cpu"))
        return node

    def view(self, node: fx.Node, base: fx.Node, *shape: int) -> fx.Node:
        with self.mode:
            node.meta["val"] = base.meta["val"].as_strided(shape, torch.empty(shape, device="meta").stride())
        return node

    def call(self, target: Callable[..., object], *args: object) -> fx.Node:
        return self.graph.call_function(target, args)

    def items(self, split: fx.Node, base: fx.Node, *shape: int) -> list[fx.Node]:
        return [self.view(self.call(operator.getitem, split, i), base, *shape) for i in range(2)]


def synthetic_graph(nodes: int) -> fx.Graph:
    """The graph of a stack of layers with about `nodes` nodes."""
    build = Builder()
    x = build.fresh(build.graph.placeholder("x"), 8, 8)
    layers = (nodes - 2) // NODES_PER_LAYER
    inputs = [
        (
            [build.fresh(build.graph.placeholder(f"p{i}_{j}"), 8, 8) for j in range(2)],
            [build.fresh(build.graph.placeholder(f"s{i}_{j}"), 32) for j in range(2)],
        )
        for i in range(layers)
    ]
    results: list[fx.Node] = []
    for weights, shards in inputs:
        packed = build.fresh(build.call(aten.cat.default, shards), 64)
        gathered = build.fresh(build.call(c10d.all_gather_into_tensor.default, packed, RANKS, "dp"), 128)
        waited = build.fresh(build.call(c10d.wait_tensor.default, gathered), 128)
        rows = build.view(build.call(aten.reshape.default, waited, [2, 64]), waited, 2, 64)
        split = build.call(aten.split_with_sizes.default, rows, [32, 32], 1)
        split.meta["val"] = [rows.meta["val"]] * 2
        gradients = []
        for weight, item in zip(weights, build.items(split, rows, 2, 32), strict=True):
            value = build.fresh(build.call(aten.clone.default, item), 2, 32)
            value = build.view(build.call(aten.reshape.default, value, [8, 8]), value, 8, 8)
            build.call(resize_storage_bytes_, weight, 256)
            build.call(copy_, weight, value)
            transposed = build.view(build.call(aten.t.default, weight), weight, 8, 8)
            gradients.append(build.fresh(build.call(aten.mm.default, x, x), 8, 8))
            x = build.fresh(build.call(aten.mm.default, x, transposed), 8, 8)
            x = build.fresh(build.call(aten.relu.default, x), 8, 8)
            build.call(resize_storage_bytes_, weight, 0)
        rows_of = [build.view(build.call(aten.reshape.default, g, [2, -1]), g, 2, 32) for g in gradients]
        packed = build.fresh(build.call(aten.cat.default, rows_of, 1), 2, 64)
        flat = build.view(build.call(aten.reshape.default, packed, [-1]), packed, 128)
        reduced = build.fresh(build.call(c10d.reduce_scatter_tensor.default, flat, "avg", RANKS, "dp"), 64)
        waited = build.fresh(build.call(c10d.wait_tensor.default, reduced), 64)
        split = build.call(aten.split_with_sizes.default, waited, [32, 32])
        split.meta["val"] = [waited.meta["val"]] * 2
        results += build.items(split, waited, 32)
    build.graph.output((x, *results))
    return fx.GraphModule(torch.nn.Module(), build.graph).graph


def measure(nodes: int) -> float:
    """Microseconds of CPU time per node that one run of the passes takes."""
    graph = synthetic_graph(nodes)
    reports: list[tuple[Report, ...]] = []
    # Costs under which every pass has work to do.
    costs = Costs(latency=1e-9, comm_bandwidth=1e9, memory_bandwidth=1e12, flops=1e12)
    passes = pipelines.post_grad(node_name, hoist=True, costs=costs)
    pipeline = Pipeline(passes, reports.append)
    gc.collect()
    start = time.process_time()
    pipeline(graph)
    seconds = time.process_time() - start
    (report,) = reports
    assert isinstance(report[0], WindowReport)
    assert report[0].windows_removed == 2 * ((nodes - 2) // NODES_PER_LAYER) and not report[0].kept
    return seconds * 1e6 / report[0].nodes_before


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7, help="measurements per size")
    rounds = parser.parse_args().rounds
    measure(SIZES[0])  # Warm up.
    per_node: dict[int, list[float]] = {size: [] for size in SIZES}
    for _ in range(rounds):
        for size in SIZES:
            per_node[size].append(measure(size))
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
