"""Train a model by a random loop, eager, compiled or without sharding."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers.models.program_training import drop_gathered_ahead
from helpers.models.random_loops import Action, Loop
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type

WIDTH = 5  # of every activation; not a multiple of the number of ranks
ROWS = 4
LEARNING_RATE = 0.02


class Model(nn.Module):
    """Two blocks and a last layer."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.end = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))  # the forward does not read it
        self.is_checkpointed = kind == "checkpointed"  # whether the blocks' activations are recomputed
        self.has_head = kind == "head"  # whether the loss applies the last layer, and the forward does not

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x))
        return x if self.has_head else self.end(x)


def build(loop: Loop, fully_shard: Any) -> Model:
    """Build the loop's model with equal weights; unsharded if `fully_shard` is None."""
    torch.manual_seed(0)
    model = Model(loop.model).to(device_type(), loop.dtype)
    if fully_shard is not None:
        sizes = {"replicas": 2, "shards": 1} if loop.model == "hybrid" else {"shards": 2}
        mesh = shared_mesh(device_type(), tuple(sizes.values()), tuple(sizes))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=loop.model != "kept")
        fully_shard(model, mesh=mesh, reshard_after_forward=True if loop.model == "resharded" else None)
    return model


class InjectedError(RuntimeError):
    """Raised on purpose in a loss."""


class Seen(NamedTuple):
    """A value that a loop has observed, and its place in the loop."""

    where: str
    value: torch.Tensor | None


class Verdict(NamedTuple):
    """Outcome of a loop, and its reason."""

    outcome: str
    reason: str = ""


class Training:
    """A model in training by a loop."""

    def __init__(self, loop: Loop, fully_shard: Any, rank: int) -> None:
        self.loop = loop
        self.rank = rank  # selects the batches
        self.model = build(loop, fully_shard)
        self.is_sharded = fully_shard is not None
        named = dict(self.model.named_parameters())
        self.names = set(named)  # of the parameters
        self.optimizers = {
            "root": _sgd([named[name] for name in named if not name.startswith("blocks")]),
            "blocks": _sgd([named[name] for name in named if name.startswith("blocks")]),
        }
        self.pending: list[list[torch.Tensor]] = []  # losses of each forward that has had no backward yet
        self.terms: list[torch.Tensor] = []  # penalties to add to the next loss
        self.seen: list[Seen] = []  # losses, outputs, gradients and parameters so far
        self.batches = 0
        self.where = ""

    def run(self) -> None:
        for number, step in enumerate(self.loop.steps):
            try:
                for position, action in enumerate(step):
                    self.where = f"step {number}, {position}: {action}"
                    getattr(self, action.kind)(action)
            finally:
                torch.compiler.set_stance("default")
            self.where = f"step {number}"
            self._note_parameters()

    # Forwards

    def forward(self, action: Action) -> None:
        """Run the model, and compute the losses that `value` selects."""
        self._add(self._losses(self.model(self._batch()), action))

    def _losses(self, output: torch.Tensor, action: Action) -> list[torch.Tensor]:
        if action.value == "hooked":
            output.register_hook(lambda gradient: self._note(f"{action.target} in a hook", self._read(action.target)))
        if self.model.has_head or action.value == "chunks":
            weight = self._read("end.weight")
            loss = sum((rows @ weight.t()).square().mean() for rows in output.chunk(2))
        else:
            loss = output.square().mean()
        if action.value == "scaled":
            loss = loss * self._read("scale").exp().mean()
        return [loss, output.abs().mean()] if action.value == "two" else [loss]

    def _add(self, losses: list[torch.Tensor]) -> None:
        for term in self.terms:
            losses[-1] = losses[-1] + term
        self.terms = []
        for loss in losses:
            self._note("loss", loss)
        self.pending.append(losses)

    def part(self, action: Action) -> None:
        """Run a block alone."""
        self._add([self.model.get_submodule(action.target)(self._batch()).square().mean()])

    def evaluate(self, action: Action) -> None:
        """Run the model in eval mode, without gradients."""
        self.model.eval()
        self.no_grad(action)
        self.model.train()

    def no_grad(self, action: Action) -> None:
        with torch.no_grad():
            self._note("output", self.model(self._batch()))

    def failing(self, action: Action) -> None:
        """Raise in the forward or backward, as `value` says; reset the model."""
        try:
            output = self.model(self._batch())
            if action.value == "forward":
                raise InjectedError
            output.register_hook(_raise)
            output.square().mean().backward()
        except InjectedError:
            if self.is_sharded:
                self.model.reset_iter_state()
        self.pending, self.terms = [], []

    # Around the model

    def penalty(self, action: Action) -> None:
        """Add a parameter's square to the pending loss, or to the next loss if none is pending."""
        term = 0.01 * self._read(action.target).square().sum()
        if action.value == "detached":
            term = term.detach()
        if self.pending:
            self.pending[-1][-1] = self.pending[-1][-1] + term
        else:
            self.terms.append(term)

    def write(self, action: Action) -> None:
        """Change a parameter in place."""
        with torch.no_grad():
            self.model.get_parameter(action.target).mul_(1.125)

    def write_gradient(self, action: Action) -> None:
        """Set, change or drop a gradient, as `value` says."""
        parameter = self.model.get_parameter(action.target)
        if action.value == "set":
            parameter.grad = torch.full_like(parameter, 0.25).detach()
        elif action.value == "drop":
            parameter.grad = None
        elif parameter.grad is not None:
            parameter.grad.mul_(0.5)

    def zero_grad(self, action: Action) -> None:
        """Zero gradients; `value` is set_to_none."""
        if action.target:
            self.model.get_submodule(action.target).zero_grad(set_to_none=action.value)
        else:
            for optimizer in self.optimizers.values():
                optimizer.zero_grad(set_to_none=action.value)

    def requires_grad(self, action: Action) -> None:
        """Freeze or unfreeze a module."""
        self.model.get_submodule(action.target).requires_grad_(action.value)

    def load_state_dict(self, action: Action) -> None:
        """Load the model's own parameters, scaled down."""
        self.model.load_state_dict({name: value * 0.75 for name, value in self.model.state_dict().items()})

    def state_dict(self, action: Action) -> None:
        for name, value in self.model.state_dict().items():
            self._note(f"state {name}", value)

    def stance(self, action: Action) -> None:
        """Set torch.compile's stance until the end of the step."""
        torch.compiler.set_stance(action.value)

    # FSDP2's own calls

    def unshard(self, action: Action) -> None:
        """Gather a module's parameters; `value` is async_op."""
        self._fsdp_module(action.target).unshard(async_op=action.value)

    def reshard(self, action: Action) -> None:
        self._fsdp_module(action.target).reshard()

    def set(self, action: Action) -> None:
        """Call a setter with a bool."""
        name, value = action.value
        getattr(self._fsdp_module(action.target), name)(value)

    def _fsdp_module(self, name: str) -> FSDPModule:
        module = self.model.get_submodule(name)
        assert isinstance(module, FSDPModule)
        return module

    # Backwards

    def backward(self, action: Action) -> None:
        """Run the backwards of all pending losses, together or separately as `value` says."""
        pending, self.pending = self.pending, []
        losses = [loss for each in pending for loss in each]
        if action.value == "gradient":
            inputs = [self.model.get_parameter(action.target)]
            self._note("gradient", torch.autograd.grad(sum(losses), inputs)[0])
        elif action.value == "apart":
            for each in pending:
                for loss in each:
                    loss.backward(retain_graph=loss is not each[-1])
        elif action.value == "freed":
            for loss in losses:
                loss.backward()
        elif losses:
            total = sum(losses[1:], losses[0])
            if action.value == "again":
                total.backward(retain_graph=True)
            total.backward()

    def input_gradient(self, action: Action) -> None:
        """Compute only the gradient by the model's input."""
        batch = self._batch().requires_grad_()
        self._note("input gradient", torch.autograd.grad(self.model(batch).square().mean(), batch)[0])

    def step(self, action: Action) -> None:
        """Step the target's optimizer, or both."""
        self._average()
        self._note_gradients()
        if self.is_sharded:
            drop_gathered_ahead(self.model)  # eager FSDP2 leaves it after set_is_last_backward(False)
        for name, optimizer in self.optimizers.items():
            if action.target in ("", name):
                optimizer.step()

    # Values

    def _batch(self) -> torch.Tensor:
        self.batches += 1
        generator = torch.Generator("cpu").manual_seed(100 * self.batches + self.rank)
        return torch.randn(ROWS, WIDTH, generator=generator, dtype=self.loop.dtype, device="cpu").to(device_type())

    def _read(self, name: str) -> torch.Tensor:
        parameter = self.model.get_parameter(name)
        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def _average(self) -> None:
        """Average an unsharded model's gradients over the ranks; averaging them again changes nothing."""
        if not self.is_sharded:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    torch.distributed.all_reduce(parameter.grad, op=torch.distributed.ReduceOp.AVG)

    def _note_parameters(self) -> None:
        self._average()
        self._note_gradients()
        for name, parameter in self.model.named_parameters():
            self._note(name, parameter)

    def _note_gradients(self) -> None:
        for name, parameter in self.model.named_parameters():
            self._note(f"gradient of {name}", parameter.grad)

    def _note(self, what: str, value: torch.Tensor | None) -> None:
        if self.is_sharded and value is not None and what.split()[-1] in self.names:
            what += " sharded" if isinstance(value, DTensor) else " unsharded"
        self.seen.append(Seen(f"{self.where}: {what}", None if value is None else _local(value)))


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.5)


def _raise(gradient: torch.Tensor) -> None:
    raise InjectedError


def _local(value: torch.Tensor) -> torch.Tensor:
    value = value.detach()
    return (value.to_local() if isinstance(value, DTensor) else value).cpu().clone()
