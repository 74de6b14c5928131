"""A bundle lets a process skip tracing, if it fits the model and the step."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import compile_fsdp
from compile_fsdp import Options
from compile_fsdp.errors import UnknownOptionError
from compile_fsdp.passes import cache_key
from compile_fsdp.replay import bundle
from compile_fsdp.torch_compat.distributed import executed_collectives
from compile_fsdp.torch_compat.dynamo import CAN_REPLAY
from helpers.logs import logged
from helpers.models.blockwise import compile_whole, shard_blocks
from helpers.models.bundled import FLOAT32, Block, DrawsAgain, SavesSome, SavesUnknown, build, restart, saving, train
from helpers.models.replays import count_replays
from helpers.ranks.fake_world import fake_world
from helpers.ranks.fresh import run_fresh
from helpers.ranks.meshes import shared_mesh
from helpers.ranks.tests import on_ranks

pytestmark = pytest.mark.skipif(not CAN_REPLAY, reason="torch 2.13 has brought it")


@on_ranks(1)
def test_model_keeps_its_blocks_if_an_equal_model_of_its_bundle_is_deleted(rank: int) -> None:
    with TemporaryDirectory() as folder:
        models = [build(Path(folder, "step.bundle"), blocks=4) for _ in range(2)]
        for model in models:
            train(model)
        assert count_replays(models[1]) == (3, 3)  # by the first model's bundle
        del model, models[1]
        gc.collect()
        train(models[0])


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


# With the model's own bundle or a named one. The two checkpoints below and tests of bundle constants have own bundles.
@pytest.mark.parametrize(
    ("is_own", "policy", "training", "replays", "graphs"),
    [
        (False, FLOAT32, {}, [(2, 2), (3, 3)], [2, 2]),
        (True, FLOAT32, {"evaluates": True}, [(4, 2), (6, 3)], [3, 3]),
        # Backwards of the first microbatch, of those between, and of the last.
        (False, FLOAT32, {"microbatches": 4}, [(11, 9), (12, 12)], [4, 4]),
        # The first microbatch and those between have one graph, which does not add the waiting gradients.
        (True, MIXED, {"microbatches": 4}, [(11, 10), (12, 12)], [3, 3]),
    ],
)
@on_ranks(2)
def test_steps_from_a_bundle_equal_steps_without_replay(
    rank: int,
    tmp_path: Path,
    is_own: bool,
    policy: MixedPrecisionPolicy,
    training: dict[str, Any],
    replays: list[tuple[int, int]],
    graphs: list[int],
) -> None:
    assert restart(str(tmp_path), is_own, Block, policy, training) == (replays, graphs, True)


@pytest.mark.parametrize("block", [DrawsAgain, SavesSome])
@on_ranks(2)
def test_checkpoint_comes_from_a_bundle(rank: int, tmp_path: Path, block: type[Block]) -> None:
    assert restart(str(tmp_path), True, block) == ([(2, 2), (3, 3)], [2, 2], True)


@on_ranks(1)
def test_arguments_of_torch_compile_work_with_a_bundle(rank: int, tmp_path: Path) -> None:
    bundle.own_folder = lambda: tmp_path
    mode = {"mode": "max-autotune-no-cudagraphs"}
    for arguments, replays in ((mode, (2, 2)), (mode, (3, 3)), ({"disable": True}, None)):
        model: Any = compile_fsdp.fully_shard(Block(4))
        model.compile(backend="compile_fsdp", **arguments)
        train(model)
        if replays is None:
            assert model._compile_fsdp_hooks.hooks.root.replay is None
        else:
            assert count_replays(model) == replays


@on_ranks(2)
def test_rank_traces_a_further_shape_while_its_peers_replay(rank: int, tmp_path: Path) -> None:
    for _ in range(2):
        model = build(tmp_path / "step.bundle", agreement_timeout_s=20.0, memory_budget=2**40)
        train(model)
        dist.barrier()
    counters = torch._dynamo.utils.counters["stats"]
    before = counters["unique_graphs"]
    train(model, batch=3 if rank else 5)
    assert counters["unique_graphs"] - before == (0 if rank else 2)


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


@on_ranks(2)
def test_backward_traced_after_bundle_load_has_the_collectives_of_a_cold_start(rank: int, tmp_path: Path) -> None:
    counts = []
    for _ in range(2):
        model = build(tmp_path / "step.bundle", blocks=4, memory_budget=2**40)
        x = torch.ones(3, 4)
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(False)
        model(x).square().mean().backward()
        model.set_requires_gradient_sync(True)
        before = executed_collectives()
        model(x).square().mean().backward()
        counts.append(executed_collectives() - before)
    cold, warm = counts
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


@on_ranks(1)
def test_bundle_of_a_changed_step_is_refused_with_the_difference(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    train(build(path))
    content = path.read_bytes()
    # A change, the size of the batch, and what the first warning names.
    changes: list[tuple[Callable[[Any], object], int, str]] = [
        (lambda model: setattr(model[1], "scale", 3.0), 3, "scale"),
        (lambda model: model[1].linear.bias.requires_grad_(False), 3, "parameters"),
        (lambda model: model[0].register_forward_hook(lambda module, args, output: output), 3, "_forward_hooks"),
        (lambda model: None, 5, "args[0]"),
        (lambda model: setattr(model[1], "names", {4: "x"}), 3, "names"),
        (lambda model: setattr(Block, "project", _project_otherwise), 3, "FSDPBlock"),
    ]
    own = Block.project
    for change, batch, named in changes:
        model = build(path)
        change(model)
        with logged() as messages:
            model(torch.randn(batch, 4)).square().mean().backward()
        assert named in messages[0]
        assert count_replays(model) == (0, 0)
        if "no step in the bundle" in messages[0]:  # else another model
            train(model := build(path))
            assert count_replays(model) == (3, 3)
        path.write_bytes(content)
    Block.project = own  # type: ignore[method-assign]


@on_ranks(1)
def test_changed_contexts_of_a_checkpoint_are_no_step_of_a_bundle(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    train(build(path, SavesSome))
    model = build(path, SavesSome)
    model[1].contexts = saving(torch.ops.aten.tanh.default)
    with logged() as messages:
        model(torch.randn(3, 4)).square().mean().backward()
    assert "self._modules['1'].contexts is" in messages[0]
    assert count_replays(model) == (0, 0)


@on_ranks(1)
def test_contexts_that_read_unknown_objects_are_in_no_bundle(rank: int, tmp_path: Path) -> None:
    with logged() as messages:
        train(model := build(tmp_path / "step.bundle", SavesUnknown))
    assert "which decides what a checkpoint saves, may read anything" in messages[-1]
    assert count_replays(model) == (0, 0)


@on_ranks(1)
def test_hook_with_a_different_number_is_in_the_bundle(rank: int, tmp_path: Path) -> None:
    for replays in ((2, 2), (3, 3)):
        model = build(tmp_path / "step.bundle")
        model[0].register_forward_hook(lambda module, args, output: output * 2.0)
        train(model)
        assert count_replays(model) == replays


@pytest.mark.parametrize(
    "given", [{"bundle": 3}, {"bundle": "x", "verify": True}, {"bundle": "x", "inner_backend": "eager"}]
)
def test_invalid_bundle_options_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UnknownOptionError, match="bundle"):
        Options.parse(given)


@on_ranks(1)
def test_training_continues_if_the_bundle_cannot_be_written(rank: int, tmp_path: Path) -> None:
    path = tmp_path / "file" / "step.bundle"
    path.parent.write_text("no folder")
    model = build(path)
    train(model)
    assert count_replays(model) == (2, 2)
    assert not path.exists()


def _start_replicas(rank: int, folder: Path) -> tuple[int, int]:
    """Train two replicas of a model, each with a file of its own; return its replays."""
    mesh = shared_mesh("cpu", (2, 1), ("replicate", "shard"))
    torch.manual_seed(0)
    model = shard_blocks(nn.Sequential(Block(4), Block(4)), mesh=mesh)
    compile_whole(model, bundle=str(folder / f"{rank}.bundle"), agreement_timeout_s=60)
    train(model)
    return count_replays(model)


@on_ranks(2)
def test_replica_without_a_bundle_lets_all_trace(rank: int, tmp_path: Path) -> None:
    """Rank 0 alone writes, so rank 1 finds no file, as on a machine with empty caches."""
    replays = [_start_replicas(rank, tmp_path) for _ in range(2)]
    assert replays == [(2, 2), (2, 2)]
    assert [path.name for path in tmp_path.iterdir()] == ["0.bundle"]


def test_number_of_ranks_is_a_fact(tmp_path: Path) -> None:
    """Dynamo makes it a constant, although the model is sharded over a mesh with fewer ranks."""
    facts = []
    for size in (2, 4):
        with fake_world(size):
            mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("pp", "dp"))["dp"]
            model = shard_blocks(nn.Sequential(Block(4)), mesh=mesh)
            facts.append(bundle.make_facts(model, Options.parse({}), torch.device("cpu")))
    assert {name for name in facts[0] if facts[0][name] != facts[1][name]} == {"world size"}
