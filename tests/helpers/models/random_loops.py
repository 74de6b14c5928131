"""Random training loops of fixed models, for eager FSDP2 and compiled training.

`helpers.models.random_programs` varies the model with a fixed loop. Here the models are fixed, and the loop reads,
writes, gathers, frees, evaluates, resets and accumulates at any place of a step.

[Note: Order of additions]
A parameter that both eager code and a graph use gets a gradient from each. The sum of two values does not depend on
their order, but the sum of three or more does: eager autograd adds all gradients of a backward one after the other,
while a compiled backward first adds the gradients of one forward graph. A backward without a reduction leaves one more
value to add. Loops with such sums run in float64 and may differ by `REORDERED` of the largest value; in float32 the
rounding of one step would grow in the next steps.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from helpers.models.random_programs import drop_gathered_ahead
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.pools import device_type

WIDTH = 5  # of every activation; not a multiple of the number of ranks
ROWS = 4
LEARNING_RATE = 0.02
REORDERED = 1e-9  # relative; see [Note: Order of additions]

MODELS = ("mlp", "head", "kept", "checkpointed", "resharded", "hybrid")
BLOCKS = ("blocks.0", "blocks.1")
PARAMETERS = ("scale", "end.weight", "end.bias", "blocks.0.0.weight", "blocks.1.0.bias")
SETTERS = (
    "set_requires_gradient_sync",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_is_last_backward",
    "set_requires_all_reduce",
)


class Action(NamedTuple):
    """One statement of a training loop; `Training` has a method for each kind.

    Attributes:
        kind: Name of the method.
        target: Name of a parameter or module; empty for the root, or for all of them.
        value: Argument of the method.
    """

    kind: str
    target: str = ""
    value: Any = None

    def __str__(self) -> str:
        arguments = [self.target] if self.target else []
        if isinstance(self.value, tuple):
            arguments += map(str, self.value)
        elif self.value is not None:
            arguments.append(str(self.value))
        return f"{self.kind}({', '.join(arguments)})"


class Loop(NamedTuple):
    """A model and the steps that train it.

    Attributes:
        model: One of MODELS.
        steps: The actions of each step.
        inner_backend: The backend's option.
        seed: Seed that the loop was drawn with; -1 for a loop written by hand.
        replay: Whether the compiled model replays its steps.
    """

    model: str
    steps: tuple[tuple[Action, ...], ...]
    inner_backend: str = "aot_eager"
    seed: int = -1
    replay: bool = False

    def __str__(self) -> str:
        options = f"{self.inner_backend}{', replay' if self.replay else ''}"
        lines = [f"loop {self.seed}, model {self.model}, {options}:"]
        return "\n".join([*lines, *(f"  step {i}: {', '.join(map(str, each))}" for i, each in enumerate(self.steps))])

    @property
    def adds_in_another_order(self) -> bool:
        """Whether a gradient may have three or more terms. See [Note: Order of additions]."""
        waiting, reduced = 0, 0  # number of terms of the next backward, and of gradients before it
        for action in (action for step in self.steps for action in step):
            match action.kind:
                case "set" if action.value[0] == "set_requires_gradient_sync":
                    return True
                case "zero_grad" if not action.target:
                    reduced = 0
                case "backward":
                    is_several = action.value in ("again", "apart", "freed")
                    if waiting + is_several > 2:
                        return True
                    waiting, reduced = 0, 1
                case "forward":
                    waiting += 3 if action.value == "chunks" else 1
                case "part":
                    waiting += 2  # eager FSDP2 reduces this gradient separately from the whole model's
                case "penalty" | "write_gradient":
                    waiting += 1
            if waiting + reduced > 2:
                return True
        return False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and batches."""
        return torch.float64 if self.tolerance else torch.float32

    @property
    def tolerance(self) -> float:
        """Largest relative difference between eager and compiled training."""
        return REORDERED if self.adds_in_another_order or self.inner_backend != "aot_eager" else 0.0

    @property
    def has_reference(self) -> bool:
        """Whether training without sharding computes equal values up to rounding."""
        actions = [action for step in self.steps for action in step]
        if self.model == "resharded" and any(action.value in ("scaled", "chunks") for action in actions):
            return False  # eager code multiplies by a DTensor, whose gradient covers only this rank's batch
        is_gathered = False
        for action in actions:
            if action.kind in ("backward", "input_gradient"):
                is_gathered = False
            elif action.kind == "step" and is_gathered:
                return False  # the next forward computes with parameters that FSDP2 gathered before the update
            elif action.kind in ("part", "evaluate", "no_grad"):
                is_gathered = True
        return all(action.kind in _COMMON and action.value != "gradient" for action in actions)


# Actions that an unsharded model can take on any rank's batch.
_COMMON = (
    *("forward", "part", "evaluate", "no_grad", "backward", "input_gradient"),
    *("penalty", "zero_grad", "step", "state_dict", "stance"),
)


class Model(nn.Module):
    """Two blocks and a last layer.

    Attributes:
        scale: A parameter of the root that the forward does not read.
        is_checkpointed: Whether the blocks' activations are recomputed.
        has_head: Whether the loss applies the last layer, and the forward does not.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2))
        self.end = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(3))
        self.is_checkpointed = kind == "checkpointed"
        self.has_head = kind == "head"

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
    """A model in training by a loop.

    Attributes:
        model: The model.
        optimizers: SGD for the root's own parameters, and SGD for the blocks' parameters.
        rank: Rank, which selects the batches.
        names: Names of the parameters.
        pending: Losses of each forward that has had no backward yet.
        terms: Penalties to add to the next loss.
        seen: Losses, outputs, gradients and parameters so far.
    """

    def __init__(self, loop: Loop, fully_shard: Any, rank: int) -> None:
        self.loop = loop
        self.rank = rank
        self.model = build(loop, fully_shard)
        self.is_sharded = fully_shard is not None
        named = dict(self.model.named_parameters())
        self.names = set(named)
        self.optimizers = {
            "root": _sgd([named[name] for name in named if not name.startswith("blocks")]),
            "blocks": _sgd([named[name] for name in named if name.startswith("blocks")]),
        }
        self.pending: list[list[torch.Tensor]] = []
        self.terms: list[torch.Tensor] = []
        self.seen: list[Seen] = []
        self.batches = 0
        self.where = ""

    def run(self) -> None:
        """Take the actions of all steps, in order."""
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
        """Run the model without gradients."""
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
        """Freeze or unfreeze a block."""
        self.model.get_submodule(action.target).requires_grad_(action.value)

    def load_state_dict(self, action: Action) -> None:
        """Load the model's own parameters, scaled down."""
        self.model.load_state_dict({name: value * 0.75 for name, value in self.model.state_dict().items()})

    def state_dict(self, action: Action) -> None:
        """Take the state dict."""
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
        """Free a module's unsharded parameters."""
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


# Drawing


def random_loop(seed: int, inner_backend: str = "aot_eager") -> Loop:
    """Draw the loop of a seed."""
    draw = random.Random(seed)
    model = draw.choice(MODELS)
    kinds = _PLAIN if draw.random() < 0.25 else _KINDS
    steps = tuple(_step(draw, model, kinds, is_first=number == 0) for number in range(draw.choice((2, 3, 3))))
    return Loop(model, steps, inner_backend, seed, replay=draw.random() < 0.5)


def _step(draw: random.Random, model: str, kinds: tuple[Draw, ...], is_first: bool) -> tuple[Action, ...]:
    actions = [] if is_first else _some(draw, (0, 0, 1), kinds)  # a forward of the model finds the root
    actions.append(_forward(draw))
    actions += _some(draw, (0, 1, 1, 2), kinds)
    if draw.random() < 0.25:
        actions.append(draw.choice((_forward, _part))(draw))
        actions += _some(draw, (0, 0, 1), kinds)
    backward = _backward(draw, any(action.value == "two" for action in actions))
    # The compiled backward refuses torch.autograd.grad by a sharded parameter. For a parameter that the forward reads
    # and leaves unsharded, the gradient silently lacks the compiled graph's part.
    can_ask = model in ("head", "resharded")
    actions.append(backward if can_ask or backward.value != "gradient" else Action("backward"))
    actions += _some(draw, (0, 0, 1), kinds)
    if draw.random() < 0.8:
        actions.append(Action("step", draw.choice(("", "", "", "root", "blocks"))))
        actions.append(Action("zero_grad", value=draw.random() < 0.7))
    return tuple(actions)


def _some(draw: random.Random, counts: tuple[int, ...], kinds: tuple[Draw, ...]) -> list[Action]:
    return [draw.choice(kinds)(draw) for _ in range(draw.choice(counts))]


def _forward(draw: random.Random) -> Action:
    value = draw.choice((None, None, None, "scaled", "scaled", "chunks", "two", "hooked"))
    return Action("forward", draw.choice(PARAMETERS) if value == "hooked" else "", value)


def _backward(draw: random.Random, has_two: bool) -> Action:
    value = draw.choice((None, None, None, None, "apart", "apart", "again", "freed", "gradient"))
    if (value == "gradient" and draw.random() < 0.7) or (value == "freed" and has_two):
        value = None  # the compiled backward or eager FSDP2 nearly always refuses these
    return Action("backward", "end.weight" if value == "gradient" else "", value)


def _part(draw: random.Random) -> Action:
    return Action("part", draw.choice(BLOCKS))


def _penalty(draw: random.Random) -> Action:
    return Action("penalty", draw.choice(PARAMETERS), draw.choice((None, None, "detached")))


def _write(draw: random.Random) -> Action:
    return Action("write", draw.choice(PARAMETERS))


def _write_gradient(draw: random.Random) -> Action:
    return Action("write_gradient", draw.choice(PARAMETERS), draw.choice(("set", "scale", "drop")))


def _zero_grad(draw: random.Random) -> Action:
    return Action("zero_grad", draw.choice(("", "end", *BLOCKS)), draw.random() < 0.5)


def _evaluation(draw: random.Random) -> Action:
    return Action(draw.choice(("evaluate", "no_grad", "input_gradient")))


def _failing(draw: random.Random) -> Action:
    return Action("failing", value=draw.choice(("forward", "backward")))


def _requires_grad(draw: random.Random) -> Action:
    return Action("requires_grad", draw.choice(BLOCKS), draw.random() < 0.4)


def _state(draw: random.Random) -> Action:
    return Action(draw.choice(("state_dict", "load_state_dict")))


def _stance(draw: random.Random) -> Action:
    return Action("stance", value="force_eager")


def _gather(draw: random.Random) -> Action:
    if draw.random() < 0.5:
        return Action("reshard", draw.choice(("", *BLOCKS)))
    return Action("unshard", draw.choice(("", *BLOCKS)), draw.random() < 0.3)


def _set(draw: random.Random) -> Action:
    return Action("set", draw.choice(("", "", *BLOCKS)), (draw.choice(SETTERS), draw.random() < 0.5))


Draw = Callable[[random.Random], Action]
# _PLAIN: actions that training without sharding can reproduce. _KINDS: all actions.
_PLAIN: tuple[Draw, ...] = (_penalty, _penalty, _zero_grad, _evaluation, _part, _stance)
_KINDS: tuple[Draw, ...] = (
    *(_penalty, _penalty, _penalty, _write, _write_gradient, _zero_grad, _evaluation, _part),
    *(_requires_grad, _state, _stance, _gather, _gather, _set, _set, _failing),
)


def shrunk(loop: Loop, fails: Callable[[Loop], bool]) -> Loop:
    """Remove steps, actions and options that a failure does not need."""
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in _smaller(loop):
            if fails(smaller):
                loop, is_smaller = smaller, True
                break
    return loop


def _smaller(loop: Loop) -> Iterator[Loop]:
    steps = loop.steps
    for i in reversed(range(len(steps))):
        if len(steps) > 1:
            yield loop._replace(steps=steps[:i] + steps[i + 1 :])
    for i, step in enumerate(steps):
        for j in reversed(range(len(step))):
            yield loop._replace(steps=(*steps[:i], step[:j] + step[j + 1 :], *steps[i + 1 :]))
            if step[j].kind in ("forward", "backward") and step[j].value is not None:
                plain = step[j]._replace(target="", value=None)
                yield loop._replace(steps=(*steps[:i], (*step[:j], plain, *step[j + 1 :]), *steps[i + 1 :]))
    if loop.replay:
        yield loop._replace(replay=False)
    if loop.model != "mlp":
        yield loop._replace(model="mlp")
