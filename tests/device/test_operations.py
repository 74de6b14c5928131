"""Operations on the emulated device, compared bit by bit with the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from helpers.ranks.tests import on_ranks

OPERATIONS: dict[str, Callable[..., object]] = {
    "add a number": lambda x, w: x + 1.5,
    "add an integer to bf16": lambda x, w: x.bfloat16() + 2,
    "attention": lambda x, w: _attention(x[None], w[None]),
    "backward of a convolution": lambda x, w: _grads(F.conv1d, x[None], w[:, :, None]),
    "backward of layer norm": lambda x, w: _grads(F.layer_norm, x, (8,), w[0], w[1]),
    "backward of layer norm in bf16": lambda x, w: _differs_little(F.layer_norm, x.bfloat16(), (8,)),
    "backward of softmax": lambda x, w: _grads(F.softmax, x @ w, -1),
    "backward of cross entropy": lambda x, w: _grads(F.cross_entropy, x, torch.arange(8, device=x.device)),
    "embedding": lambda x, w: _grads(lambda t: F.embedding(torch.tensor([3, 1, 3], device=x.device), t), w),
    "foreach": lambda x, w: torch._foreach_add([x, w], [w, x], alpha=2),
    "fused adam": lambda x, w: _adam(x, w, fused=True),
    "in place on a view": lambda x, w: x.clone()[1:].t().mul_(2),
    "index put": lambda x, w: x.index_put((torch.tensor([1, 2], device=x.device),), w[0]),
    "into an output that does not fit": lambda x, w: torch.add(x, w, out=torch.empty(0, device=x.device)),
    "matrix product in bf16": lambda x, w: x.bfloat16() @ w.bfloat16(),
    "nonzero": lambda x, w: (x > 0).nonzero(),
    "number": lambda x, w: torch.tensor(x.max().item()),
    "several outputs": lambda x, w: torch.topk(x, 3),
    "sort": lambda x, w: torch.sort(x, dim=0),
    "equal": lambda x, w: torch.tensor([torch.equal(x, w), torch.equal(x, x.clone())]),
    "strided": lambda x, w: x.t()[::2].sum(0) + w[:, 3],
    "view as another dtype": lambda x, w: x.view(torch.int32).view(-1)[:5],
    "where": lambda x, w: torch.where(x > 0, x, 0.0),
}


def _attention(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):  # the device has no fused kernel
        return F.scaled_dot_product_attention(x, w, x)


def _grads(function: Callable[..., torch.Tensor], *args: object) -> list[torch.Tensor]:
    leaves = [each.detach().requires_grad_(each.is_floating_point()) if isinstance(each, torch.Tensor) else each
              for each in args]
    function(*leaves).square().sum().backward()
    return [each.grad for each in leaves if isinstance(each, torch.Tensor) and each.grad is not None]


def _differs_little(function: Callable[..., torch.Tensor], *args: Any) -> torch.Tensor:
    """Whether each gradient is near its float64 value."""
    exact = [each.double() if isinstance(each, torch.Tensor) else each for each in args]
    pairs = zip(_grads(function, *args), _grads(function, *exact), strict=True)
    return torch.stack([(a.double() - b).abs().max() <= 0.05 * b.abs().max().clamp_min(1) for a, b in pairs])


def _adam(x: torch.Tensor, w: torch.Tensor, fused: bool) -> torch.Tensor:
    parameter = x.clone().requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=0.1, fused=fused)
    parameter.grad = w.clone()
    optimizer.step()
    return parameter.detach()


@pytest.mark.parametrize("name", OPERATIONS)
@on_ranks(1, "emulated")
def test_operation_equals_the_cpu_bit_by_bit(rank: int, name: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(8, 8, device="cpu") for _ in range(2)]
    results = []
    for device in ("cpu", "emulated"):
        with torch.device(device):
            out = OPERATIONS[name](*(each.to(device) for each in inputs))
        out = list(out) if isinstance(out, tuple | list) else [out]
        results.append([each.cpu() for each in out])
    assert results[0]
    for expected, found in zip(*results, strict=True):
        assert torch.equal(expected, found) and expected.stride() == found.stride()


@on_ranks(1, "emulated")
def test_random_operations_use_the_device_generator(rank: int) -> None:
    def draw() -> list[torch.Tensor]:
        x = torch.ones(1000)
        return [torch.rand(10), torch.randn(10), torch.randperm(10), F.dropout(x, 0.25), torch.bernoulli(x / 2)]

    torch.manual_seed(3)
    state = torch.emulated.get_rng_state()
    first, second = draw(), draw()
    torch.emulated.set_rng_state(state)
    again = draw()
    assert all(map(torch.equal, first, again))
    assert not any(map(torch.equal, first, second))
    assert 0.2 < (first[3] == 0).float().mean().item() < 0.3


@on_ranks(1, "emulated")
def test_wrong_shapes_raise_at_the_call(rank: int) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        torch.ones(2, 3) @ torch.ones(2, 3)
