"""Build the model and the batch to plan for, from a user's function, a config.json or a preset, and checkpoint it."""

from __future__ import annotations

import enum
import importlib
import json
import sys
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_fsdp.errors import EstimateError
from compile_fsdp.torch_compat.dispatch import OpOverload, attention_ops
from compile_fsdp.wrap import RepeatedBlocksPolicy

Batch = Mapping[str, Any]
Build = Callable[[], tuple[nn.Module, Batch]]
"""Returns a model, and the keyword arguments of one forward on one rank."""

# Shapes after Grattafiori et al., The Llama 3 Herd of Models (arXiv:2407.21783), table 3.
_LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": False,
}
PRESETS: dict[str, dict[str, Any]] = {
    "8B": _LLAMA
    | {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "intermediate_size": 14_336},
    "70B": _LLAMA
    | {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28_672},
    "405B": _LLAMA
    | {"hidden_size": 16_384, "num_hidden_layers": 126, "num_attention_heads": 128, "intermediate_size": 53_248},
}


def find_factory(text: str) -> Build:
    """Find a user's function by `FILE.py:NAME` or `MODULE:NAME`."""
    where, _, name = text.rpartition(":")
    try:
        if where.endswith(".py"):
            sys.path.insert(0, str(Path(where).resolve().parent))
            where = Path(where).stem
        build: Build = getattr(importlib.import_module(where), name)
    except (AttributeError, ImportError, ValueError) as error:
        raise EstimateError(
            f"expected FILE.py:NAME or MODULE:NAME of a function that returns a model and its batch, got {text!r}: "
            f"{error}"
        ) from error
    return build


def read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EstimateError(f"expected a config.json of transformers, got {path}: {error}; pass another") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise EstimateError(f"expected a config.json with a model_type, got {path} without; add the model's type")
    return config


def build_from_config(config: Mapping[str, Any], batch_size: int, seq_len: int) -> tuple[nn.Module, Batch]:
    """Build a causal language model of transformers and its batch, on the default device.

    [Note: Attention without a mask]
    Transformers builds an attention mask for a traced model even if there is no padding. Its
    `scaled_dot_product_attention` is therefore registered under a name for which transformers builds no mask.
    """
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError as error:
        raise EstimateError(
            f"expected {error.name} for --preset and --hf-config; install it with: pip install 'compile-fsdp[plan]'"
        ) from error
    AttentionInterface.register("sdpa_without_mask", _attend_without_mask)
    config = {key: value for key, value in config.items() if key not in ("attn_implementation", "_attn_implementation")}
    try:
        parsed = AutoConfig.for_model(**config)
        parsed.use_cache = False
        from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
        model: nn.Module = from_config(parsed, dtype=torch.float32, attn_implementation="sdpa_without_mask")
    except Exception as error:  # the code of a model may raise anything for a wrong configuration
        message = str(error).partition("\n")[0]
        raise EstimateError(
            f"expected the configuration of a causal language model that transformers knows, got model_type "
            f"{config['model_type']!r}: {message}; correct the configuration"
        ) from error
    tokens = torch.empty(batch_size, seq_len, dtype=torch.int64)
    positions = torch.empty(1, seq_len, dtype=torch.int64)
    return model.train(), {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def _attend_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """Attend without `attention_mask`. See [Note: Attention without a mask]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, None, **kwargs)


class Checkpoint(str, enum.Enum):
    """Tensors that the forward of a layer saves besides the layer's inputs."""

    NONE = "none"  # all that the backward needs; nothing is checkpointed
    FULL = "full"  # nothing
    SELECTIVE = "selective"  # results of attention and of matrix products 1, 3, 5, ..., as torchtitan's "op" mode saves
    MATMULS = "matmuls"  # results of attention and of all matrix products


def checkpoint_layers(model: nn.Module, how: Checkpoint) -> None:
    """Checkpoint the repeated layers of a model in place."""
    if how is Checkpoint.NONE:
        return
    layers = RepeatedBlocksPolicy().select(model, frozenset(), {})
    if not layers:
        raise EstimateError("expected a model with repeated layers to checkpoint, got none; use --checkpoint none")
    options: dict[str, Any] = {"use_reentrant": False}
    if how is not Checkpoint.FULL:
        options["context_fn"] = partial(_save_products, every=2 if how is Checkpoint.SELECTIVE else 1)
    for layer in layers:
        layer.forward = partial(checkpoint, layer.forward, **options)


def _save_products(every: int) -> Any:
    counts: Counter[bool] = Counter()  # products so far, by whether the layer runs again

    def choose(context: Any, op: OpOverload, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op is torch.ops.aten.mm.default
        is_saved = op in attention_ops or (is_product and counts[context.is_recompute] % every == 0)
        counts[context.is_recompute] += is_product
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(choose)
