"""Modes of the benchmark: functions that shard and compile a model in different ways."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from compile_fsdp import api
from compile_fsdp.wrap import plan

Mode = Callable[[Any], nn.Module]

# Module of SimpleFSDP in torchtitan's main branch of 2026-08-21.
SIMPLE_FSDP = "torchtitan.experiments.graph_trainer.simple_fsdp"


def _blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks, each of which is a parameter group."""
    return [module for group in plan(model, fix_shared=True).groups[:-1] for module in group.modules]


def _shard(model: nn.Module, shard: Callable[[nn.Module], Any]) -> nn.Module:
    for module in (*_blocks(model), model):
        shard(module)
    return model


def _eager(model: nn.Module) -> nn.Module:
    return _shard(model, fully_shard)


def _block(model: nn.Module) -> nn.Module:
    for block in _blocks(model):
        block.compile()
    return _shard(model, fully_shard)


def _compile(model: nn.Module, **options: Any) -> nn.Module:
    _shard(model, api.fully_shard).compile(backend="compile_fsdp", fullgraph=True, options=options)
    return model


def _compile_kept(model: nn.Module) -> nn.Module:
    return _compile(model, memory_budget=2**50)  # more than any step needs


def _compile_bundle(model: nn.Module) -> nn.Module:
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR", tempfile.gettempdir())
    return _compile(model, bundle=str(Path(folder, "compile_fsdp.bundle")))


def _bytes(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def _bound(model: nn.Module) -> nn.Module:
    model.compile(fullgraph=True)
    return model


def _simple(model: nn.Module, **options: Any) -> nn.Module:
    simple_fsdp = importlib.import_module(SIMPLE_FSDP)
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    simple: nn.Module = simple_fsdp.data_parallel(model, mesh, mode="fully_shard")
    simple.compile(fullgraph=True, options=options)
    return simple


def _simple_bucket(model: nn.Module) -> nn.Module:
    return _simple(model, bucket_all_gathers_fx="all", bucket_reduce_scatters_fx="all")


def _simple_block(model: nn.Module) -> nn.Module:
    size_mb = _bytes(_blocks(model)[0]) / 2**20

    def determine(bucket: int) -> float:
        return size_mb

    return _simple(
        model,
        bucket_all_gathers_fx="all",
        bucket_all_gathers_fx_bucket_size_determinator=determine,
        bucket_reduce_scatters_fx="all",
        bucket_reduce_scatters_fx_bucket_size_determinator=determine,
    )


MODES: dict[str, Mode] = {
    "eager": _eager,
    "block": _block,
    "simple": _simple,
    "simple_bucket": _simple_bucket,
    "simple_block": _simple_block,
    "bound": _bound,
    "compile": _compile,
    "compile_kept": _compile_kept,
    "compile_bundle": _compile_bundle,
}
