"""Import and use of the project leave torch's global state unchanged."""

from __future__ import annotations

from helpers.ranks.fresh import run_fresh

PROGRAM = """
import sys
import torch
import torch._dynamo, torch._inductor.config, torch._functorch.config
import torch.distributed as dist
from torch._dynamo import compiled_autograd

CONFIGS = [torch._dynamo.config, torch._inductor.config, torch._functorch.config]

def settings():
    flags = [torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads()]
    return [config.save_config() for config in CONFIGS] + [compiled_autograd.compiled_autograd_enabled] + flags

def graph_of_unrelated_function():
    '''Forward and backward of a function with a hook, which compiled autograd's flag would trace otherwise.'''
    torch._dynamo.reset()
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm.print_readable(print_output=False))
        return gm

    @torch.compile(backend=backend, fullgraph=True)
    def f(x):
        y = x.sin()
        y.register_hook(lambda grad: grad * 2)
        return y.cos().sum()

    x = torch.ones(3, requires_grad=True)
    f(x).backward()
    return graphs, x.grad.tolist()

before = settings(), graph_of_unrelated_function()

import compile_fsdp
compile_fsdp.ops.ensure_ops()
assert "torch._inductor.lowering" not in sys.modules, "import loaded Inductor"
compile_fsdp.ops.ensure_lowerings()
assert settings() == before[0], "import changed a setting"
assert graph_of_unrelated_function() == before[1], "import changed a graph"

dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = torch.nn.Linear(4, 4)
compile_fsdp.fully_shard(model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
assert len(compile_fsdp.reports()) == 2, compile_fsdp.reports()
assert settings() == before[0], "use changed a setting"
assert graph_of_unrelated_function() == before[1], "use changed a graph"

class Breaks(torch.nn.Linear):
    def forward(self, x):
        torch._dynamo.graph_break()
        return super().forward(x)

broken = Breaks(4, 4)
compile_fsdp.fully_shard(broken, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
broken.compile(backend="compile_fsdp", fullgraph=True)
try:
    broken(torch.ones(2, 4))
except torch._dynamo.exc.Unsupported:
    pass
assert settings() == before[0], "a failed trace changed a setting"
assert graph_of_unrelated_function() == before[1], "a failed trace changed a graph"
dist.destroy_process_group()
print('"unchanged"')
"""


def test_import_use_and_failed_trace_leave_torch_settings_unchanged() -> None:
    assert run_fresh(PROGRAM)[0] == "unchanged"
