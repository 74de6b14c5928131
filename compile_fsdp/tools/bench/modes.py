"""Modes of the benchmark: functions that shard and compile a model in different ways."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compile_fsdp import api
from compile_fsdp.wrap import plan

# Module of SimpleFSDP in torchtitan's main branch of 2026-08-21.
SIMPLE_FSDP = "torchtitan.experiments.graph_trainer.simple_fsdp"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, each of which is a parameter group."""
    return [module for group in plan(model, fix_shared=True).groups[:-1] for module in group.modules]


def _shard(model: nn.Module, shard: Callable[[nn.Module], Any]) -> nn.Module:
    for module in (*_blocks(model), model):
        shard(module)
    return model


def _block(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.compile()
    return _shard(model, fully_shard)


def _compile(model: nn.Module, **options: Any) -> nn.Module:
    _shard(model, api.fully_shard).compile(backend="compile_fsdp", fullgraph=True, options=options)
    return model


def _bound(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True)
    return model


def _simple(model: nn.Module, **options: Any) -> nn.Module:
    simple_fsdp = importlib.import_module(SIMPLE_FSDP)
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    simple: nn.Module = simple_fsdp.data_parallel(model, mesh, mode="fully_shard")
    simple.compile(fullgraph=True, options=options)
    return simple


_simple_bucket = partial(_simple, bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all")


def _simple_block(model: nn.Module) -> nn.Module:
    size_mb = sum(parameter.nbytes for parameter in _blocks(model)[0].parameters()) / 2**20

    def determine(bucket: int) -> float:
        return size_mb

    return _simple_bucket(
        model,
        bucket_all_gathers_fx_bucket_size_determinator=determine,
        bucket_reduce_scatters_fx_bucket_size_determinator=determine,
    )


MODES: dict[str, Callable[[Any], nn.Module]] = {
    "eager": partial(_shard, shard=fully_shard),
    "block": _block,
    "simple": _simple,
    "simple_bucket": _simple_bucket,
    "simple_block": _simple_block,
    "bound": _bound,
    "compile": _compile,
    "compile_kept": partial(_compile, memory_budget=2**50),  # more than any step needs
}
