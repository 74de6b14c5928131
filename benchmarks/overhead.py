"""What does a step cost beside compute and communication, per sharded module?

One process with the fake process group, whose collectives cost nothing, trains stacks of tiny layers. The time of a
step grows by so many microseconds with each sharded module: hooks in eager FSDP2; guards, the boundary and launches of
kernels in compiled graphs. `bound` is the same model compiled without sharding.

    python benchmarks/overhead.py [--modules 8 16 32] [--rounds 30]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import compile_fsdp
from compile_fsdp.tools import launch

WIDTH = 16


class _Stack(nn.Module):
    """A stack of linear layers; a class of its own, since Dynamo skips frames of torch's containers."""

    def __init__(self, modules: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(modules))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def _shard(model: _Stack, shard: Callable[[nn.Module], object]) -> _Stack:
    for module in (*model.layers, model):
        shard(module)
    return model


def _eager(modules: int) -> nn.Module:
    return _shard(_Stack(modules), fully_shard)


def _bound(modules: int) -> nn.Module:
    model = _Stack(modules)
    model.compile(fullgraph=True)
    return model


def _compile_fsdp(modules: int) -> nn.Module:
    model = _shard(_Stack(modules), compile_fsdp.fully_shard)
    model.compile(backend="compile_fsdp", fullgraph=True)
    return model


MODES = {"eager": _eager, "bound": _bound, "compile_fsdp": _compile_fsdp}


def time_step(model: nn.Module, batch: torch.Tensor) -> float:
    """Seconds of one forward and backward."""
    start = time.perf_counter()
    model(batch).sum().backward()
    seconds = time.perf_counter() - start
    for parameter in model.parameters():
        parameter.grad = None
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modules", nargs="+", type=int, default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch._dynamo.config.recompile_limit = 100
    with launch.fake_world(8):
        batch = torch.randn(2, WIDTH)
        models = {(mode, count): make(count) for mode, make in MODES.items() for count in options.modules}
        times: dict[tuple[str, int], list[float]] = {key: [] for key in models}
        for model in models.values():
            for _ in range(3):
                time_step(model, batch)
        for _ in range(options.rounds):
            for key, model in models.items():
                times[key].append(min(time_step(model, batch) for _ in range(3)))
    low, high = min(options.modules), max(options.modules)
    print("| mode | " + " | ".join(f"{count} modules, us" for count in options.modules) + " | us per module |")
    print("| --- |" + " ---: |" * (len(options.modules) + 1))
    for mode in MODES:
        us = {count: 1e6 * statistics.median(times[mode, count]) for count in options.modules}
        slope = (us[high] - us[low]) / max(high - low, 1)
        print(f"| `{mode}` | " + " | ".join(f"{us[count]:.0f}" for count in options.modules) + f" | {slope:.1f} |")


if __name__ == "__main__":
    main()
