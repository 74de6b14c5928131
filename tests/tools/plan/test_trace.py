"""Traced steps against the reports of `explain`, known bytes of a small model, and measured memory."""

from __future__ import annotations

import gc
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

import compile_fsdp
from compile_fsdp.errors import EstimateError, MemoryBudgetError
from compile_fsdp.passes import COSTS
from compile_fsdp.tools.bench.measure import peak_bytes
from compile_fsdp.tools.explain import Report
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.plan.models import Checkpoint, checkpoint_layers
from compile_fsdp.tools.plan.report import read_figures
from compile_fsdp.tools.plan.trace import Network, Settings, trace_step
from compile_fsdp.wrap import auto_shard
from helpers.models.blockwise import compile_whole
from helpers.models.planned import BLOCK_BYTES, HEAD_BYTES, HIDDEN, ROWS, WIDTH, Model, build
from helpers.ranks.fake_world import fake_world
from helpers.ranks.meshes import shared_mesh

CPU = Network(COSTS["cpu"])
SINGLE = {"param_dtype": "float32"}


def trace(layers: int = 3, network: Network = CPU, **settings: Any) -> Report:
    return trace_step(partial(build, layers), Settings(**SINGLE | settings), network)


@pytest.mark.parametrize(
    "settings",
    [
        {"ranks": 4, "replicas": 2},
        pytest.param({"ranks": 4, "checkpoint": Checkpoint.FULL}, marks=pytest.mark.slow),
        pytest.param({"ranks": 4, "memory_budget": 3_000_000}, marks=pytest.mark.slow),
    ],
)
def test_plan_equals_report_of_compiled_step(settings: dict[str, Any]) -> None:
    """The report comes from real tensors and Inductor's code."""
    planned = Settings(**SINGLE | settings)
    found = trace_step(build, planned, CPU)
    with fake_world(4):
        model, batch = build()
        checkpoint_layers(model, planned.checkpoint)
        shape, names = ((2, 2), ("replicate", "shard")) if planned.replicas == 2 else ((4,), ("shard",))
        auto_shard(model, mesh=shared_mesh("cpu", shape, names))
        options = {"costs": COSTS["cpu"], "memory_budget": planned.memory_budget}
        expected = compile_fsdp.explain(model, batch["x"], options=options)
    assert len(found.graphs) == 2 and found.notes == ()
    assert found.budget_bytes == expected.budget_bytes
    for name in ("peak_bytes", "allocated_bytes", "shard_bytes", "graph_s", "communication_s", "exposed_s"):
        assert getattr(found, name) == pytest.approx(getattr(expected, name), rel=1e-12), name
    events = [[replace(each.event, seconds=0.0) for each in report.timeline] for report in (found, expected)]
    assert events[0] == events[1]
    decided = [
        [(each.kept, len(each.recomputed), each.peak_bytes, each.fastest_bytes) for each in report.decisions]
        for report in (found, expected)
    ]
    assert decided[0] == decided[1]


@pytest.mark.parametrize(
    ("checkpoint", "saved"),
    [
        (Checkpoint.NONE, WIDTH + HIDDEN),
        (Checkpoint.FULL, WIDTH),
        pytest.param(Checkpoint.SELECTIVE, WIDTH + HIDDEN, marks=pytest.mark.slow),
        (Checkpoint.MATMULS, WIDTH + HIDDEN),
    ],
)
def test_block_adds_saved_bytes(checkpoint: Checkpoint, saved: int) -> None:
    apart = Network(replace(COSTS["cpu"], latency=1e-6))  # blocks share no collectives
    smaller, larger = (trace(layers, apart, ranks=64, checkpoint=checkpoint).allocated_bytes for layers in (3, 4))
    assert larger - smaller == ROWS * saved * 4


def test_replicas_hold_larger_shards_and_reduce_over_slow_link() -> None:
    network = Network(COSTS["cpu"], ranks_per_host=4, host_bandwidth=1e8)
    sharded, replicated = trace(ranks=8, network=network), trace(ranks=8, replicas=2, network=network)
    total = 3 * BLOCK_BYTES + HEAD_BYTES
    assert (sharded.shard_bytes, replicated.shard_bytes) == (total // 8, total // 4)
    assert not any(each.event.kind is Kind.ALL_REDUCE for each in sharded.timeline)
    reduced = [each.event for each in replicated.timeline if each.event.kind is Kind.ALL_REDUCE]
    assert sum(each.size_bytes for each in reduced) == total // 4
    slow = network.replica_costs(4, 2)
    assert slow.comm_bandwidth == 1e8 / 4
    assert [each.seconds for each in reduced] == [slow.all_reduce(each.size_bytes) for each in reduced]
    gathers = [each.event.seconds for each in replicated.timeline if each.event.kind is Kind.GATHER]
    assert max(gathers) < min(each.event.seconds for each in sharded.timeline if each.event.kind is Kind.GATHER)


def test_low_precision_halves_unsharded_parameters() -> None:
    single, half = trace(ranks=4), trace(ranks=4, param_dtype="bfloat16")
    assert half.shard_bytes == single.shard_bytes
    unsharded = [sum(row.facts.unsharded_bytes for row in report.groups) for report in (half, single)]
    assert unsharded == [single.shard_bytes * 4 // 2, single.shard_bytes * 4]
    assert half.allocated_bytes < single.allocated_bytes


def test_memory_budget_decides_for_less_memory_and_more_time() -> None:
    (free,) = trace(ranks=4, memory_budget=2**30).decisions
    (fitted,) = trace(ranks=4, memory_budget=3_000_000).decisions
    assert fitted.peak_bytes <= 3_000_000 < free.peak_bytes
    assert fitted.recomputed and fitted.seconds > free.seconds == 0
    with pytest.raises(MemoryBudgetError, match="expected a memory_budget of at least"):
        trace(ranks=4, memory_budget=1000)


def test_optimizer_state_and_peak() -> None:
    found = read_figures(report := trace(ranks=4), "adamw")
    assert found.optimizer_bytes == 2 * found.shard_bytes
    assert found.peak_bytes == 3 * report.shard_bytes + report.allocated_bytes
    assert read_figures(report, "sgd").optimizer_bytes == 0


def test_frozen_parameters_have_no_optimizer_state() -> None:
    def frozen() -> Any:
        model, batch = build(3)
        model.get_submodule("blocks").requires_grad_(False)
        return model, batch

    report = trace_step(frozen, Settings(**SINGLE, ranks=4), CPU)
    assert report.shard_bytes == (3 * BLOCK_BYTES + HEAD_BYTES) // 4
    assert read_figures(report, "adamw").optimizer_bytes == 2 * HEAD_BYTES // 4


def test_hosts_share_one_link() -> None:
    network = Network(COSTS["cuda"], ranks_per_host=8, host_bandwidth=80e9)
    within = COSTS["cuda"]
    assert network.shard_costs(8) == network.replica_costs(4, 2) == within
    across = network.shard_costs(32)
    assert (across.comm_bandwidth, across.latency) == (80e9, 3 * within.latency)
    assert network.replica_costs(8, 4).comm_bandwidth == network.replica_costs(16, 2).comm_bandwidth == 10e9
    assert network.replica_costs(2, 8).comm_bandwidth == 40e9


@pytest.mark.parametrize("checkpoint", [Checkpoint.NONE, pytest.param(Checkpoint.FULL, marks=pytest.mark.slow)])
def test_measured_peak_of_compiled_training(checkpoint: Checkpoint) -> None:
    """Collectives that do nothing hold no memory, so no thread decides when memory is free."""
    settings = Settings(2, checkpoint=checkpoint, param_dtype="float32")
    planned = read_figures(trace_step(build, settings, CPU), "adamw").peak_bytes

    _, batch = build()  # the plan does not count the batch

    def train() -> None:
        model, _ = build()
        checkpoint_layers(model, checkpoint)
        compile_whole(auto_shard(model), costs=COSTS["cpu"])
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            model(**batch).backward()
            optimizer.step()
            optimizer.zero_grad()

    gc.collect()  # garbage of an earlier test would count as freed during the call
    with fake_world(2):
        measured = peak_bytes(train, torch.device("cpu"))
    assert planned == pytest.approx(measured, rel=0.1)


def test_model_without_loss_is_refused() -> None:
    def without_loss() -> tuple[nn.Module, dict[str, Any]]:
        model, batch = build()
        return nn.Sequential(*model.blocks), {"input": batch["x"]}

    with pytest.raises(EstimateError, match="expected a model that returns a loss, or an output with a loss, got"):
        trace_step(without_loss, Settings(4), CPU)


def test_graph_break_is_refused() -> None:
    class Breaking(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._dynamo.graph_break()
            return super().forward(x)

    with pytest.raises(EstimateError, match="built on the meta device and compiles whole, got Unsupported"):
        trace_step(lambda: (Breaking(), {"x": torch.zeros(ROWS, WIDTH)}), Settings(4), CPU)


def test_tensor_parallel_model_is_refused() -> None:
    def parallel() -> tuple[nn.Module, dict[str, Any]]:
        model, batch = build()
        mesh = shared_mesh("cpu", (4,), ("tp",))
        model.head.weight = nn.Parameter(DTensor.from_local(model.head.weight, mesh, [Replicate()], run_check=False))
        return model, batch

    with pytest.raises(EstimateError, match=r"got head.weight as DTensor: .* does not plan tensor parallelism"):
        trace_step(parallel, Settings(4), CPU)
