"""torchtitan's Trainer on two CPU ranks: one scenario, eager and compiled.

torchtitan 0.3 needs a GPU and a later torch, so `use_cpu` replaces parts of it. torchtitan's Trainer, model,
`apply_fsdp_to_decoder`, activation checkpointing, losses, optimizer and checkpointer run unchanged.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock

import torch
import torch._inductor.compile_fx  # caches whether triton is installed
import torch.distributed as dist
import torch.utils._triton
from torch import nn
from torch.distributed.fsdp import FSDPModule

import compile_fsdp
from compile_fsdp.integrations.torchtitan import compiled as compiled_config
from helpers.parity.trainers import Comparison, Trained, compare_resumed, compare_trained, run_scenario, train_both
from helpers.parity.twins import AOT_EAGER


class Cpu:
    """The part of `torch.cuda` that torchtitan calls."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def device_count(self) -> int:
        return 2

    def current_device(self) -> int:
        return 0

    def get_device_name(self, device: torch.device) -> str:
        return "cpu"

    def get_device_properties(self, device: torch.device) -> Any:
        return types.SimpleNamespace(total_memory=2**30)

    def memory_stats(self, device: torch.device) -> dict[str, int]:
        return {}

    def reset_peak_memory_stats(self) -> None:
        pass

    def empty_cache(self) -> None:
        pass


def use_cpu() -> None:
    """Import torchtitan without triton and without a GPU."""
    assert not torch.utils._triton.has_triton_package()  # caches the answer
    sys.modules["triton"] = sys.modules["triton.language"] = MagicMock()  # for expert kernels, which no test runs
    from torchtitan.tools import utils

    utils.device_type, utils.device_module = "cpu", Cpu()
    import torchtitan.distributed.utils
    import torchtitan.models.llama3

    del sys.modules["triton"], sys.modules["triton.language"]
    # It calls torch.distributed.set_timeout, which torch 2.13 does not have.
    torchtitan.distributed.utils.set_pg_timeouts = lambda **_: None


def sum_with_gloo(parallelize_fn: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """Make FSDP2 reduce with plain sums, because gloo has no premultiplied sum."""

    def parallelize(model: nn.Module, **settings: Any) -> nn.Module:
        model = parallelize_fn(model, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)
        return model

    return parallelize


def data_loader() -> Any:
    """Config of a random-token loader that saves and loads its position."""
    from torchtitan.components.dataloader import BaseDataLoader

    class Tokens(BaseDataLoader):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseDataLoader.Config):
            pass

        def __init__(self, config: Any, *, dp_rank: int, seq_len: int, local_batch_size: int, **others: Any) -> None:
            self.shape, self.rank, self.position = (local_batch_size, seq_len + 1), dp_rank, 0

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                generator = torch.Generator().manual_seed(10 * self.position + self.rank)
                self.position += 1
                tokens = torch.randint(256, self.shape, generator=generator)
                yield {"input": tokens[:, :-1]}, tokens[:, 1:]

        def state_dict(self) -> dict[str, Any]:
            return {"position": self.position}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            self.position = state_dict["position"]

    return Tokens.Config()


def tokenizer() -> Any:
    from torchtitan.components.tokenizer import BaseTokenizer

    class NoTokenizer(BaseTokenizer):
        @dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **others: Any) -> None:
            super().__init__()

        def encode(self, *args: Any, **kwargs: Any) -> list[int]:
            raise NotImplementedError

        def decode(self, *args: Any, **kwargs: Any) -> str:
            raise NotImplementedError

        def get_vocab_size(self) -> int:
            raise NotImplementedError

    return NoTokenizer.Config()


def config(compiles: bool, *, options: dict[str, Any] = AOT_EAGER, folder: str = "run", **settings: Any) -> Any:
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    result = llama3_debugmodel()
    layers = result.model_spec.model.layers = result.model_spec.model.layers[:2]
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on CPUs
    result.model_spec.parallelize_fn = sum_with_gloo(result.model_spec.parallelize_fn)
    result.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" needs a later torch than 2.13
    result.training.disable_cuda_graphs = True
    result.training.local_batch_size, result.training.seq_len, result.training.steps = 2, 16, 3
    result.dataloader, result.tokenizer = data_loader(), tokenizer()
    result.validator.enable, result.checkpoint.enable = False, False
    result.activation_checkpoint = None
    result.debug.seed = 0
    result.dump_folder = folder
    result.loss = result.loss.loss_fn  # not chunked
    for name, value in settings.items():
        setattr(result, name, value)
    return compiled_config(result, options=options) if compiles else result


def run(config: Any) -> Trained:
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    trainer = config.build()
    losses: list[float] = []
    log = trainer.metrics_processor.log

    def keep(step: int, global_avg_loss: float, *others: Any, **more: Any) -> None:
        losses.append(global_avg_loss)
        log(step, global_avg_loss, *others, **more)

    trainer.metrics_processor.log = keep
    trainer.train()
    trainer.close()
    return Trained.of(losses, trainer.model_parts[0])


def train(**settings: Any) -> Comparison:
    return train_both(lambda compiles: run(config(compiles, **settings)))


def chunked() -> Comparison:
    from torchtitan.models.llama3.config_registry import llama3_debugmodel

    return train(loss=llama3_debugmodel().loss)


def checkpointed(name: str) -> Comparison:
    import torchtitan.distributed.activation_checkpoint as kinds

    return train(activation_checkpoint=getattr(kinds, name).Config())


def resume() -> Comparison:
    """Repeat the last two steps from torchtitan's eager and compiled checkpoints."""

    def start(compiles: bool, folder: str, load_step: int) -> Trained:
        settings = config(compiles, folder=folder)
        settings.training.steps = 4
        settings.checkpoint.enable, settings.checkpoint.interval = True, 2
        settings.checkpoint.load_step = load_step
        settings.checkpoint.last_save_model_only = False
        return run(settings)

    eager, compiled = (start(compiles, f"saved_{compiles}", -1) for compiles in (False, True))
    result = compare_trained(eager, compiled)
    expected = Trained(eager.losses[2:], eager.parameters)
    return compare_resumed(result, expected, lambda saved_by, compiles: start(compiles, f"saved_{saved_by}", 2))


SCENARIOS: dict[str, Callable[[], Comparison]] = {
    "verified": lambda: train(options={**AOT_EAGER, "verify": True}),
    "selective checkpointing": lambda: checkpointed("SelectiveAC"),
    "full checkpointing": lambda: checkpointed("FullAC"),
    "chunked loss": chunked,
    "resumed": resume,
}

if __name__ == "__main__":
    use_cpu()
    run_scenario(SCENARIOS, sys.argv[1])
