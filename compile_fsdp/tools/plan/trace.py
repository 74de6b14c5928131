"""Trace one step of a model under given settings and on a given network, on fake tensors in a fake world."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp.errors import EstimateError, MemoryBudgetError, PlanError
from compile_fsdp.passes import Costs
from compile_fsdp.passes.text import format_bytes
from compile_fsdp.tools.explain.capture import Capture, capture
from compile_fsdp.tools.explain.events import Kind
from compile_fsdp.tools.explain.report import Report, make_report
from compile_fsdp.tools.launch import fake_world
from compile_fsdp.tools.plan.models import Build, Checkpoint, checkpoint_layers
from compile_fsdp.torch_compat.dispatch import FakeTensorMode, tree_map_only
from compile_fsdp.torch_compat.inductor import without_code
from compile_fsdp.wrap import Policy, apply, plan

# Fake tensors of an accelerator need torch's build for it.
DEVICE = torch.device("cpu")

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Settings:
    """Settings of a step that a plan compares. Dtypes are keys of `DTYPES`."""

    ranks: int  # of the job
    replicas: int = 1  # HSDP: each replica is sharded over `ranks / replicas` consecutive ranks
    checkpoint: Checkpoint = Checkpoint.NONE  # tensors that a checkpointed layer saves
    param_dtype: str = "bfloat16"  # of gathered parameters and activations
    reduce_dtype: str = "float32"  # in which gradients are reduced
    memory_budget: int | None = None  # the backend's option `memory_budget`, in bytes; None for no budget

    @property
    def shards(self) -> int:
        return self.ranks // self.replicas

    def __str__(self) -> str:
        parts = [f"{self.ranks} ranks"]
        if self.replicas > 1:
            parts.append(f"{self.replicas} replicas")
        if self.checkpoint is not Checkpoint.NONE:
            parts.append(f"checkpoint {self.checkpoint.value}")
        parts.append(self.param_dtype)
        if self.reduce_dtype != "float32":
            parts.append(f"reduced in {self.reduce_dtype}")
        if self.memory_budget is not None:
            parts.append(f"budget {format_bytes(self.memory_budget)}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class Network:
    """The connections between ranks of a host, and between hosts. Consecutive ranks share a host."""

    within: Costs  # of a device, and of collectives within a host
    ranks_per_host: int = 8
    host_bandwidth: float = 240e9  # bytes per second into a host; as many leave it at the same time

    def shard_costs(self, shards: int) -> Costs:
        """Return the costs of all-gathers and reduce-scatters over the first `shards` ranks."""
        # Ranks of a host pass on the bytes that enter the host, so one collective has the whole link.
        return self._costs(self._hosts(shards), self.host_bandwidth)

    def replica_costs(self, shards: int, replicas: int) -> Costs:
        """Return the costs of all-reduces over `replicas` ranks that are `shards` ranks apart."""
        # Each rank of a host all-reduces a different shard, and all of them share the link.
        bandwidth = self.host_bandwidth / min(shards, self.ranks_per_host)
        return self._costs(min(self._hosts(shards * replicas), replicas), bandwidth)

    def _hosts(self, ranks: int) -> int:
        return math.ceil(ranks / self.ranks_per_host)

    def _costs(self, hosts: int, bandwidth: float) -> Costs:
        if hosts == 1:
            return self.within
        latency = self.within.latency * (1 + math.log2(hosts))  # a tree of hosts
        return replace(self.within, latency=latency, comm_bandwidth=min(self.within.comm_bandwidth, bandwidth))


def trace_step(build: Build, settings: Settings, network: Network, policy: Policy | None = None) -> Report:
    """Compile one forward and backward up to the passes, and report on the graphs as `explain` does.

    Nothing is computed or allocated. The process needs no other process group.

    Args:
        build: Called with "meta" as the default device.
        policy: Selects the parameter groups; by default, each repeated layer is a group.
    Raises:
        MemoryBudgetError: the step does not fit into its memory budget.
        EstimateError: the model has parameters that are not plain tensors, or its step cannot be traced.
        PlanError: the model cannot be sharded.
    """
    torch.compiler.reset()
    with fake_world(settings.ranks), capture() as captured, without_code():
        try:
            with torch.device("meta"):
                model, batch = build()
            _check(model)
            checkpoint_layers(model, settings.checkpoint)
            precision = MixedPrecisionPolicy(DTYPES[settings.param_dtype], DTYPES[settings.reduce_dtype])
            planned = plan(model, policy, mesh=_make_mesh(settings), fix_shared=True, mp_policy=precision)
            with FakeTensorMode(allow_non_fake_inputs=True):
                apply(planned).to_empty(device=DEVICE)
                fake = tree_map_only(Tensor, partial(torch.empty_like, device=DEVICE), dict(batch))
                _run(model, fake, settings, network)
        except (EstimateError, MemoryBudgetError, PlanError):
            raise
        except Exception as error:  # the code of a model may raise anything on fake tensors
            message = str(error).partition("\n")[0]
            raise EstimateError(
                f"expected a model that is built on the meta device and compiles whole, got {type(error).__name__}: "
                f"{message}; try compile-fsdp check with a script that trains the model"
            ) from error
    _price_all_reduces(captured, network.replica_costs(settings.shards, settings.replicas))
    return make_report(captured, type(model).__name__.removeprefix("FSDP"), settings.ranks)


def _check(model: nn.Module) -> None:
    for fqn, parameter in model.named_parameters():
        if (kind := type(parameter.data)) is not Tensor:
            raise EstimateError(
                f"expected plain parameters, got {fqn} as {kind.__name__}: compile-fsdp plan does not plan tensor "
                "parallelism or float8; pass the model without them"
            )


def _make_mesh(settings: Settings) -> DeviceMesh:
    if settings.replicas == 1:
        return init_device_mesh(DEVICE.type, (settings.ranks,))
    shape = (settings.replicas, settings.shards)
    return init_device_mesh(DEVICE.type, shape, mesh_dim_names=("replicate", "shard"))


def _run(model: nn.Module, batch: dict[str, Any], settings: Settings, network: Network) -> None:
    from compile_fsdp.backend.compile import compile_fsdp

    costs = network.shard_costs(settings.shards)
    options = {"costs": costs, "memory_budget": settings.memory_budget, "progress": False}
    model.compile(backend=partial(compile_fsdp, options=options), fullgraph=True)
    output = model(**batch)
    loss = getattr(output, "loss", output)
    del output
    if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
        raise EstimateError(
            f"expected a model that returns a loss, or an output with a loss, got {type(loss).__name__}; wrap the "
            "model in a module that computes the loss"
        )
    loss.backward()


def _price_all_reduces(captured: Capture, costs: Costs) -> None:
    """Price all-reduces over replicas, because the passes know only the costs of the shards' process group."""
    for graph in captured.graphs:
        graph.events = [
            replace(each, seconds=costs.all_reduce(each.size_bytes)) if each.kind is Kind.ALL_REDUCE else each
            for each in graph.events
        ]
