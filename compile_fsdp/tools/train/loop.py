"""Build the model, shard it, compile it, and train it."""

from __future__ import annotations

import math
import resource
import sys
import time

import torch
from rich.console import Console
from torch.distributed.fsdp import MixedPrecisionPolicy

from compile_fsdp import fully_shard
from compile_fsdp.tools.train.checkpoint import Checkpointer, RunState, differences
from compile_fsdp.tools.train.config import Mode, Precision, TrainError, TrainOptions
from compile_fsdp.tools.train.data import Batches, open_corpus
from compile_fsdp.tools.train.model import Transformer
from compile_fsdp.tools.train.progress import ProgressView, show_progress
from compile_fsdp.tools.train.report import CompileCounter, RunSummary, StepTimes
from compile_fsdp.tools.train.world import World

ADAMW_BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1


def build_model(options: TrainOptions, world: World) -> Transformer:
    """The sharded model, compiled if the options say so; its parameters do not depend on the ranks."""
    torch.manual_seed(options.seed)
    model = Transformer(options.model, options.seq_len).to(world.device)
    compute_dtype = torch.bfloat16 if options.precision is Precision.BFLOAT16 else None
    reduce_dtype = None if compute_dtype is None else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
    for block in model.layers:
        fully_shard(block, mesh=world.mesh, mp_policy=policy)
    fully_shard(model, mesh=world.mesh, mp_policy=policy)
    if options.mode is Mode.COMPILE:
        backend_options: dict[str, object] = {"agreement_timeout_s": options.timeout_s}
        if options.inner_backend is not None:
            backend_options["inner_backend"] = options.inner_backend
        model.compile(backend="compile_fsdp", fullgraph=True, options=backend_options)
    return model


def learning_rate(options: TrainOptions, step: int) -> float:
    """Linear warmup, then constant; the rate depends on the step alone, so that a run can be prolonged."""
    return options.learning_rate * min(1.0, (step + 1) / max(1, options.warmup_steps))


class Trainer:
    """One rank's training state, and the step that advances it."""

    def __init__(self, options: TrainOptions, world: World) -> None:
        corpus = open_corpus(options.data)
        self.options = options
        self.world = world
        self.corpus_name = f"{corpus.name}, {corpus.size_bytes / 1e6:.1f} MB"
        self.batches = Batches(
            corpus, options.seq_len, options.batch_size, options.seed, world.rank, world.size
        )
        self.stream = {
            "seed": options.seed,
            "seq_len": options.seq_len,
            "sequences per step": options.batch_size * world.size,
            "bytes of text": corpus.size_bytes,
        }
        self.model = build_model(options, world)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=options.learning_rate, betas=ADAMW_BETAS, weight_decay=WEIGHT_DECAY
        )
        self.losses: list[float] = []

    @property
    def steps_done(self) -> int:
        return len(self.losses)

    def step(self, view: ProgressView, first: bool) -> float:
        """One optimizer step; returns the loss, averaged over the ranks."""
        compiling = first and self.options.mode is Mode.COMPILE
        tokens, targets = self.batches.at(self.steps_done)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.options, self.steps_done)

        view.phase("compiling forward" if compiling else "training")
        loss: torch.Tensor = self.model(tokens.to(self.world.device), targets.to(self.world.device))
        view.phase("compiling backward" if compiling else "training")
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.options.grad_clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

        mean_loss = self.world.mean(loss)
        if not math.isfinite(mean_loss):
            raise TrainError(f"the loss is {mean_loss} at step {self.steps_done}; try a smaller --lr")
        self.losses.append(mean_loss)
        return mean_loss

    def resume(self, checkpointer: Checkpointer) -> str:
        """Continue from the newest checkpoint where there is one; returns what was done, in words."""
        source = checkpointer.find_latest()
        if source is None:
            return f"no checkpoint in {checkpointer.folder} yet: starting at step 0"
        run = checkpointer.load(source, self.options.model, self.model, self.optimizer)
        self.losses = list(run.losses)
        message = f"resumed from {source} at step {run.step}"
        if changed := differences(run.stream, self.stream):
            message += f"; from here on the batches are others than before, because {changed}"
        return message

    def save(self, checkpointer: Checkpointer) -> None:
        run = RunState(self.steps_done, self.options.model, self.stream, tuple(self.losses))
        checkpointer.save(run, self.model, self.optimizer)

    def describe(self) -> str:
        """One line that describes the run."""
        ranks = "1 rank" if self.world.size == 1 else f"{self.world.size} ranks"
        millions = self.options.model.parameter_count() / 1e6
        return (
            f"training {millions:.1f} M parameters on {self.corpus_name}: {ranks}, {self.world.device.type}, "
            f"{self.options.precision.value}, mode {self.options.mode.value}"
        )


def train(options: TrainOptions, world: World, console: Console) -> RunSummary:
    """Run the training that `options` describe and return its figures; losses are equal on every rank."""
    trainer = Trainer(options, world)
    console.print(trainer.describe())
    checkpointer = None if options.checkpoint is None else Checkpointer(options.checkpoint, world.rank)
    if checkpointer is not None:
        console.print(trainer.resume(checkpointer))

    first_step = trainer.steps_done
    counter = CompileCounter()
    times = StepTimes()
    tokens_per_step = options.batch_size * options.seq_len * world.size
    with show_progress(console, first_step, options.steps) as view:
        while trainer.steps_done < options.steps:
            start = time.perf_counter()
            loss = trainer.step(view, first=trainer.steps_done == first_step)
            world.synchronize()
            seconds = time.perf_counter() - start
            # The first step also pays for allocations and lazy initialisation, in any mode.
            is_cold = counter.has_compiled() or trainer.steps_done == first_step + 1
            times.add(seconds, is_cold)
            if is_cold and world.device.type != "cpu":
                torch.accelerator.reset_peak_memory_stats(world.device)
            view.step(trainer.steps_done, loss, tokens_per_step / seconds)
            if checkpointer is not None and (
                trainer.steps_done % options.save_every == 0 or trainer.steps_done == options.steps
            ):
                view.phase("saving")
                trainer.save(checkpointer)
    return RunSummary(
        mode=options.mode.value,
        world_size=world.size,
        device=world.device.type,
        parameters=options.model.parameter_count(),
        first_step=first_step,
        losses=tuple(trainer.losses),
        tokens_per_step=tokens_per_step,
        cold_step_s=tuple(times.cold_s),
        warm_step_s=tuple(times.warm_s),
        compiled=counter.result(),
        peak_memory_bytes=world.largest(peak_memory_bytes(world)),
    )


def peak_memory_bytes(world: World) -> int:
    """On an accelerator, peak bytes allocated in warm steps; on a CPU, peak resident bytes of the process."""
    if world.device.type != "cpu":
        return torch.accelerator.max_memory_allocated(world.device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts in KiB
