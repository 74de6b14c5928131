"""Hugging Face Trainer with FSDP2: a callback compiles the model that the Trainer has sharded.

torchrun --nproc-per-node 2 examples/hf_trainer.py
"""

import argparse
import tempfile

import torch
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import compile_fsdp
from compile_fsdp.integrations.transformers import CompileFSDP

parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true", help="torch's own FSDP2, not compiled")
args = parser.parse_args()

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
tokens = torch.randint(256, (8, 32))
with tempfile.TemporaryDirectory() as folder:
    trainer = Trainer(
        LlamaForCausalLM(config),
        TrainingArguments(
            folder,
            fsdp=True,  # FSDP2
            use_cpu=True,
            max_steps=6,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        callbacks=[] if args.eager else [CompileFSDP(options={"inner_backend": "aot_eager"})],
    )
    # On a CPU, accelerate would use DDP in place of FSDP. On a GPU, leave out these three lines and `use_cpu=True`.
    trainer.is_fsdp_enabled, state = True, trainer.accelerator.state
    state.fsdp_plugin = FullyShardedDataParallelPlugin(**trainer.args.fsdp_plugin_args)
    state.distributed_type = DistributedType.FSDP
    trainer.train()

if trainer.is_world_process_zero():
    for entry in trainer.state.log_history[:-1]:
        print(f"step {entry['step'] - 1}: loss {entry['loss']:.7f}")
    print(*compile_fsdp.reports(), sep="\n")
trainer.accelerator.end_training()
