"""Build the model of a random program, and train it."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

from compile_fsdp.torch_compat.fsdp import fsdp_state, param_groups
from helpers.models.random_programs import FEATURES, Part, Program, walk
from helpers.models.tensor_subclasses import Int8RowsWeight, use
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type


class PartModule(nn.Module):
    """The module of a part; `parts` are the children's modules."""

    # Whether a "buffer" is written; a checkpoint would write it twice and recompute with the second value.
    mutates = True

    def __init__(self, part: Part, earlier: list[PartModule], features: int = FEATURES) -> None:
        super().__init__()
        self.part = part
        self.parts = nn.ModuleList(PartModule(child, earlier, features) for child in part.children)
        match part.kind:
            case "linear":
                self.linear = nn.Linear(features, features)
            case "mlp":
                hidden = part.number * features // FEATURES
                self.up, self.down = nn.Linear(features, hidden), nn.Linear(hidden, features, bias=False)
            case "int8":
                self.linear = nn.Linear(features, features)
                use([self], Int8RowsWeight)
            case "dtensor":
                self.mesh = shared_mesh(device_type(), (dist.get_world_size(),), ("rows",))
            case "norm":
                self.norm = nn.LayerNorm(features)
            case "scale":
                self.scale = nn.Parameter(torch.ones(features))
                self.unused = nn.Parameter(torch.ones(features + 1, 2))
            case "buffer":
                self.register_buffer("mean", torch.zeros(features))
            case "again" if earlier:
                self.parts.append(earlier[part.number % len(earlier)])
        for name, parameter in self.named_parameters():
            if not name.startswith("parts."):
                parameter.requires_grad_(part.frozen == "" or (part.frozen == "vectors" and parameter.ndim > 1))
        if part.is_sharded:
            earlier.append(self)

    def forward(self, x: Any, flag: torch.Tensor) -> Any:
        output = x
        for _ in range(self.part.times):
            x = tensor_of(output)
            if self.part.is_checkpointed:
                output = checkpoint(self.body, x, flag, use_reentrant=False)
            else:
                output = self.body(x, flag)
        return output

    def body(self, x: torch.Tensor, flag: torch.Tensor) -> Any:
        match self.part.kind:
            case "linear" | "int8":
                return x + torch.tanh(self.linear(x))
            case "dtensor":
                return DTensor.from_local(x, self.mesh, [Shard(0)], run_check=False).sin()
            case "mlp":
                return x + self.down(nn.functional.gelu(self.up(x)))
            case "norm":
                return self.norm(x)
            case "scale":
                return x * self.scale
            case "buffer":
                if self.mutates:
                    self.mean.lerp_(x.detach().mean(0), 0.5)
                return x - self.mean
            case "sum":
                return sum((tensor_of(each(x, flag)) for each in self.parts), x) / (1 + len(self.parts))
            case "heads":
                first, last = (tensor_of(each(x, flag)) for each in (self.parts[0], self.parts[-1]))
                return {"x": first, "others": [last.sigmoid().mean()]}
            case "gate" if len(self.parts):
                chosen = self.parts[0] if flag.item() > 0 else self.parts[-1]
                return chosen(x, flag)
            case "again" if not len(self.parts):
                return x.cos()  # Up to torch 2.15 a nested checkpoint must not return its own input.
            case "break":
                torch._dynamo.graph_break()
        for each in self.parts:
            x = each(x, flag)
            x = x if isinstance(x, DTensor) else tensor_of(x)
        if self.part.kind == "dict":
            x = tensor_of(x)
        return {"x": x, "others": [x.sigmoid().mean()]} if self.part.kind == "dict" else x


def tensor_of(output: Any) -> torch.Tensor:
    """Convert an output to the next module's input."""
    tensor: Any = output["x"] + output["others"][0] if isinstance(output, dict) else output
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor  # type: ignore[no-any-return]


def build(program: Program, fully_shard: Any) -> nn.Module:
    """Build and shard the program's model with equal weights at every call."""
    torch.manual_seed(0)
    model = PartModule(program.root, [], program.features).to(program.dtype)
    for module in model.modules():
        if isinstance(module, PartModule):
            module.mutates = not any(part.is_checkpointed for part in walk(program.root))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if program.in_bfloat16 else MixedPrecisionPolicy()
    _shard(model, fully_shard, policy, set())
    fully_shard(model, mp_policy=policy, reshard_after_forward=_reshard(program.root))
    if program.prefetches:
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        for module, following in itertools.pairwise(sharded):
            module.set_modules_to_forward_prefetch([following])
    return model


def _shard(module: PartModule, fully_shard: Any, policy: MixedPrecisionPolicy, done: set[nn.Module]) -> None:
    for each in module.parts:
        assert isinstance(each, PartModule)
        if each not in done:
            done.add(each)
            _shard(each, fully_shard, policy, done)
            if each.part.is_sharded:
                fully_shard(each, mp_policy=policy, reshard_after_forward=_reshard(each.part))


def _reshard(part: Part) -> bool | None:
    return None if part.keeps is None else not part.keeps


class Training:
    """A program's model in training."""

    def __init__(self, program: Program, fully_shard: Any) -> None:
        self.program = program
        self.model = build(program, fully_shard)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=0.01) if parameters else None
        self.losses: list[torch.Tensor] = []

    def step(self, number: int, rank: int) -> None:
        """Run a step's forwards and backwards; keep the gradients."""
        torch.manual_seed(100 * number + rank)
        self.losses = []
        batches = [torch.randn(self.program.rows, self.program.features, dtype=self.program.dtype) for _ in range(2)]
        flag = torch.ones(()) if self.program.flags[number] else -torch.ones(())
        match self.program.steps[number]:
            case "plain":
                self._backward(self._loss(batches[0], flag))
            case "sum":
                self._backward(self._loss(batches[0], flag) + self._loss(batches[1], flag))
            case "apart":
                first, second = (self._loss(batch, flag) for batch in batches)
                self._backward(first)
                self._backward(second)
            case "no_grad":
                with torch.no_grad():
                    self._loss(batches[1], flag)
                self._backward(self._loss(batches[0], flag))
            case "half":
                output = self.model(batches[0], flag)
                self._backward(self._loss_of(output["x"] if isinstance(output, dict) else output))
            case "inputs":
                batch = batches[1].requires_grad_()
                loss = self._loss(batch, flag)
                if loss.requires_grad:
                    self.losses.append(torch.autograd.grad(loss, batch)[0].square().mean())
                self._backward(self._loss(batches[0], flag))
            case "kept":
                loss = self._loss(batches[0], flag)
                if loss.requires_grad:
                    loss.backward(retain_graph=True)
                self._backward(loss * 2)
            case "part":
                with torch.no_grad():
                    self._loss(batches[1], flag)  # finds the root
                assert isinstance(self.model, PartModule)
                self._backward(self._loss_of(self.model.parts[0](batches[0], flag)))
                reshard(self.model)  # no backward of the root reshards it, and updates of its parameters would be lost
            case "stages":
                with torch.no_grad():
                    self._loss(batches[1], flag)  # finds the root
                self._backward_by_stages(batches[0], flag)
                reshard(self.model)
            case "eval":
                self.model.eval()
                with torch.no_grad():
                    self._loss(batches[1], flag)
                self.model.train()
            case "accumulate":
                assert isinstance(self.model, FSDPModule)
                self.model.set_requires_gradient_sync(False)
                self._backward(self._loss(batches[1], flag))
                self.model.set_requires_gradient_sync(True)
                self._backward(self._loss(batches[0], flag))

    def _backward_by_stages(self, batch: torch.Tensor, flag: torch.Tensor) -> None:
        """Run a backward per part from its output's gradient, as a pipeline does."""
        assert isinstance(self.model, PartModule)
        handed_on, x = [], batch
        for part in self.model.parts:
            taken = x.detach().requires_grad_()
            x = tensor_of(part(taken, flag))
            handed_on.append((taken, x))
        self._backward(self._loss_of(taken := x.detach().requires_grad_()))
        for earlier, output in reversed(handed_on):
            if output.requires_grad and taken.grad is not None:
                torch.autograd.backward(output, taken.grad)
            taken = earlier

    def _loss(self, batch: torch.Tensor, flag: torch.Tensor) -> torch.Tensor:
        return self._loss_of(self.model(batch, flag))

    def _loss_of(self, result: Any) -> torch.Tensor:
        output = tensor_of(result).to(self.program.dtype)
        # Without a target, the mean of squares after a norm is constant, and gradients are only rounding errors.
        target = torch.linspace(-1, 1, self.program.features, dtype=self.program.dtype)
        loss = (output - target).square().mean()
        self.losses.append(loss.detach())
        return loss

    @staticmethod
    def _backward(loss: torch.Tensor) -> None:
        if loss.requires_grad:
            loss.backward()

    def update(self) -> None:
        if all(parameter.grad is None for parameter in self.model.parameters()):
            # Without a backward, parts that `keeps` marks stay unsharded, and FSDP2 later drops updates of that copy.
            reshard(self.model)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if not parameter.requires_grad:
                    parameter.mul_(1.125)  # like user code: makes earlier gathered values stale
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()


def reshard(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def drop_gathered_ahead(model: nn.Module) -> None:
    """Reshard parameters that eager FSDP2 has prefetched for modules that did not run.

    The next forward of such a module would compute with values from before an update; compiled steps do not.
    """
    for module in model.modules():
        if (state := fsdp_state(module)) is not None:
            for group in param_groups(state):
                if group._all_gather_result is not None:
                    group.wait_for_unshard()
                    group.reshard()
