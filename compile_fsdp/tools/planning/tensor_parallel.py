"""One rank's part of a model under tensor and sequence parallelism, as torchtitan applies them to Llama.

[Note: What tensor parallelism divides]
Heads, the hidden width of the feed-forward, and the vocabulary are divided: by rows in the embedding, the projections
of queries, keys, values, gate and up, and in the head; by columns in the projections back to the residual stream. Norms
are whole. Between these, a rank has its part of every sequence: gathered before attention, feed-forward and head, and
reduced into parts after embedding, attention and feed-forward. Logits are those of a rank's part of the vocabulary,
from which the loss follows with reductions of a few numbers per token.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from compile_fsdp.errors import EstimateError

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
DIVIDED = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")

_c10d = torch.ops._c10d_functional


def divide_config(config: Any, degree: int) -> None:
    """Make a configuration of transformers that of one rank's part. See [Note: What tensor parallelism divides].

    Raises:
        EstimateError: the architecture is not one that is known here, or the degree does not divide its sizes.
    """
    if config.model_type not in ARCHITECTURES:
        raise EstimateError(
            f"expected one of {', '.join(ARCHITECTURES)} with tensor parallelism, got {config.model_type!r}; plan it "
            "without"
        )
    sizes = {name: getattr(config, name) for name in DIVIDED}
    if uneven := {name: size for name, size in sizes.items() if size % degree}:
        raise EstimateError(f"expected sizes that {degree} divides, got {uneven}; choose another --tp")
    config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, size in sizes.items():
        setattr(config, name, size // degree)


def install_collectives(model: Any, degree: int) -> None:
    """Gather and scatter sequences at the borders of the model's parts, by hooks. The collectives have no group."""
    model.loss_function = _loss_of_part

    def gather_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (Gather.apply(args[0], degree), *args[1:]), kwargs  # type: ignore[no-untyped-call]
        hidden = kwargs["hidden_states"]
        return args, {**kwargs, "hidden_states": Gather.apply(hidden, degree)}  # type: ignore[no-untyped-call]

    def scatter_output(module: nn.Module, args: Any, output: Any) -> Any:
        first, *others = output if isinstance(output, tuple) else (output,)
        scattered = Scatter.apply(first, degree)  # type: ignore[no-untyped-call]
        return (scattered, *others) if isinstance(output, tuple) else scattered

    base: Any = model.get_submodule("model")
    parts = [part for layer in base.layers for part in (layer.self_attn, layer.mlp)]
    for part in [*parts, model.get_submodule("lm_head")]:
        part.register_forward_pre_hook(gather_input, with_kwargs=True)
    for part in [*parts, base.embed_tokens]:
        part.register_forward_hook(scatter_output)


class Gather(torch.autograd.Function):
    """(B, S / degree, D) -> (B, S, D); the backward reduces and scatters."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:
        ctx.degree = degree
        return _gather(x, degree)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _scatter(gradient, ctx.degree), None


class Scatter(torch.autograd.Function):
    """(B, S, D) -> (B, S / degree, D), the sum over the ranks; the backward gathers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, degree: int) -> Tensor:
        ctx.degree = degree
        return _scatter(x, degree)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gather(gradient, ctx.degree), None


class LossOfPart(torch.autograd.Function):
    """The cross-entropy of a part of the vocabulary, with the temporary tensors of `loss_parallel` of torch.

    Args:
        logits: (T, V / degree) float32.
        targets: (T,) int64.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        shifted = logits - logits.amax(-1, keepdim=True)
        log_probabilities = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(log_probabilities, targets)
        return -log_probabilities.gather(-1, targets[:, None]).mean()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        log_probabilities, targets = ctx.saved_tensors
        at_targets = torch.zeros_like(log_probabilities).scatter_(-1, targets[:, None], -1.0)
        return (at_targets + log_probabilities.exp()) * gradient, None


def _loss_of_part(logits: Tensor, labels: Tensor, vocab_size: int, **kwargs: Any) -> Tensor:
    loss: Tensor = LossOfPart.apply(logits.flatten(0, 1).float(), labels.flatten())  # type: ignore[no-untyped-call]
    return loss


def _gather(x: Tensor, degree: int) -> Tensor:
    """Gather along dim 0, as collectives do, and put the parts together along dim 1."""
    gathered = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), degree, ""))
    return torch.cat(gathered.chunk(degree), dim=1)


def _scatter(x: Tensor, degree: int) -> Tensor:
    """Put the parts of dim 1 one after the other along dim 0, as collectives need them, and reduce."""
    parts = torch.cat(x.chunk(degree, dim=1))
    result: Tensor = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(parts, "sum", degree, ""))
    return result
