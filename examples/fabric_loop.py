"""Lightning Fabric with ModelParallelStrategy: parallelize_fn shards the model, and is wrapped to compile it.

torchrun --nproc-per-node 2 examples/fabric_loop.py
"""

import argparse

import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import compile_fsdp
from compile_fsdp.integrations.fabric import compiled


def block() -> nn.Module:
    return nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))


parser = argparse.ArgumentParser()
parser.add_argument("--eager", action="store_true", help="torch's own FSDP2, not compiled")
args = parser.parse_args()


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for layer in model[1:-1]:
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(model, mesh=mesh["data_parallel"])


strategy = ModelParallelStrategy(shard if args.eager else compiled(shard), data_parallel_size=2, tensor_parallel_size=1)
fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
fabric.launch()
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(256, 32), block(), block(), nn.Linear(32, 256))
model = fabric.setup_module(model)
optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))

generator = torch.Generator().manual_seed(fabric.global_rank)  # each rank has its own batch
inputs, targets = torch.randint(256, (2, 128), generator=generator)
for step in range(6):
    loss = nn.functional.cross_entropy(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    fabric.print(f"step {step}: loss {loss.item():.7f}")

fabric.print(*compile_fsdp.reports(), sep="\n")
torch.distributed.destroy_process_group()
