"""Train a byte-level transformer on real text, with checkpoints, a loss curve and a summary.

torchrun --nproc-per-node 2 examples/train.py
torchrun --nproc-per-node 2 --max-restarts 10 examples/train.py --checkpoint runs/7 --save-every 50
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import statistics
import sys
import sysconfig
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import compile_fsdp
from compile_fsdp import state
from compile_fsdp.tools.bench.llama import ModelConfig, Transformer

WARMUP_STEPS = 10  # over which the learning rate rises to its full value
LARGEST_NORM = 1.0  # of the gradients of a step
KEPT_CHECKPOINTS = 2
LINES = 20  # most lines of progress


@dataclass(frozen=True)
class Preset:
    """A model with a batch and a learning rate that suit it.

    Attributes:
        seq_len: Tokens per sequence.
        batch_size: Sequences per rank and step.
    """

    model: ModelConfig
    seq_len: int
    batch_size: int
    learning_rate: float


PRESETS = {
    # 0.87 M parameters: a step takes a fraction of a second on two CPU cores.
    "tiny": Preset(ModelConfig(dim=128, layers=4, heads=4, hidden=352), 128, 8, 3e-3),
    # 10.8 M parameters: some seconds per step on a CPU, a few milliseconds on a GPU.
    "small": Preset(ModelConfig(dim=384, layers=6, heads=6, hidden=1024), 256, 16, 1e-3),
    # 85.3 M parameters: for GPUs.
    "base": Preset(ModelConfig(dim=768, layers=12, heads=12, hidden=2048), 1024, 16, 6e-4),
}


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--preset", choices=PRESETS, default="tiny", help="size of the model (default tiny)")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--inner-backend", default="inductor", help="compiles the graphs (default inductor)")
    parser.add_argument("--bfloat16", action="store_true", help="gather and compute in bfloat16")
    parser.add_argument("--data", type=Path, help="file or folder of text (default: Python's standard library)")
    parser.add_argument("--steps", type=int, default=100, help="steps in all, also of a resumed run (default 100)")
    parser.add_argument("--batch-size", type=int, help="sequences per rank (default: the preset's)")
    parser.add_argument("--seq-len", type=int, help="tokens per sequence (default: the preset's)")
    parser.add_argument("--lr", type=float, help="learning rate (default: the preset's)")
    parser.add_argument("--seed", type=int, default=0, help="of parameters and data (default 0)")
    parser.add_argument("--checkpoint", type=Path, help="folder to resume from and to save to")
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default 100)")
    parser.add_argument("--output", type=Path, default=Path("train-out"), help="folder of loss.png and summary.json")
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="seconds that a rank waits for the others")
    options = parser.parse_args()
    preset = PRESETS[options.preset]
    for name, default in (("batch_size", preset.batch_size), ("seq_len", preset.seq_len), ("lr", preset.learning_rate)):
        if getattr(options, name) is None:
            setattr(options, name, default)
    return options


def join_ranks(options: argparse.Namespace) -> torch.device:
    """Make the process group of torchrun's ranks; return this rank's device."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device)
    dist.init_process_group(timeout=timedelta(seconds=options.timeout_s))
    return device


def log(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def read_text(path: Path | None) -> Tensor:
    """Read files as one string of bytes, (size,) uint8; the order of the files is equal on all ranks."""
    if path is None:
        root = Path(sysconfig.get_path("stdlib"))
        # Some machines have installed packages and tests in this folder.
        others = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
        files = [file for file in root.rglob("*.py") if others.isdisjoint(file.relative_to(root).parts)]
    elif path.is_dir():
        files = [file for file in path.rglob("*") if file.is_file()]
    else:
        files = [path]
    text = bytearray().join(file.read_bytes() for file in sorted(files))
    return torch.frombuffer(text, dtype=torch.uint8)


def get_batch(text: Tensor, options: argparse.Namespace, step: int) -> tuple[Tensor, Tensor]:
    """Draw this rank's sequences of one step.

    The batch of all ranks depends only on the seed, the step and the number of sequences, so a resumed run needs no
    state of the data, and a different number of ranks may continue it.

    Returns:
        (batch_size, seq_len) int64 tokens, one per byte, and the byte after each token.
    """
    generator = torch.Generator().manual_seed(options.seed * 1_000_003 + step)
    shape = dist.get_world_size(), options.batch_size
    starts = torch.randint(len(text) - options.seq_len, shape, generator=generator)[dist.get_rank()]
    sequences = torch.stack([text[start : start + options.seq_len + 1] for start in starts.tolist()]).long()
    return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()


def build_model(options: argparse.Namespace, device: torch.device) -> Transformer:
    """Build the model with parameters that do not depend on the ranks, shard it and compile it."""
    torch.manual_seed(options.seed)
    model = Transformer(PRESETS[options.preset].model, options.seq_len).to(device)
    mesh = dist.init_device_mesh(device.type, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    shard_options: dict[str, Any] = {"mesh": mesh, **({"mp_policy": policy} if options.bfloat16 else {})}
    for block in model.layers:
        compile_fsdp.fully_shard(block, **shard_options)
    compile_fsdp.fully_shard(model, **shard_options)
    if not options.eager:
        backend_options = {"inner_backend": options.inner_backend, "agreement_timeout_s": options.timeout_s}
        model.compile(backend="compile_fsdp", fullgraph=True, options=backend_options)
    return model


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor) -> float:
    """Make one optimizer step; return the loss, averaged over the ranks."""
    loss: Tensor = model(tokens, targets)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def resume(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """Load the newest checkpoint, if there is one; return the losses of the steps before it."""
    latest = state.find_latest(folder)
    if latest is None:
        return []
    step = state.load(model, optimizer, latest)
    log(f"resumed from {latest} at step {step}")
    losses: list[float] = json.loads((latest / "losses.json").read_text())
    return losses


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, losses: list[float]) -> None:
    """Save a checkpoint and remove all but the newest ones."""
    newest = state.save(model, optimizer, folder, len(losses), files={"losses.json": json.dumps(losses)})
    if dist.get_rank() == 0:
        earlier = sorted(path for path in folder.glob("step-" + 8 * "[0-9]") if path.name < newest.name)
        for old in earlier[: 1 - KEPT_CHECKPOINTS]:
            shutil.rmtree(old)


def train(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Train and return the figures of the summary; losses are equal on every rank."""
    text = read_text(options.data)
    if len(text) <= options.seq_len:
        raise SystemExit(f"expected more than {options.seq_len} bytes of text, got {len(text)}; give another --data")
    model = build_model(options, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    mode = "eager" if options.eager else "compiled"
    log(f"{parameters / 1e6:.1f} M parameters, {len(text) / 1e6:.1f} MB of text, {device.type}, {mode}")

    losses = [] if options.checkpoint is None else resume(options.checkpoint, model, optimizer)
    first_step = len(losses)
    every = max(1, (options.steps - first_step) // LINES)
    cold_s: list[float] = []  # steps that compile, and the first step
    warm_s: list[float] = []
    for step in range(first_step, options.steps):
        for group in optimizer.param_groups:
            group["lr"] = options.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        graphs = len(compile_fsdp.reports())
        start = time.perf_counter()
        losses.append(train_step(model, optimizer, *(each.to(device) for each in get_batch(text, options, step))))
        seconds = time.perf_counter() - start  # the loss is on the host, so the device has finished
        is_cold = step == first_step or len(compile_fsdp.reports()) > graphs
        (cold_s if is_cold else warm_s).append(seconds)
        if not math.isfinite(losses[-1]):
            raise SystemExit(f"the loss is {losses[-1]} at step {step}; try a smaller --lr")
        if step == first_step or (step + 1) % every == 0 or step + 1 == options.steps:
            log(f"step {step + 1}/{options.steps}: loss {losses[-1]:.4f}, {seconds:.3f} s")
        if options.checkpoint is not None and ((step + 1) % options.save_every == 0 or step + 1 == options.steps):
            save(options.checkpoint, model, optimizer, losses)
    return {
        "mode": mode,
        "ranks": dist.get_world_size(),
        "device": device.type,
        "parameters": parameters,
        "first_step": first_step,
        "losses": losses,
        "tokens_per_step": options.batch_size * options.seq_len * dist.get_world_size(),
        "cold_step_s": cold_s,
        "warm_step_s": warm_s,
        "peak_memory_bytes": peak_memory_bytes(device),
    }


def peak_memory_bytes(device: torch.device) -> int:
    """Most bytes allocated on the accelerator; on a CPU, most resident bytes of the process."""
    if device.type != "cpu":
        return torch.accelerator.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB


def summarize(figures: dict[str, Any]) -> str:
    """The summary as a table with a row per line."""
    losses, first_step = figures["losses"], figures["first_step"]
    if len(losses) == first_step:
        return f"nothing to do: {first_step} steps were done already; ask for more with --steps"
    rows = [
        ("steps", f"{first_step} to {len(losses)}"),
        ("loss", f"{losses[first_step]:.4f} -> {losses[-1]:.4f} nats per byte"),
    ]
    graphs = compile_fsdp.reports()
    if graphs:
        kinds = Counter(graph.direction for graph in graphs)
        removed = sum(graph.copies_removed for graph in graphs), sum(graph.resizes_removed for graph in graphs)
        kept = Counter(str(reason) for graph in graphs for _, reason in graph.kept)
        rows += [
            ("graphs", f"{kinds['forward']} forward, {kinds['backward']} backward"),
            ("ops removed", f"{removed[0]} copies and {removed[1]} resizes of unsharded parameters"),
            ("copies kept", ", ".join(f"{count} ({reason})" for reason, count in kept.items()) or "0"),
            *(("to gain more", each) for each in {a.sentence: None for graph in graphs for a in graph.advice}),
        ]
    rows.append(("cold steps", f"{len(figures['cold_step_s'])}, {sum(figures['cold_step_s']):.1f} s in all"))
    if figures["warm_step_s"]:
        median = statistics.median(figures["warm_step_s"])
        rows.append(("warm step", f"{1e3 * median:.1f} ms, the median of {len(figures['warm_step_s'])}"))
        rows.append(("throughput", f"{figures['tokens_per_step'] / median:,.0f} tokens/s, {figures['ranks']} ranks"))
    rows.append(("peak memory", f"{figures['peak_memory_bytes'] / 2**20:,.0f} MiB of rank 0"))
    return "\n".join(f"{name:<12}  {text}" for name, text in rows)


def write_outputs(figures: dict[str, Any], folder: Path) -> None:
    """Write summary.json and the loss curve, loss.png."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "summary.json").write_text(json.dumps(figures, indent=1) + "\n")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(1, len(figures["losses"]) + 1), figures["losses"])
    if figures["first_step"] > 0:
        axes.axvline(figures["first_step"], color="gray", linestyle=":", label="resumed")
        axes.legend()
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.set_title(f"{figures['parameters'] / 1e6:.1f} M parameters, {figures['ranks']} ranks, {figures['mode']}")
    axes.grid(alpha=0.3)
    figure.savefig(folder / "loss.png", dpi=120)


def main() -> None:
    options = parse_options()
    device = join_ranks(options)
    try:
        figures = train(options, device)
        log(summarize(figures))
        if dist.get_rank() == 0:
            write_outputs(figures, options.output)
        log(f"wrote {options.output}/summary.json and {options.output}/loss.png")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
