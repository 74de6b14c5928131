"""Build models of transformers from configurations alone, without downloads and without data."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from compile_fsdp.errors import EstimateError
from compile_fsdp.tools.planning.checkpointing import Checkpointing
from compile_fsdp.tools.planning.float8 import convert_to_float8
from compile_fsdp.tools.planning.tensor_parallel import divide_config, install_collectives

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


def read_config(path: Path) -> dict[str, Any]:
    """The entries of a config.json.

    Raises:
        EstimateError: the file cannot be read, or is no configuration of a model.
    """
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise EstimateError(f"expected a config.json of transformers, got {path}: {error}; pass another") from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise EstimateError(f"expected a config.json with a model_type, got {path} without; add the model's type")
    return config


def build_model(
    config: dict[str, Any], checkpointing: Checkpointing | None = None, tp: int = 1, float8: bool = False
) -> nn.Module:
    """A causal language model with float32 parameters on the meta device, in training mode.

    [Note: Attention without a mask]
    On fake tensors, transformers builds attention masks even if there is no padding. Its `scaled_dot_product_attention`
    is therefore registered under a name for which transformers builds no mask.

    Args:
        config: Entries of the model's config.json.
        checkpointing: How the backward recomputes the activations of the layers; None for not at all.
        tp: Degree of tensor parallelism, of which the model is one rank's part; 1 for the whole model.
        float8: Whether linear layers, the head aside, are those of float8.
    Raises:
        EstimateError: transformers does not know the architecture, or cannot build it from this configuration.
    """
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register("sdpa_without_mask", _attend_without_mask)
    config = {key: value for key, value in config.items() if key not in ("attn_implementation", "_attn_implementation")}
    try:
        parsed = AutoConfig.for_model(**config)
        parsed.use_cache = False
        if tp > 1:
            divide_config(parsed, tp)
        with torch.device("meta"):
            from_config: Callable[..., Any] = AutoModelForCausalLM.from_config
            model: nn.Module = from_config(parsed, dtype=torch.float32, attn_implementation="sdpa_without_mask")
        model.train()
        if tp > 1:
            install_collectives(model, tp)
        if float8:
            is_compiled = checkpointing is not None and checkpointing.compiled
            convert_to_float8(model, model.get_output_embeddings(), fuses=is_compiled)  # type: ignore[operator]
        if checkpointing is not None:
            checkpointing.apply(model, token_batch(1, 8 * tp))
    except EstimateError:
        raise
    except Exception as error:  # a model's code may raise anything for a wrong configuration
        message = str(error).partition("\n")[0]
        raise EstimateError(
            f"expected the configuration of a causal language model that transformers knows, got model_type "
            f"{config['model_type']!r}: {message}; correct the configuration"
        ) from error
    return model


def token_batch(batch: int, seq_len: int) -> dict[str, Tensor]:
    """Arguments of a causal language model: (batch, seq_len) int64 tokens, which are also the labels."""
    tokens = torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
    positions = torch.empty(1, seq_len, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


def _attend_without_mask(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> Any:
    """Attend without `attention_mask`. See [Note: Attention without a mask]."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    return sdpa_attention_forward(module, query, key, value, None, **kwargs)
