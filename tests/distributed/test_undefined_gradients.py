"""Model outputs that the loss does not use leave gradients None, as in eager FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import compile_fsdp
from helpers.models.replays import compile_with_replay, count_replays
from helpers.ranks.pools import run_ranks
from helpers.ranks.recording import collectives_of
from helpers.releases.skip import skip_before

Loss = Callable[[Sequence[torch.Tensor]], torch.Tensor]


class _Heads(nn.Module):
    """A trunk and three heads; the third head takes the second head's output."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh())
        self.main, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.trunk(x)
        second = x + self.second(x * self.scale)
        return self.main(x), second.detach(), second, self.third(second).sum()


class _Cut(_Heads):
    """`_Heads` with a graph break after the trunk."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.trunk(x)
        torch._dynamo.graph_break()
        second = x + self.second(x * self.scale)
        return self.main(x), second.detach(), second, self.third(second).sum()


def _all(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    main, _, second, third = outputs
    return main.square().mean() + second.square().mean() + third


def _main(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return outputs[0].square().mean()


def _second(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return outputs[2].square().mean()


def _third(outputs: Sequence[torch.Tensor]) -> torch.Tensor:
    return outputs[3]


def _build(fully_shard: Any, model_class: type[nn.Module] = _Heads) -> Any:
    torch.manual_seed(0)
    model: Any = model_class()
    for module in (model.trunk, model.main, model.second, model.third, model):
        fully_shard(module)
    return model


def _train(
    model: Any, losses: Sequence[Loss], seen: list[int] | None = None
) -> tuple[list[list[bool]], list[torch.Tensor]]:
    """Return parameters with gradients by step, and final parameters; append collective counts to `seen`."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.5)
    have = []
    for step, loss in enumerate(losses):
        torch.manual_seed(step)
        outputs = model(torch.randn(3, 4))
        collectives = collectives_of(loss(outputs).backward)
        if seen is not None:
            seen.append(len(collectives))
        have.append([parameter.grad is not None for parameter in model.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return have, [parameter.full_tensor().detach() for parameter in model.parameters()]


_LOSSES = (_main, _all, _second, _main, _third, _second, _all)


_Found = tuple[list[bool], bool, tuple[list[int], list[int]], dict[str, int]]


def _as_eager(rank: int, options: dict[str, Any], is_cut: bool) -> _Found:
    """Compare compiled training with eager FSDP2.

    Returns whether each final parameter is equal, whether equal parameters had gradients in each step, collective
    counts of the backwards (eager, compiled) and the number of compiled graphs by direction.
    """
    eager, ours = (_build(shard, _Cut if is_cut else _Heads) for shard in (torch_fully_shard, compile_fsdp.fully_shard))
    ours.compile(backend="compile_fsdp", fullgraph=not is_cut, options=options)
    compile_fsdp.reset_reports()
    theirs: list[int] = []
    mine: list[int] = []
    expected_have, expected = _train(eager, _LOSSES, theirs)
    have, found = _train(ours, _LOSSES, mine)
    names = [report.direction for report in compile_fsdp.reports()]
    close = torch.equal if options["inner_backend"] == "aot_eager" else torch.allclose
    equal = [close(one, other) for one, other in zip(found, expected, strict=True)]
    graphs = {each: names.count(each) for each in ("forward", "backward")}
    return equal, have == expected_have, (theirs, mine), graphs


@pytest.mark.parametrize("inner_backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_unused_outputs_leave_gradients_none_as_in_eager(inner_backend: str) -> None:
    for equal, have_equal, (eager, ours), graphs in run_ranks(2, _as_eager, {"inner_backend": inner_backend}, False):
        assert have_equal and all(equal)
        assert graphs == {"forward": 1, "backward": 4}
        assert ours == eager  # no gathers for outputs that the loss does not use


def test_unused_outputs_leave_gradients_none_with_a_graph_break() -> None:
    for equal, have_equal, _, graphs in run_ranks(2, _as_eager, {"inner_backend": "aot_eager"}, True):
        assert have_equal and all(equal)
        assert graphs == {"forward": 3, "backward": 5}


def _replayed(rank: int) -> tuple[tuple[int, int], bool, bool]:
    eager, replaying = (_build(shard) for shard in (torch_fully_shard, compile_fsdp.fully_shard))
    options = {"inner_backend": "aot_eager"}
    compile_with_replay(replaying, backend="compile_fsdp", fullgraph=True, options=options)
    losses = (_second, _main, _second, _third, _second)  # the first two use outputs of equal shape
    (expected_have, expected), (have, found) = (_train(model, losses) for model in (eager, replaying))
    return count_replays(replaying), have == expected_have, all(map(torch.equal, found, expected))


def test_backward_is_replayed_only_if_the_loss_uses_the_recorded_outputs() -> None:
    skip_before("2.13")
    for replays, have_equal, equal in run_ranks(2, _replayed):
        assert replays == (4, 2)
        assert have_equal and equal


def _hooks(rank: int) -> tuple[list[str], list[str]]:
    records = []
    for fully_shard in (torch_fully_shard, compile_fsdp.fully_shard):
        model = _build(fully_shard)
        called: list[str] = []

        def watch(module: nn.Module, args: Any, output: torch.Tensor, called: list[str] = called) -> None:
            def note(grad: torch.Tensor) -> None:
                called.append(f"gradient of {tuple(grad.shape)} of {type(module).__name__}")

            output.register_hook(note)

        model.second.register_forward_hook(watch)
        model.trunk.register_forward_hook(watch)
        if fully_shard is compile_fsdp.fully_shard:
            model.compile(backend="compile_fsdp", fullgraph=True, options={"inner_backend": "aot_eager"})
        _train(model, (_main, _second, _main))
        records.append(called)
    return records[0], records[1]


def test_gradient_hooks_run_as_in_eager() -> None:
    skip_before("2.13")  # 2.11 loses items that a hook appends to a list
    for eager, ours in run_ranks(2, _hooks):
        assert len(eager) == 4
        assert ours == eager
