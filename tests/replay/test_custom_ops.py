"""After a restart, a custom op has the backward of its present code."""

from __future__ import annotations

from pathlib import Path

from helpers.ranks.fresh import run_fresh

_FILES = {
    "restarted_net": """
import torch
from restarted_ops import square


class Net(torch.nn.Linear):
    def forward(self, x):
        return square(super().forward(x))
""",
    "restarted_ops": """
import torch
import restarted_scale


@torch.library.custom_op("restarted::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x.square()


@square.register_fake
def _(x):
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return restarted_scale.scale(grad) * ctx.saved_tensors[0]


square.register_autograd(_backward, setup_context=_keep)
""",
    "restarted_scale": """
FACTOR = 2.0


def scale(grad):
    return grad * FACTOR
""",
}

_STEP = """
import json, sys
import torch

import compile_fsdp
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.ranks.fake_world import fake_world

(folder,) = json.loads(sys.argv[1])
sys.path.insert(0, folder)
from restarted_net import Net

with fake_world(1):
    torch.manual_seed(0)
    model = compile_fsdp.fully_shard(Net(4, 4))
    options = {"bundle": f"{folder}/step.bundle"} if CAN_REPLAY else {}
    model.compile(backend="compile_fsdp", fullgraph=True, options=options)
    model(torch.ones(2, 4)).sum().backward()
    print(json.dumps(model.bias.grad.full_tensor().tolist()))
"""


def test_edited_backward_of_a_custom_op_is_neither_replayed_nor_taken_from_a_cache(tmp_path: Path) -> None:
    grads = []
    for factor in ("2.0", "8.0"):
        for name, text in _FILES.items():
            (tmp_path / f"{name}.py").write_text(text.replace("2.0", factor))
        grads.append(run_fresh(_STEP, str(tmp_path), TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))[0])
    assert grads[1] == [4.0 * each for each in grads[0]]
    assert all(grads[0])
