"""torchao float8 training: linear layers that multiply in float8 and are gathered in it, sharded and compiled.

torchrun --nproc-per-node 2 examples/float8.py
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import compile_fsdp


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true", help="torch's own FSDP2, not compiled")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, mesh = dist.get_rank(), dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
blocks = nn.Sequential(block(), block())
# emulate=True is for machines without float8 hardware.
convert_to_float8_training(blocks, config=Float8LinearConfig(emulate=True, enable_fsdp_float8_all_gather=True))
model = nn.Sequential(nn.Embedding(256, 32), blocks, nn.Linear(32, 256))

fully_shard = torch.distributed.fsdp.fully_shard if args.eager else compile_fsdp.fully_shard
for layer in blocks:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
if not args.eager:
    model.compile(backend="compile_fsdp", fullgraph=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

inputs, targets = torch.randint(256, (2, 128), generator=torch.Generator().manual_seed(rank))  # a batch for each rank
for step in range(6):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.7f}")

if rank == 0:
    print(*compile_fsdp.reports(), sep="\n")
dist.destroy_process_group()
