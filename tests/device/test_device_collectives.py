"""The emulated device's process group: values, asynchrony, races and link speed."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from compile_fsdp.tools import launch
from helpers.device.install import held, install
from helpers.ranks.tests import on_ranks


@on_ranks(2, "emulated")
def test_collectives_return_the_expected_values(rank: int) -> None:
    x = torch.arange(4.0) + 10 * rank
    reduced, mean = x.clone(), x.clone()
    dist.all_reduce(reduced)
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    sent = x.clone()
    dist.broadcast(sent, src=1)
    parts = [torch.empty(4) for _ in range(2)]
    dist.all_gather(parts, x)
    exchanged = torch.empty(4)
    dist.all_to_all_single(exchanged, x)
    scattered = torch.empty(2)
    dist.scatter(scattered, [x[:2].clone(), x[2:].clone()] if rank == 0 else None, src=0)
    gathered = [torch.empty(4) for _ in range(2)] if rank == 1 else None
    dist.gather(x, gathered, dst=1)
    summed = x.clone()
    dist.reduce(summed, dst=0)
    passed = torch.empty(4)
    for task in dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, passed, 1 - rank)]
    ):
        task.wait()
    world = dist.group.WORLD
    both = getattr(functional, "all_gather_single", functional.all_gather_tensor)(x, 0, world)
    half = getattr(functional, "reduce_scatter_single", functional.reduce_scatter_tensor)(x, "sum", 0, world)
    several = functional.all_gather_into_tensor_coalesced([x[:1].clone(), x[1:2].clone()], world)
    dist.barrier()
    results = {
        "all_reduce": reduced,
        "mean": mean,
        "broadcast": sent,
        "all_gather": torch.cat(parts),
        "all_to_all": exchanged,
        "scatter": scattered,
        "passed": passed,
        "functional all_gather": both,
        "functional reduce_scatter": half,
        "coalesced": torch.cat(tuple(several)),
    }
    if gathered is not None:
        results["gather"] = torch.cat(gathered)
    else:
        results["reduce"] = summed
    rows = [[0.0, 1, 2, 3], [10.0, 11, 12, 13]]
    total = [a + b for a, b in zip(*rows, strict=True)]
    assert {name: result.tolist() for name, result in results.items()} == {
        "all_reduce": total,
        "mean": [each / 2 for each in total],
        "broadcast": rows[1],
        "all_gather": rows[0] + rows[1],
        "all_to_all": [each for row in rows for each in row[2 * rank : 2 * rank + 2]],
        "scatter": rows[0][2 * rank : 2 * rank + 2],
        "passed": rows[1 - rank],
        "functional all_gather": rows[0] + rows[1],
        "functional reduce_scatter": total[2 * rank : 2 * rank + 2],
        "coalesced": [rows[0][0], rows[1][0], rows[0][1], rows[1][1]],
        **({"gather": rows[0] + rows[1]} if rank == 1 else {"reduce": total}),
    }


@on_ranks(2, "emulated")
def test_wait_blocks_the_stream_and_not_the_host(rank: int) -> None:
    x = torch.ones(4)
    torch.emulated.synchronize()
    with held():
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        assert not work.is_completed()
        y = x + 1  # queued after the wait
    assert y.sum().item() == 12
    assert work.is_completed()


@on_ranks(2, "emulated")
def test_reading_a_result_before_wait_is_a_race(rank: int) -> None:
    x = torch.ones(4)
    work = dist.all_reduce(x, async_op=True)
    race = r"^race on a tensor without a name: aten::add.*what c10d::ALLREDUCE on stream"
    with pytest.raises(RuntimeError, match=race):
        x + 1
    work.wait()
    assert (x + 1).sum().item() == 12


@on_ranks(2, "emulated")
def test_set_link_slows_collectives_down(rank: int) -> None:
    """A 32 KiB all-gather on the default link and a slow link; half the bytes are received."""
    shard, whole = torch.ones(2**12), torch.empty(2**13)
    seconds = []
    for link in ((0.0, 0.0), (0.05, 2.0**17)):
        install().set_link(*link)
        dist.barrier()
        torch.accelerator.synchronize()
        start = time.perf_counter()
        dist.all_gather_into_tensor(whole, shard)
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    install().set_link(0.0, 0.0)
    fast, slow = seconds
    assert fast < 0.05 + 2**14 / 2**17 <= slow


@on_ranks(1, "emulated")
def test_fake_world_has_an_accelerator_of_an_extension(rank: int) -> None:
    dist.destroy_process_group()
    with launch.fake_world(2):
        gathered = torch.empty(4)
        dist.all_gather_into_tensor(gathered, torch.ones(2))
        assert gathered.tolist() == [1.0] * 4
