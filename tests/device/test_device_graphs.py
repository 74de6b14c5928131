"""Training in device graphs, as CUDA graphs, on the emulated device equals training without them.

Each replay poisons the memory that its capture has allocated, so a result that is read too late differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn

import compile_fsdp
from compile_fsdp.backend import device_graphs
from compile_fsdp.backend.capturable import allocate_kept, check_capturable
from compile_fsdp.backend.device_graphs import ReplayedCode
from compile_fsdp.errors import UnknownOptionError, UnsupportedFeatureError
from compile_fsdp.passes import Kept
from compile_fsdp.reports import GraphReport
from helpers.device.install import delayed
from helpers.models.blockwise import shard_blocks
from helpers.parity.check import Outcome, check_parity, full
from helpers.parity.features import FEATURES
from helpers.parity.twins import build_both
from helpers.ranks.fake_world import fake_world
from helpers.ranks.pools import run_ranks
from helpers.ranks.tests import on_ranks

DEVICE = "emulated"
GRAPHS: dict[str, Any] = {"triton.cudagraphs": True, "progress": False}


@contextmanager
def counted() -> Iterator[list[int]]:
    """Count captures and replays, in this order."""
    counts, capture = [0, 0], device_graphs._Capture
    begin, replay = capture.__init__, capture.replay

    def counted_begin(self: Any, *args: Any) -> None:
        counts[0] += 1
        begin(self, *args)

    def counted_replay(self: Any, inputs: list[Any]) -> Any:
        counts[1] += 1
        return replay(self, inputs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capture, "__init__", counted_begin)
        patch.setattr(capture, "replay", counted_replay)
        yield counts


# Captures of one function


class Code:
    """A function in place of a compiled graph."""

    def __init__(self, function: Callable[..., list[torch.Tensor]], written: set[int] | None = None) -> None:
        self.function = function
        self.mutated_input_idxs = written or set()

    def __call__(self, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        results = self.function(*inputs)
        inputs.clear()
        return results


def _replayed(code: Code, saved: set[int], parameters: frozenset[int] = frozenset()) -> ReplayedCode:
    return ReplayedCode(code, torch.device(DEVICE, 0), parameters, saved, "graph")


def _add_in_place(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    x.add_(weight)
    return [x * 2]


@on_ranks(1, DEVICE)
def test_input_that_moves_is_copied_and_what_is_written_to_it_copied_back(rank: int) -> None:
    """Two runs each have their input at two addresses, the other runs at others."""
    graph, weight = _replayed(Code(_add_in_place, written={0}), set()), torch.ones(8)
    inputs = [torch.full((8,), float(i)) for i in range(6)]
    results = []
    with counted() as counts:
        for i in (0, 0, 1, 1, 2, 3, 4, 5):
            results += graph([inputs[i], weight])
    assert [each.sum().item() / 8 for each in inputs] == [2, 3, 3, 4, 5, 6]
    assert [each.sum().item() / 8 for each in results] == [2, 4, 4, 6, 6, 8, 10, 12]
    # The second run is captured. In the third, the input has moved. The fourth is captured again, and copies it.
    assert counts == [2, 6]


@pytest.mark.parametrize(
    ("steps", "begin", "hold", "release", "expected"),
    [
        # The first run of each graph and its fifth are no replays, and the fifth drops no capture.
        pytest.param(8, 0, 3, 4, [2, 6 + 6], id="in use after the captures"),
        # The second graph is captured in step 2, in which the first is not replayed, and again in step 4.
        pytest.param(7, 1, 1, 2, [3, 5 + 4], id="in use at a capture"),
    ],
)
@on_ranks(1, DEVICE)
def test_result_of_a_graph_is_read_where_it_is_and_not_overwritten_while_in_use(
    rank: int, steps: int, begin: int, hold: int, release: int, expected: list[int]
) -> None:
    """A graph saves a value for a second graph, which runs from step `begin` on.

    The value of step `hold` is in use until the end of step `release`.
    """
    first = _replayed(Code(lambda x: [x + 1, x * 3]), {1})
    second = _replayed(Code(lambda saved: [saved + 1]), set())
    x, kept = torch.zeros(8), []
    with counted() as counts:
        for step in range(steps):
            x.fill_(step)
            _, saved = first([x])
            if step == hold:
                kept.append(saved)
            if step >= begin:
                assert bool((second([saved])[0] == 3 * step + 1).all())
            if step == release:
                assert bool((kept.pop() == 3 * hold).all())
            del saved
    assert counts == expected
    (runs,) = second._runs.values()
    assert runs.capture is not None and not runs.capture._buffers


@on_ranks(1, DEVICE)
def test_parameter_that_is_allocated_at_times_keeps_the_capture(rank: int) -> None:
    graph = _replayed(Code(lambda x, parameter: [x + 1]), set(), frozenset({1}))
    x, parameter = torch.zeros(8), torch.ones(8)
    with counted() as counts:
        for step in range(5):
            parameter.untyped_storage().resize_(32 if step % 2 else 0)
            graph([x, parameter])
    assert counts == [1, 4]


@on_ranks(1, DEVICE)
def test_graph_is_captured_again_however_often_captures_are_dropped(rank: int) -> None:
    graph, x, times = _replayed(Code(lambda x: [x + 1]), set()), torch.zeros(8), 2 * device_graphs._MOST_CAPTURES
    graph([x])
    with counted() as counts:
        for _ in range(times):
            graph([x])
            compile_fsdp.drop_cuda_graphs()
    assert counts == [times, times]


# Training

STEPS = 5
# By row of the parity table: captures and replays of a rank in five steps. A graph is captured in its second step.
QUICK = {
    "two forwards, two backwards": [4, 16],
    "keep after backward": None,
    "checkpoint inside": [2, 8],
}
# With parts that a device graph refuses: see the tests below.
REFUSED = {"cpu offload", "optimizer in backward", "adam in backward"}
# Low precision, in which Inductor rounds less often than eager PyTorch.
LOW_PRECISION = {name for name, feature in FEATURES.items() if feature.low_precision} | {
    "accumulate in fp32",
    "moved to bf16",
}


def _train(rank: int, row: str) -> tuple[Outcome, list[int]]:
    with delayed(rank, 50.0), counted() as counts:
        return check_parity(FEATURES[row], "inductor", steps=STEPS, **GRAPHS), counts


@pytest.mark.parametrize(
    "row",
    [*QUICK, *(pytest.param(row, marks=pytest.mark.slow) for row in FEATURES if row not in {*QUICK, *REFUSED})],
)
def test_replayed_steps_equal_eager_steps(row: str) -> None:
    ranks = 4 if row == "expert parallel" else 2  # torch refuses its all-to-all on two
    for outcome, counts in run_ranks(ranks, _train, row, device=DEVICE):
        assert outcome.worst <= (5e-2 if row in LOW_PRECISION else 1e-5), outcome.differing
        assert counts[1] > 0
        if (expected := QUICK.get(row)) is not None:
            assert counts == expected


class Blocks(nn.Module):
    """Equal blocks with dropout, which are compiled once."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Dropout(0.1)) for _ in range(3))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x).square().mean()


def _build(shard: Callable[..., Any]) -> nn.Module:
    return shard_blocks(Blocks(), shard)  # type: ignore[no-any-return]


def _grads(model: nn.Module) -> list[torch.Tensor]:
    """Return all gradients, with zeros in place of None."""
    return [full(torch.zeros_like(each) if each.grad is None else each.grad) for each in model.parameters()]


def _worst(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    assert len(got) == len(expected)
    return max((a - b).abs().max().item() for a, b in zip(got, expected, strict=True))


@on_ranks(2, DEVICE)
def test_each_size_has_a_capture_and_results_outlive_later_replays(rank: int) -> None:
    """Train with batches of changing size, evaluate between, and keep losses and gradients of earlier steps."""
    eager, ours = build_both(_build, options={**GRAPHS, "fallback_random": True})
    kept = []
    with counted() as counts:
        for step in range(9):
            batch = torch.randn(4 + 2 * (step % 3), 8)
            found = []
            for model in (eager, ours):
                torch.manual_seed(step)
                loss = model(batch)
                loss.backward()
                with torch.no_grad():
                    found.append([loss.detach(), model(batch), *_grads(model)])
                model.zero_grad()
            kept.append(found)
    for mine, theirs in kept:
        assert _worst(mine, theirs) <= 1e-6
    # The training forward, its backward and the evaluation for each of three sizes, in their second and third run.
    assert counts[0] >= 6
    assert counts[1] >= 12


@on_ranks(2, DEVICE)
def test_values_that_a_later_backward_needs_are_not_overwritten(rank: int) -> None:
    """Two backwards through one forward, with a forward between them; parameters that eager code frees and moves."""
    eager, ours = build_both(lambda shard: _build(shard).eval(), options=GRAPHS)
    found: list[list[torch.Tensor]] = [[], []]
    for model, grads in zip((eager, ours), found, strict=True):
        for step in range(6):
            torch.manual_seed(step)
            batch = torch.randn(4, 8)
            loss = model(batch)
            loss.backward(retain_graph=step % 2 == 1)
            if step % 2 == 1:
                model(batch + 1).backward()
                loss.backward()
            if step == 3:
                model.unshard()
                model.reshard()
            grads += [each.clone() for each in _grads(model)]
            model.zero_grad()
    size = max(each.abs().max().item() for each in found[0])
    assert _worst(found[1], found[0]) <= 1e-6 * max(size, 1.0)


class Heads(nn.Module):
    """Two heads, of which the loss uses the second; its output, or two views of it, are returned."""

    def __init__(self, returns_views: bool) -> None:
        super().__init__()
        self.returns_views = returns_views
        self.trunk = nn.Sequential(nn.Linear(8, 8), nn.GELU())
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.trunk(x)
        second = self.second(hidden)
        return self.first(hidden), *((second[:, :4], second[:, 4:]) if self.returns_views else (second,))


@pytest.mark.parametrize("returns_views", [False, True])
@on_ranks(2, DEVICE)
def test_gathers_of_an_unused_module_are_awaited_and_returned_views_are_kept(rank: int, returns_views: bool) -> None:
    models, found = build_both(lambda shard: shard_blocks(Heads(returns_views), shard), options=GRAPHS), []
    with counted() as counts:
        for model in models:
            values, batches = [], []  # all kept, so that no batch lies where the last one lay, and is read in place
            for step in range(5):
                torch.manual_seed(step)
                batches.append(torch.randn(4, 8))
                _, *used = model(batches[-1])
                sum(each.square().sum() for each in used).backward()
                values += [*(each.detach() for each in used), *_grads(model)]
                model.zero_grad()
            found.append(values)
    compile_fsdp.drop_cuda_graphs()
    assert not device_graphs._captures
    assert _worst(found[1], found[0]) <= 1e-5
    assert counts == [2, 8]


@pytest.mark.parametrize(
    ("row", "cause"),
    [
        ("optimizer in backward", "a backward graph .* hooks on sharded parameters, such as an optimizer"),
        ("cpu offload", "a forward graph .* tensors on the CPU among its inputs"),
    ],
)
@on_ranks(2, DEVICE)
def test_work_of_the_host_is_refused_by_its_cause(rank: int, row: str, cause: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=f"^expected {cause}"):
        _train(rank, row)


@on_ranks(4, DEVICE)
def test_forward_that_reshards_to_a_part_of_the_ranks_is_refused(rank: int) -> None:
    model = shard_blocks(Blocks().eval(), reshard_after_forward=2)
    model.compile(backend="compile_fsdp", fullgraph=True, options=GRAPHS)
    expected = r"expected no module that reshards to a part of the ranks after its forward, got the root, blocks\.0, "
    with pytest.raises(UnsupportedFeatureError, match=expected):
        model(torch.randn(4, 8))


def test_random_numbers_on_the_cpu_are_refused() -> None:
    graph = fx.Graph()
    graph.call_function(torch.ops.aten.rand.default, ([4],)).meta["val"] = torch.rand(4)
    with pytest.raises(UnsupportedFeatureError, match=r"the op aten.rand.default, whose result is on the CPU"):
        check_capturable(graph, "block")


def test_dropout_in_a_checkpoint_is_refused() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.ops.higher_order.run_and_save_rng_state, (torch.ops.aten.bernoulli.p, x, 0.5))
    with pytest.raises(UnsupportedFeatureError, match=r"expected a block .*, got one with dropout in a checkpoint"):
        check_capturable(graph, "block")


def test_a_cpu_model_is_refused_with_an_alternative() -> None:
    with fake_world(2):
        model = _build(compile_fsdp.fully_shard)
        model.compile(backend="compile_fsdp", fullgraph=True, mode="reduce-overhead")
        with pytest.raises(UnknownOptionError, match=r"expected a GPU .* got cpu.*max-autotune-no-cudagraphs"):
            model(torch.randn(4, 8))


def test_windows_within_a_graph_are_refused_by_name() -> None:
    kept = (("layers.0.weight", Kept.MUTATED.value),)
    report = GraphReport("forward", "inductor", 0, 0, 0, kept, 0, 0, 0.0, cached=False)
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.0\.weight: mutated in the window"):
        allocate_kept(print, None, [report])  # type: ignore[arg-type]
