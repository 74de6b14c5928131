"""A Hugging Face Trainer on two ranks: one scenario, eager and compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import compile_fsdp
from compile_fsdp.integrations.transformers import CompileFSDP
from helpers.parity.trainers import Comparison, Trained, compare_resumed, compare_trained, run_scenario, train_both
from helpers.parity.twins import AOT_EAGER


def llama(layers: int = 1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=layers,
        num_attention_heads=2,
        initializer_range=0.2,  # imitates pretrained weights
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))


def trainer(
    compiled: bool, *, build: Callable[[], Any] = llama, options: dict[str, Any] = AOT_EAGER, **arguments: Any
) -> Trainer:
    AcceleratorState._reset_state()
    torch._dynamo.reset()
    compile_fsdp.reset_reports()
    model = build()
    tokens = torch.randint(64, (32, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row} for row in tokens]
    settings: dict[str, Any] = {
        "output_dir": f"run_{compiled}",
        "fsdp": True,
        "use_cpu": True,
        "max_steps": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    result = Trainer(
        model,
        TrainingArguments(**settings | arguments),
        train_dataset=rows,
        eval_dataset=rows[:8],
        callbacks=[CompileFSDP(options=options)] if compiled else [],
    )
    # On a CPU, accelerate would use DDP.
    result.is_fsdp_enabled, state = True, result.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**result.args.fsdp_plugin_args)
    PartialState._shared_state["distributed_type"] = state.distributed_type = DistributedType.FSDP
    if result.args.bf16:
        state.fsdp_plugin.set_mixed_precision("bf16")
    return result


def finish(trainer: Trainer) -> Trained:
    losses = [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]
    return Trained.of(losses, trainer.model)


def train(**settings: Any) -> Comparison:
    def run(compiled: bool) -> Trained:
        running = trainer(compiled, **settings)
        running.train()
        return finish(running)

    return train_both(run)


def resume() -> Comparison:
    """Repeat the last two steps from eager and compiled checkpoints."""
    settings: dict[str, Any] = {
        "fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}, "max_steps": 4, "save_strategy": "steps",
        "save_steps": 2,
    }
    whole = {}
    for compiled in (False, True):
        running = trainer(compiled, **settings)
        running.train()
        whole[compiled] = finish(running)

    def start(saved_by: bool, resumed_by: bool) -> Trained:
        running = trainer(resumed_by, **settings)
        running.train(resume_from_checkpoint=str(Path(f"run_{saved_by}") / "checkpoint-2"))
        return finish(running)

    return compare_resumed(compare_trained(whole[False], whole[True]), whole[False], start)


SCENARIOS: dict[str, Callable[[], Comparison]] = {
    "plain": train,
    "verified": lambda: train(options={**AOT_EAGER, "verify": True}),
    "inductor": lambda: train(options={}),
    "accumulation": lambda: train(gradient_accumulation_steps=2),
    "activation checkpointing": lambda: train(fsdp_config={"activation_checkpointing": True}),
    "gradient checkpointing": lambda: train(gradient_checkpointing=True),
    "bf16": lambda: train(bf16=True),
    "lora": lambda: train(build=lora),
    "evaluation": lambda: train(
        eval_strategy="steps", eval_steps=2, max_steps=4, per_device_eval_batch_size=2  # two batches
    ),
    "resumed": resume,
}

if __name__ == "__main__":
    run_scenario(SCENARIOS, sys.argv[1])
