"""A small model whose steps go into bundles, and its training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
import torch._dynamo.utils
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from compile_fsdp.replay import bundle
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.replays import count_replays

FLOAT32 = MixedPrecisionPolicy()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("offset", torch.ones(width))
        self.scale = 2.0
        self.names = {3: "x"}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.project(x)).sin() * self.scale + self.offset

    def project(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * list(self.names)[0]  # type: ignore[no-any-return] # noqa: RUF015  (see Conditions._kind)


class DrawsAgain(Block):
    """Dropout in a checkpoint."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(self._draw, x, use_reentrant=False)

    def _draw(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(super().forward(x), 0.5).exp()


def saving(*ops: Any) -> Callable[[], Any]:
    """Return a function that makes the contexts of a checkpoint that saves the results of these ops."""

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(list(ops))

    return contexts


class SavesSome(Block):
    """A selective checkpoint."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.contexts = saving(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(super().forward, x, use_reentrant=False, context_fn=self.contexts)


class SavesUnknown(SavesSome):
    """Its function reads a dict, whose content nothing compares."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        saved = {"products": self.contexts}
        self.contexts = lambda: saved["products"]()


def build(
    path: Path | Literal[False] | None,
    block: Callable[[int], Block] = Block,
    blocks: int = 2,
    width: int = 4,
    policy: MixedPrecisionPolicy = FLOAT32,
    **options: Any,
) -> Any:
    """Build the model with equal weights at every call, sharded and compiled with the bundle's path."""
    torch.manual_seed(0)
    model = shard_blocks(nn.Sequential(*(block(width) for _ in range(blocks))), mp_policy=policy)
    return compile_whole(model, bundle=str(path) if path else path, **options)


def train(model: Any, batch: int = 3, microbatches: int = 1, evaluates: bool = False) -> list[torch.Tensor]:
    """Take three steps on equal batches; return the evaluations' outputs and the parameters in the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    results: list[torch.Tensor] = []
    for _ in range(3):
        optimizer.zero_grad()
        for i in range(microbatches):
            model.set_requires_gradient_sync(i == microbatches - 1)
            model(torch.randn(batch, 4)).square().mean().backward()
        optimizer.step()
        if evaluates:
            with torch.no_grad():
                results.append(model(torch.randn(batch, 4)))
    return [*results, *(parameter.full_tensor().detach() for parameter in model.parameters())]


def trains_as_without(path: Path | None, block: Callable[[int], Block]) -> bool:
    """Whether a model with a bundle, its own one if None, trains and evaluates as without; the bundle is written."""
    found, plain = (train(build(each, block), evaluates=True) for each in (path, False))
    dist.barrier()
    return all(map(torch.equal, found, plain))


def restart(
    folder: str,
    is_own: bool,
    block: Callable[[int], Block] = Block,
    policy: MixedPrecisionPolicy = FLOAT32,
    training: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[list[tuple[int, int]], list[int], bool]:
    """Train two models, the second one from the bundle of the first one, and a third one without a bundle.

    Returns the first two models' replayed forwards and backwards, the number of graphs that are traced by then, and
    whether all three train alike.
    """
    bundle.own_folder = lambda: Path(folder)
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    results, replays, graphs = [], [], []
    for _ in range(2):
        model = build(None if is_own else Path(folder, "step.bundle"), block, policy=policy)
        results.append(train(model, **training))
        replays.append(count_replays(model))
        graphs.append(counters["unique_graphs"] - before)
        dist.barrier()  # the bundle is written
    plain = train(build(False, block, policy=policy), **training)
    return replays, graphs, all(all(map(torch.equal, each, plain)) for each in results)
