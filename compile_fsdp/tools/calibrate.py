"""`compile-fsdp calibrate`: measure, store and print the costs that the passes use, before the first job."""

from __future__ import annotations

import argparse
import math
import os
import tempfile
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import spawn

from compile_fsdp.calibration import store
from compile_fsdp.calibration.measure import Measurements, measure
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.costs import usual_costs
from compile_fsdp.tools.train.config import DeviceChoice, TrainError
from compile_fsdp.tools.train.world import backends_of, join_world, pick_device

DESCRIPTION = """\
Measure latency and bandwidth of all-gathers and reduce-scatters over each dim of a mesh, and how fast the device copies
and multiplies matrices, and keep the numbers: the first compile of a job on the same device and mesh takes them instead
of measuring itself. Runs on ranks of its own, or on those that torchrun has started.
"""

TIMEOUT_S = 300.0


def add_parser(subcommands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `calibrate` to the command line."""
    parser = subcommands.add_parser("calibrate", help="measure what the passes decide by", description=DESCRIPTION)
    parser.set_defaults(run=run)
    parser.add_argument(
        "--ranks", type=int, default=None, metavar="N", help="without torchrun (default: the GPUs, or 2 on CPUs)"
    )
    parser.add_argument(
        "--mesh", type=_shape, default=None, metavar="NxN", help="sizes of the dims, such as 2x8 (default: one dim)"
    )
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        default="float32,bfloat16",
        metavar="NAME,NAME",
        help="of the matrices (default %(default)s)",
    )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _dtypes(text: str) -> tuple[torch.dtype, ...]:
    names = text.split(",")
    named = (getattr(torch, name, None) for name in names)
    found = tuple(each for each in named if isinstance(each, torch.dtype) and each.is_floating_point)
    if len(found) < len(names):
        raise argparse.ArgumentTypeError(f"expected names of floating-point dtypes, got {text}")
    return found


def run(args: argparse.Namespace) -> None:
    """Measure the costs and print them on rank 0.

    Raises:
        TrainError: if there is only one rank, or the mesh does not have as many places as ranks. Under torchrun, also
            if `--ranks` is given, or a GPU or a rank is missing.
    """
    if dist.is_torchelastic_launched():
        if args.ranks is not None:
            raise TrainError(f"expected no --ranks under torchrun, which starts the ranks, got {args.ranks}")
        _check(int(os.environ["WORLD_SIZE"]), args.mesh)
        with join_world(DeviceChoice.AUTO, TIMEOUT_S) as world:
            _calibrate(world.device, args.mesh or (world.size,), args.dtype)
        return
    ranks = args.ranks or (torch.accelerator.device_count() or 2)
    _check(ranks, args.mesh)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_spawned, args=(ranks, args.mesh or (ranks,), args.dtype, f"{folder}/store"), nprocs=ranks)


def _check(ranks: int, mesh: Sequence[int] | None) -> None:
    if ranks < 2:
        raise TrainError(f"expected two ranks or more, got {ranks}: one rank gathers nothing")
    if mesh is not None and (min(mesh) < 1 or math.prod(mesh) != ranks):
        shown = "x".join(map(str, mesh))
        raise TrainError(f"expected --mesh with as many places as ranks, got {shown} for {ranks}; see --ranks")


def _spawned(rank: int, ranks: int, mesh: Sequence[int], dtypes: Sequence[torch.dtype], path: str) -> None:
    # The variables that torchrun sets for ranks of one host.
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(ranks)})
    device = pick_device(DeviceChoice.AUTO)
    if device.type == "cpu":
        torch.set_num_threads(1)
    file_store = dist.FileStore(path, ranks)  # type: ignore[attr-defined]
    dist.init_process_group(backends_of(device), store=file_store, rank=rank, world_size=ranks)
    try:
        _calibrate(device, mesh, dtypes)
    finally:
        dist.destroy_process_group()


def _calibrate(device: torch.device, shape: Sequence[int], dtypes: Sequence[torch.dtype]) -> None:
    mesh = init_device_mesh(device.type, tuple(shape))
    usual = usual_costs(device)
    lines: list[str] = []
    for dim, size in enumerate(shape):
        group = mesh.get_group(dim)
        for dtype in dtypes if size > 1 else ():
            key, measured = store.circumstances(group, device, dtype), measure(group, device, dtype)
            if group.rank() == 0:
                store.write(key, measured)
            lines += _describe(dim, size, dtype, measured, usual, str(store.path_of(key)))
    if dist.get_rank() == 0:
        print("\n".join(lines))


def _describe(
    dim: int, size: int, dtype: torch.dtype, measured: Measurements, usual: Costs, path: str
) -> Iterator[str]:
    costs = measured.costs(usual)
    yield f"mesh dim {dim}, {size} ranks, {str(dtype).removeprefix('torch.')}"
    for name, link in (("all-gather", measured.gather), ("reduce-scatter", measured.reduction)):
        yield f"  {name:14} {link.latency * 1e6:8.0f} us  {link.bandwidth / 1e9:8.2f} GB/s"
    yield f"  {'copy':14} {'':8}     {measured.copy_bandwidth / 1e9:8.2f} GB/s"
    yield f"  {'product':14} {'':8}     {measured.flops / 1e9:8.0f} GFLOP/s"
    if measured.offload_bandwidth:
        yield f"  {'to the host':14} {'':8}     {measured.offload_bandwidth / 1e9:8.2f} GB/s"
    yield (
        f"  decided by     {costs.latency * 1e6:8.0f} us  {costs.comm_bandwidth / 1e9:8.2f} GB/s, copies "
        f"{costs.memory_bandwidth / 1e9:.0f} GB/s, {costs.flops / 1e9:.0f} GFLOP/s"
    )
    yield f"  kept in {path}"
