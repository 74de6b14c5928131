"""LoRA: a transformers model with peft adapters, where the base model is frozen and sharded too.

torchrun --nproc-per-node 2 examples/lora.py
"""

import argparse

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

import compile_fsdp

parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true", help="torch's own FSDP2, not compiled")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    initializer_range=0.2,  # stands for pretrained weights
    use_cache=False,
)
model = get_peft_model(
    LlamaForCausalLM(config),
    LoraConfig(r=8, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"),
)
fully_shard = torch.distributed.fsdp.fully_shard if args.eager else compile_fsdp.fully_shard
for layer in model.get_base_model().model.layers:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
if not args.eager:
    model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-2)

tokens = torch.randint(256, (4, 32), generator=torch.Generator().manual_seed(rank))  # each rank has its own batch
for step in range(6):
    loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.7f}")

if rank == 0:
    print(*compile_fsdp.reports(), sep="\n")
dist.destroy_process_group()
