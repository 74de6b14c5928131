"""The benchmarks' transformer: sizes, causality, positions, and that Dynamo traces it as one graph."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from compile_fsdp.tools.bench.llama import ModelConfig, Rotary, Transformer

SMALL = ModelConfig(dim=32, layers=2, heads=2, hidden=48)
TIED = ModelConfig(dim=32, layers=2, heads=2, hidden=48, tie_embeddings=True)


def tokens(length: int = 12) -> Tensor:
    return torch.randint(256, (2, length), generator=torch.Generator().manual_seed(0))


def test_heads_that_do_not_divide_are_an_error() -> None:
    with pytest.raises(ValueError, match="dim=30, heads=4"):
        ModelConfig(dim=30, layers=1, heads=4, hidden=8)


@pytest.mark.parametrize("config", [SMALL, TIED])
def test_starts_near_the_uniform_loss(config: ModelConfig) -> None:
    torch.manual_seed(0)
    loss = Transformer(config, seq_len=12)(tokens(), tokens().flip(1))
    assert loss.item() == pytest.approx(math.log(256), rel=0.05)


def test_token_does_not_depend_on_later_tokens() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL, seq_len=12)
    seen: list[Tensor] = []
    model.norm.register_forward_hook(lambda module, args, output: seen.append(output))
    changed = tokens()
    changed[:, 6] += 1
    model(tokens(), tokens())
    model(changed % 256, tokens())
    before, after = seen
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(dim=-1).any()


def test_rotated_products_depend_only_on_the_distance() -> None:
    rotary = Rotary(head_dim=8, seq_len=16)
    query, key = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    q, k = rotary(query.expand(1, 1, 16, 8)), rotary(key.expand(1, 1, 16, 8))
    products = (q @ k.mT)[0, 0]
    for distance in range(16):
        diagonal = products.diagonal(-distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert not torch.isclose(products[1, 0], products[2, 0])


def test_rotary_tables_are_not_saved() -> None:
    assert not any("rotary" in name for name in Transformer(SMALL, seq_len=12).state_dict())


def test_every_parameter_gets_a_gradient_and_the_model_compiles_whole() -> None:
    torch.manual_seed(0)
    model = Transformer(SMALL, seq_len=12)
    loss = model(tokens(), tokens())
    loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(tokens(), tokens()), loss)
