"""A Hugging Face accelerate loop: its FSDP2 plugin shards, compile_fsdp compiles.

torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import argparse

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from transformers import LlamaConfig, LlamaForCausalLM

import compile_fsdp
from compile_fsdp.integrations.accelerate import prepare

parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true", help="torch's own FSDP2, not compiled")
args = parser.parse_args()

plugin = FullyShardedDataParallelPlugin(
    fsdp_version=2, auto_wrap_policy="transformer_based_wrap", cpu_ram_efficient_loading=False
)
accelerator = Accelerator(fsdp_plugin=plugin, cpu=True)
# On a CPU, accelerate would use DDP in place of the plugin. On a GPU, leave out this line and `cpu=True`.
accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, use_cache=False
)
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
if args.eager:
    model, optimizer = accelerator.prepare(model, optimizer)
else:
    model, optimizer = prepare(accelerator, model, optimizer, options={"inner_backend": "aot_eager"})

generator = torch.Generator().manual_seed(accelerator.process_index)  # each rank has its own batch
tokens = torch.randint(256, (4, 32), generator=generator)
for step in range(6):
    loss = model(input_ids=tokens, labels=tokens).loss
    accelerator.backward(loss)
    accelerator.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.7f}")

accelerator.print(*compile_fsdp.reports(), sep="\n")
accelerator.end_training()
