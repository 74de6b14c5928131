"""A bundle lets a process skip tracing, if it fits the model and the step."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy

import compile_fsdp
from compile_fsdp import Options
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.passes import cache_key
from compile_fsdp.replay import bundle
from compile_fsdp.torch_compat.distributed import executed_collectives
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.logs import logged
from helpers.models.bundled import FLOAT32, Block, DrawsAgain, SavesSome, SavesUnknown, build, restart, saving, train
from helpers.models.replays import count_replays
from helpers.ranks.fake_world import fake_world
from helpers.ranks.fresh import run_fresh
from helpers.ranks.pools import run_ranks

pytestmark = pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")


_STEP = """
import json, logging, sys
import torch
import torch._dynamo.utils

import compile_fsdp
from helpers.models.hybrid import build_hybrid
from helpers.models.replays import count_replays
from helpers.ranks.fake_world import fake_world

logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
path, rank = json.loads(sys.argv[1])
with fake_world(4, rank):
    model = build_hybrid()
    model.compile(backend="compile_fsdp", fullgraph=True, options={"bundle": path})
    for _ in range(2):
        model(torch.ones(3, 4)).square().mean().backward()
    counters = torch._dynamo.utils.counters
    print(json.dumps({
        "replays": count_replays(model),
        "graphs": counters["stats"]["unique_graphs"],
        "captures": counters["compiled_autograd"]["captures"],
        "reports": [(report.direction, report.cached) for report in compile_fsdp.reports()],
    }))
"""


def test_bundle_of_one_rank_lets_another_rank_skip_tracing(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "step.bundle"
    # Two empty caches, because the usual cache has the graphs after an earlier run of the tests.
    made, log = run_fresh(_STEP, str(path), 0, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "first"))
    assert "there is none yet" in log
    assert made == {"replays": [1, 1], "graphs": 2, "captures": 1, "reports": [["forward", False], ["backward", False]]}
    content = path.read_bytes()
    read, log = run_fresh(_STEP, str(path), 3, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "second"))
    assert log == ""
    assert read == {"replays": [2, 2], "graphs": 0, "captures": 0, "reports": [["forward", True], ["backward", True]]}
    assert path.read_bytes() == content


# Gradients that wait for a later microbatch are in float32, and parameters are not.
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class _OtherBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).sin() * self.scale - self.offset


def _project_otherwise(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.linear(x) * 2.0  # type: ignore[no-any-return]


def _restart(rank: int, *args: Any) -> tuple[list[tuple[int, int]], list[int], bool]:
    return restart(*args)


@pytest.mark.parametrize("is_own", [False, True])
@pytest.mark.parametrize(
    ("policy", "training", "replays", "graphs"),
    [
        (FLOAT32, {}, [(2, 2), (3, 3)], [2, 2]),
        (FLOAT32, {"evaluates": True}, [(4, 2), (6, 3)], [3, 3]),
        # Backwards of the first microbatch, of those between, and of the last.
        (FLOAT32, {"microbatches": 4}, [(11, 9), (12, 12)], [4, 4]),
        # The first microbatch and those between have one graph, which does not add the waiting gradients.
        (MIXED, {"microbatches": 4}, [(11, 10), (12, 12)], [3, 3]),
    ],
)
def test_steps_from_a_bundle_equal_steps_without_replay(
    tmp_path: Path,
    is_own: bool,
    policy: MixedPrecisionPolicy,
    training: dict[str, Any],
    replays: list[tuple[int, int]],
    graphs: list[int],
) -> None:
    for result in run_ranks(2, _restart, str(tmp_path), is_own, Block, policy, training):
        assert result == (replays, graphs, True)


@pytest.mark.parametrize("block", [DrawsAgain, SavesSome])
def test_checkpoint_comes_from_a_bundle(tmp_path: Path, block: type[Block]) -> None:
    for result in run_ranks(2, _restart, str(tmp_path), True, block, FLOAT32, {}):
        assert result == ([(2, 2), (3, 3)], [2, 2], True)


def _with_arguments(rank: int, folder: str) -> list[tuple[int, int] | None]:
    bundle.own_folder = lambda: Path(folder)
    mode = {"mode": "max-autotune-no-cudagraphs"}
    found: list[tuple[int, int] | None] = []
    for arguments in (mode, mode, {"disable": True}):
        model: Any = compile_fsdp.fully_shard(Block(4))
        model.compile(backend="compile_fsdp", **arguments)
        train(model)
        found.append(None if "disable" in arguments else count_replays(model))
        assert (model._compile_fsdp_hooks.hooks.root.replay is None) == ("disable" in arguments)
    return found


def test_arguments_of_torch_compile_work_with_a_bundle(tmp_path: Path) -> None:
    assert run_ranks(1, _with_arguments, str(tmp_path)) == [[(2, 2), (3, 3), None]]


def _alone(rank: int, folder: str) -> int:
    """Start from a bundle; then rank 0 traces a further shape that its peer never has. Return the new graphs."""
    for _ in range(2):
        model = build(Path(folder, "step.bundle"), agreement_timeout_s=20.0, memory_budget=2**40)
        train(model)
        dist.barrier()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    train(model, batch=3 if rank else 5)
    return int(counters["unique_graphs"] - before)


def test_rank_traces_a_further_shape_while_its_peers_replay(tmp_path: Path) -> None:
    assert run_ranks(2, _alone, str(tmp_path)) == [2, 0]


def test_own_bundles_used_last_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "own_folder", lambda: tmp_path)
    monkeypatch.setattr(bundle, "_MOST_FILES", 3)
    monkeypatch.setattr(bundle, "_MOST_BYTES", 20)
    for i, size in enumerate((1, 9, 9, 9, 2)):
        path = tmp_path / f"{i}.bundle"
        path.write_bytes(b"x" * size)
        os.utime(path, (i, i))
    bundle.remove_oldest()
    assert len(list(tmp_path.iterdir())) == 3
    monkeypatch.setattr(bundle, "_MOST_BYTES", 11)
    bundle.remove_oldest()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.bundle", "4.bundle"]


def _collectives_of_accumulation(rank: int, folder: str) -> list[int]:
    """Count collectives of an accumulation step: cold, then from a bundle."""
    counts = []
    for _ in range(2):
        model = build(Path(folder, "step.bundle"), blocks=4, memory_budget=2**40)
        x = torch.ones(3, 4)
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(False)
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(True)
        before = executed_collectives()
        model(x).square().mean().backward()
        counts.append(executed_collectives() - before)
    return counts


def test_backward_traced_after_bundle_load_has_the_collectives_of_a_cold_start(tmp_path: Path) -> None:
    for cold, warm in run_ranks(2, _collectives_of_accumulation, str(tmp_path)):
        assert cold == warm


def test_package_hash_changes_with_a_source_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "wrap").mkdir()
    source = tmp_path / "wrap" / "precision.py"
    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(cache_key, "find_spec", lambda name: spec)
    found = []
    for text in ("1", "2"):
        source.write_text(text)
        found.append(cache_key.hash_package.__wrapped__())
    assert found[0] != found[1]


def _facts(model: Any, **options: Any) -> dict[str, str]:
    return bundle.make_facts(model, Options(**options), torch.device("cpu"))


def test_facts_depend_on_model_options_and_world_size() -> None:
    with fake_world(2):
        made = _facts(build(None))
        others = {
            "parameters": build(None, blocks=3),
            "buffers": build(None, width=1),
            "modules": build(None, block=_OtherBlock),
            "code of the modules": build(None, block=_OtherBlock),
        }
        for name, model in others.items():
            assert _facts(model)[name] != made[name], name
        same = _facts(build(None), bundle="elsewhere", progress=False)
        assert same == made
        assert _facts(build(None), memory_budget=1)["options"] != made["options"]
    with fake_world(4):
        assert _facts(build(None))["parameters"] != made["parameters"]


def test_facts_depend_on_the_modules_of_classes() -> None:
    """Equal code in two Python modules reads the constants of its own module."""

    def make(module: str) -> Any:
        return type("Block", (Block,), {"__module__": module, "__qualname__": "Block"})

    with fake_world(2):
        one, other = (_facts(build(None, make(name))) for name in ("one", "other"))
    assert one["code of the modules"] == other["code of the modules"]
    assert one["modules"] != other["modules"]


def _refusals(rank: int, folder: str) -> list[str]:
    """The first warning of each changed model about the bundle."""
    path = Path(folder, "step.bundle")
    train(build(path))
    content = path.read_bytes()
    problems = []
    changes: list[tuple[Callable[[Any], object], int]] = [
        (lambda model: setattr(model[1], "scale", 3.0), 3),
        (lambda model: model[1].linear.bias.requires_grad_(False), 3),
        (lambda model: model[0].register_forward_hook(lambda module, args, output: output), 3),
        (lambda model: None, 5),
        (lambda model: setattr(model[1], "names", {4: "x"}), 3),
        (lambda model: setattr(Block, "project", _project_otherwise), 3),
    ]
    own = Block.project
    for change, batch in changes:
        model = build(path)
        change(model)
        with logged() as messages:
            model(torch.randn(batch, 4)).square().mean().backward()
        problems.append(messages[0])
        assert count_replays(model) == (0, 0)
        if "no step in the bundle" in problems[-1]:  # else another model
            train(model := build(path))
            assert count_replays(model) == (3, 3)
        path.write_bytes(content)
    Block.project = own  # type: ignore[method-assign]
    return problems


def test_bundle_of_a_changed_step_is_refused_with_the_difference(tmp_path: Path) -> None:
    (problems,) = run_ranks(1, _refusals, str(tmp_path))
    expected = "scale", "parameters", "_forward_hooks", "args[0]", "names", "FSDPBlock"
    for problem, named in zip(problems, expected, strict=True):
        assert named in problem


def _with_other_contexts(rank: int, folder: str) -> tuple[str, tuple[int, int]]:
    """The first warning of a model whose checkpoint saves other values, and its replays."""
    path = Path(folder, "step.bundle")
    train(build(path, SavesSome))
    model = build(path, SavesSome)
    model[1].contexts = saving(torch.ops.aten.tanh.default)
    with logged() as messages:
        model(torch.randn(3, 4)).square().mean().backward()
    return messages[0], count_replays(model)


def test_changed_contexts_of_a_checkpoint_are_no_step_of_a_bundle(tmp_path: Path) -> None:
    ((warning, replays),) = run_ranks(1, _with_other_contexts, str(tmp_path))
    assert "self._modules['1'].contexts is" in warning
    assert replays == (0, 0)


def _with_unknown_contexts(rank: int, folder: str) -> tuple[list[str], tuple[int, int]]:
    with logged() as messages:
        train(model := build(Path(folder, "step.bundle"), SavesUnknown))
    return messages, count_replays(model)


def test_contexts_that_read_unknown_objects_are_in_no_bundle(tmp_path: Path) -> None:
    ((messages, replays),) = run_ranks(1, _with_unknown_contexts, str(tmp_path))
    assert "which decides what a checkpoint saves, may read anything" in messages[-1]
    assert replays == (0, 0)


def _hooked(rank: int, folder: str) -> list[tuple[int, int]]:
    replays = []
    for _ in range(2):
        model = build(Path(folder, "step.bundle"))
        model[0].register_forward_hook(lambda module, args, output: output * 2.0)
        train(model)
        replays.append(count_replays(model))
    return replays


def test_hook_with_a_different_number_is_in_the_bundle(tmp_path: Path) -> None:
    assert run_ranks(1, _hooked, str(tmp_path)) == [[(2, 2), (3, 3)]]


@pytest.mark.parametrize(
    "given", [{"bundle": 3}, {"bundle": "x", "verify": True}, {"bundle": "x", "inner_backend": "eager"}]
)
def test_invalid_bundle_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnknownOptionError, match="bundle"):
        Options.parse(given)


def _unwritable(rank: int, folder: str) -> tuple[tuple[int, int], bool]:
    path = Path(folder, "file", "step.bundle")
    path.parent.write_text("no folder")
    model = build(path)
    train(model)
    return count_replays(model), path.exists()


def test_training_continues_if_the_bundle_cannot_be_written(tmp_path: Path) -> None:
    assert run_ranks(1, _unwritable, str(tmp_path)) == [((2, 2), False)]
