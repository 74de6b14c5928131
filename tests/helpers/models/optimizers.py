"""Optimizers, a model with every kind of parameter, and comparisons of optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from lion_pytorch import Lion
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import compile_fsdp
from compile_fsdp.state.containers import leaves

LEARNING_RATE = 0.05


class Hoarder(torch.optim.Optimizer):
    """Momentum with more state: bf16, int64, counters, strings, tuples, dicts with int keys."""

    def __init__(self, params: Iterable[Any], lr: float = LEARNING_RATE) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["half"] = torch.zeros_like(parameter, dtype=torch.bfloat16)
                    state["pair"] = (torch.zeros_like(parameter), torch.zeros(2, dtype=torch.int64))
                    state["by_dim"] = {0: torch.zeros_like(parameter), "note": "as it was", 1: [3, ()]}
                    state["count"], state["empty"] = 0, {}
                state["count"] += 1
                state["pair"][1].add_(1)
                state["half"].add_(parameter.grad)
                state["pair"][0].mul_(0.9).add_(parameter.grad)
                state["by_dim"][0].add_(parameter.grad.square())
                parameter.add_(state["pair"][0], alpha=-group["lr"])


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=LEARNING_RATE, momentum=0.9, dampening=0.5),
    "adamw_foreach": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE, foreach=True, amsgrad=True),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=LEARNING_RATE, fused=True),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=LEARNING_RATE),
    "lion": lambda params: Lion(params, lr=LEARNING_RATE / 10, weight_decay=0.01),
    "hoarder": Hoarder,
}


class Everything(nn.Module):
    """A model with every kind of parameter.

    Tied between embedding and output, frozen, unused, ignored by FSDP2, smaller than the number of ranks, and of sizes
    that no number of ranks divides.
    """

    def __init__(self, dim: int = 6) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, dim)
        self.layers = nn.ModuleList(nn.Linear(dim, dim) for _ in range(3))
        self.norm = nn.LayerNorm(dim)
        self.scale = nn.Parameter(torch.ones(1))
        self.plain = nn.Parameter(torch.full((dim,), 0.5))
        self.spare = nn.Parameter(torch.ones(dim))
        self.head = nn.Linear(dim, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.layers[2].requires_grad_(False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.embedding(tokens)
        for layer in self.layers:
            h = h + torch.tanh(layer(h)) * self.scale
        return nn.functional.cross_entropy(self.head(self.norm(h) * self.plain).flatten(0, 1), tokens.flatten())


def everything(mesh: DeviceMesh | None = None, blocks: Iterable[int] = (0, 1, 2)) -> Everything:
    """Build equal weights at every call; shard the layers `blocks` and the root over `mesh`."""
    torch.manual_seed(0)
    model = Everything()
    if mesh is not None:
        for index in blocks:
            compile_fsdp.fully_shard(model.layers[index], mesh=mesh)
        compile_fsdp.fully_shard(model, mesh=mesh, ignored_params={model.plain})
    return model


def groups_of(model: Everything) -> list[dict[str, Any]]:
    """Return reordered optimizer groups, including an empty group.

    The ignored parameter has a separate group, because fused and foreach optimizers do not mix DTensors with tensors.
    """
    others = [each for each in model.parameters() if each is not model.plain]
    matrices = [each for each in others if each.ndim > 1]
    vectors = [each for each in reversed(others) if each.ndim == 1]
    slow = {"lr": LEARNING_RATE / 2}
    return [{"params": vectors, **slow}, {"params": []}, {"params": [model.plain]}, {"params": matrices}]


def train(model: nn.Module, optim: torch.optim.Optimizer, steps: Iterable[int]) -> None:
    """Train on equal batches, so that a mean over a power of two of ranks is exact."""
    for step in steps:
        torch.manual_seed(1000 + step)
        model(torch.randint(0, 11, (4, 5))).backward()
        optim.step()
        optim.zero_grad()


def trained(steps: int = 0, mesh: DeviceMesh | None = None, name: str = "adamw_foreach") -> tuple[Any, Any]:
    """Build the model and one of the optimizers, and train."""
    model = everything(mesh)
    optim = OPTIMIZERS[name](groups_of(model))
    train(model, optim, range(steps))
    return model, optim


def whole(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same(got: Any, expected: Any, exact: bool = True) -> None:
    """Compare two optimizer states: order of parameters, containers, numbers, and tensors."""
    assert list(got["state"]) == list(expected["state"])
    assert got["param_groups"] == expected["param_groups"]
    for fqn, entries in expected["state"].items():
        lefts, rights = dict(leaves(got["state"][fqn])), dict(leaves(entries))
        assert lefts.keys() == rights.keys(), fqn
        for name, right in rights.items():
            where, left = f"{fqn}: {name}", lefts[name]
            if not isinstance(right, torch.Tensor):
                assert type(left) is type(right) and left == right, where
                continue
            rtol = 0.0 if exact else 1e-2 if right.dtype == torch.bfloat16 else 1e-5
            atol = 0.0 if exact else 1e-7
            left, right = whole(left), whole(right)
            torch.testing.assert_close(left, right, rtol=rtol, atol=atol, msg=lambda text, at=where: f"{at}: {text}")
