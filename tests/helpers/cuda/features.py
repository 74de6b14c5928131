"""Features of FSDP2 on a Llama-like model in bfloat16, for compilation on rank 0 of 8."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.attention.flex_attention import flex_attention

import compile_fsdp
from compile_fsdp.passes import COSTS, Costs
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.hooks import prepare_model
from compile_fsdp.tools.bench.llama import Attention, ModelConfig, Transformer
from compile_fsdp.tools.plan.models import Checkpoint, checkpoint_layers
from compile_fsdp.torch_compat.dispatch import FakeTensorMode
from helpers.models.tensor_subclasses import Float8Weight, Int8RowsWeight, use
from helpers.parity.features import FEATURES as PARITY

# Costs with a latency at which no two groups of this small model share a collective.
_APART = replace(COSTS["cuda"], latency=4.64e-6)

RANKS, TOKENS = 8, 64
_CONFIG = ModelConfig(dim=256, layers=3, heads=4, hidden=512)


class _Experts(nn.Module):
    """A feed-forward whose three-dimensional weights have their own mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(4, _CONFIG.dim, 128))
        self.down = nn.Parameter(torch.empty(4, 128, _CONFIG.dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(4, -1, x.shape[-1])
        return torch.bmm(torch.relu(torch.bmm(rows, self.up)), self.down).view_as(x)


def _causal(score: torch.Tensor, batch: object, head: object, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    return torch.where(query >= key, score, float("-inf"))


class _FlexAttention(Attention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, dim = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended: Any = flex_attention(self.rotary(q), self.rotary(k), v, score_mod=_causal)
        out: torch.Tensor = self.out(attended.transpose(1, 2).reshape(batch, length, dim))
        return out


def _use_flex_attention(model: Any, _: Any) -> None:
    for layer in model.layers:
        layer.attention = _FlexAttention(_CONFIG, TOKENS)


def _parallelize(model: Any, tp: DeviceMesh | None) -> None:
    for layer in model.layers:
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(layer.feed_forward, tp, plan)


def _use_experts(model: Any, _: Any) -> None:
    for layer in model.layers:
        layer.feed_forward = _Experts()


def _freeze(model: Any, _: Any) -> None:
    for module in (model.embedding, *model.layers[:2]):
        module.requires_grad_(False)


@dataclass(frozen=True)
class Feature:
    """A model, its sharding, and options of the backend."""

    config: ModelConfig = _CONFIG
    mesh: dict[str, int] = field(default_factory=lambda: {"dp": RANKS})  # sizes by dim
    # Changes the model on the meta device. Gets the mesh's dim "tp", or None without such a dim.
    prepare: Callable[[Any, DeviceMesh | None], Any] = lambda model, tp: None
    arguments: Callable[[DeviceMesh], dict[str, Any]] = lambda mesh: {}  # arguments of `fully_shard`, by mesh
    device: str = "cuda"  # of the sharded parameters
    options: dict[str, Any] = field(default_factory=dict)


def run_steps(feature: Feature, count: int = 1) -> Any:
    """Run training steps, and return the model with the gradients of the last step."""
    mesh = init_device_mesh("cuda", tuple(feature.mesh.values()), mesh_dim_names=tuple(feature.mesh))
    data, tp = (mesh["dp"], mesh["tp"]) if "tp" in feature.mesh else (mesh, None)
    arguments = feature.arguments(mesh)
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    with torch.device("meta"):
        model: Any = Transformer(feature.config, TOKENS)
        feature.prepare(model, tp)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for module in (*model.layers, model):
            compile_fsdp.fully_shard(module, mesh=data, mp_policy=precision, **arguments)
        model.to_empty(device=feature.device)
        for layer in model.layers:
            layer.attention.rotary.to_empty(device="cuda")  # buffers are not offloaded
        options = {"bundle": False, "progress": False, "costs": _APART, **feature.options}
        model.compile(backend="compile_fsdp", fullgraph=True, options=options)
        # No mode is on while Dynamo traces, so the unsharded parameters would be real tensors.
        prepare_model(module_hooks_of(model).hooks)
        tokens = torch.zeros(4, TOKENS, dtype=torch.int64, device="cuda")
        for _ in range(count):
            model.zero_grad()
            model(tokens, tokens).backward()
    return model


# First torch release that has the feature.
SINCE = {"meshes by parameter": "2.12"}

FEATURES = {
    "mixed precision": Feature(),
    "hsdp": Feature(mesh={"replicate": 2, "shard": 4}),
    "tensor parallel": Feature(mesh={"dp": 4, "tp": 2}, prepare=_parallelize),
    "checkpoint": Feature(prepare=lambda model, _: checkpoint_layers(model, Checkpoint.FULL)),
    "selective checkpoint": Feature(prepare=lambda model, _: checkpoint_layers(model, Checkpoint.SELECTIVE)),
    "float8 gather": Feature(prepare=lambda model, _: use(list(model.layers), Float8Weight)),
    "subclass gather": Feature(prepare=lambda model, _: use(list(model.layers), Int8RowsWeight)),
    "offloading": Feature(
        options={"memory_budget": "3.7MiB", "costs": Costs(1e-6, 1e9, 6e9, 1e9, offload_bandwidth=4e10)}
    ),
    "large budget": Feature(options={"memory_budget": "1GiB"}),
    "small groups": Feature(options={"costs": None}),
    "uneven": Feature(config=ModelConfig(dim=252, layers=3, heads=3, hidden=509)),
    "dropout": Feature(config=replace(_CONFIG, dropout=0.1)),
    "dropout in checkpoints": Feature(
        config=replace(_CONFIG, dropout=0.1), prepare=lambda model, _: checkpoint_layers(model, Checkpoint.FULL)
    ),
    "frozen layers": Feature(prepare=_freeze),
    "meshes by parameter": Feature(prepare=_use_experts, arguments=PARITY["meshes by parameter"].arguments),
    "reshard to 2": Feature(arguments=lambda mesh: {"reshard_after_forward": 2}),
    "kept": Feature(arguments=lambda mesh: {"reshard_after_forward": False}),
    "cpu offload": Feature(arguments=lambda mesh: {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, device="cpu"),
    "flex attention": Feature(prepare=_use_flex_attention),
    "cuda graphs": Feature(options={"triton.cudagraphs": True}),
    "retained windows": Feature(options={"disabled_passes": {"remove_unshard_copies"}}),
}
