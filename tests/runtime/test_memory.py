"""A group's memory state follows eager and compiled steps."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.runtime.attached import module_hooks_of
from compile_fsdp.runtime.gather import EAGER_GATHER
from compile_fsdp.runtime.group import TraceableGroup
from compile_fsdp.runtime.states import Memory
from helpers.models.blockwise import compile_whole
from helpers.ranks.fake_world import fake_world


@pytest.fixture
def model() -> Iterator[nn.Sequential]:
    with fake_world(2):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        for module in (model[0], model):
            compile_fsdp.fully_shard(module)
        yield compile_whole(model, inner_backend="aot_eager")


def _group(module: nn.Module) -> TraceableGroup:
    return module_hooks_of(module).hooks.groups[0]


def test_memory_follows_steps_eager_gathers_and_reset(model: nn.Sequential) -> None:
    block, root = _group(model[0]), _group(model)

    def expect(of_block: Memory, of_root: Memory) -> None:
        assert (block.memory, root.memory) == (of_block, of_root)

    expect(Memory.SHARDED, Memory.SHARDED)
    loss = model(torch.ones(2, 4)).sum()
    expect(Memory.SHARDED, Memory.UNSHARDED)
    loss.backward()
    expect(Memory.SHARDED, Memory.SHARDED)
    model[0].unshard()
    expect(Memory.UNSHARDED, Memory.SHARDED)
    model[0].reshard()
    expect(Memory.SHARDED, Memory.SHARDED)
    model(torch.ones(2, 4))
    expect(Memory.SHARDED, Memory.UNSHARDED)
    model.reset_iter_state()
    expect(Memory.SHARDED, Memory.SHARDED)


def test_output_that_the_user_drops_is_freed_before_the_backward(model: nn.Sequential) -> None:
    output = model(torch.ones(2, 4))
    loss, address = output.sum(), output.data_ptr()
    assert any(type(each) is torch.Tensor and each.data_ptr() == address for each in gc.get_objects())
    del output
    assert not any(type(each) is torch.Tensor and each.data_ptr() == address for each in gc.get_objects())
    loss.backward()


def test_group_gathered_ahead_in_vain_is_resharded(model: nn.Sequential) -> None:
    model(torch.ones(2, 4)).sum().backward()
    group, root = _group(model[0]), module_hooks_of(model).hooks.root
    model[0].unshard()
    group.enter(Memory.UNSHARDED_AHEAD, EAGER_GATHER)
    root.ahead.append(group)
    assert group.memory is Memory.UNSHARDED_AHEAD
    root.drop_prefetched()
    assert group.memory is Memory.SHARDED


def test_illegal_step_is_refused(model: nn.Sequential) -> None:
    with pytest.raises(AssertionError, match="illegal step"):
        _group(model[0]).enter(Memory.POST_FORWARD)
