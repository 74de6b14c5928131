"""The command `compile-fsdp calibrate`."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from compile_fsdp.errors import CommandError
from compile_fsdp.passes import Costs
from compile_fsdp.passes.analysis.costs import usual_costs
from compile_fsdp.tools import launch
from compile_fsdp.tools.calibrate.measure import Measurements, measure
from compile_fsdp.tools.scripts import check_output

DESCRIPTION = """\
Measure latency and bandwidth of all-gathers and reduce-scatters over each dim of a mesh, and the speed of copies and
matrix products on the device. Write the costs over the last dim, over which HSDP shards, to a file for the option
`costs`. Runs on new ranks, or on the ranks of torchrun.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, metavar="N", help="without torchrun (default: the GPUs, or 2 on CPUs)")
    parser.add_argument("--mesh", type=_shape, metavar="NxN", help="sizes of the dims, such as 2x8 (default: one dim)")
    parser.add_argument(
        "--dtype", type=_dtype, default="bfloat16", metavar="NAME", help="of the matrices (default %(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("costs.json"), metavar="FILE", help="default %(default)s")


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split("x"))


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise argparse.ArgumentTypeError(f"expected the name of a floating-point dtype, got {name}")
    return found


def run(args: argparse.Namespace) -> None:
    check_output(args.output)
    if dist.is_torchelastic_launched():
        if args.ranks is not None:
            raise CommandError(f"expected no --ranks under torchrun, which starts the ranks, got {args.ranks}")
        ranks = int(os.environ["WORLD_SIZE"])
    else:
        devices = torch.accelerator.device_count()
        ranks = args.ranks or devices or 2
        if 0 < devices < ranks:
            raise CommandError(f"expected at most one rank per GPU of this host, got --ranks {ranks} for {devices}")
    shape = args.mesh or (ranks,)
    if shape[-1] == 1:
        raise CommandError(f"expected two ranks or more in the last dim, got {shape[-1]}: one rank gathers nothing")
    if min(shape) < 1 or math.prod(shape) != ranks:
        shown = "x".join(map(str, shape))
        raise CommandError(f"expected --mesh with as many places as ranks, got {shown} for {ranks}; see --ranks")
    arguments = shape, args.dtype, args.output
    if dist.is_torchelastic_launched():
        _calibrate(int(os.environ["RANK"]), *arguments)
        return
    try:
        launch.run(ranks, _calibrate, *arguments)
    except (launch.RankError, launch.RankLost) as error:
        reason = str(error).strip().splitlines()[-1]
        raise CommandError(f"expected {ranks} ranks on this host, got a failed rank: {reason}") from error


def _calibrate(rank: int, shape: Sequence[int], dtype: torch.dtype, output: Path) -> None:
    device = launch.use_device()
    if device.type == "cpu":
        torch.set_num_threads(1)
    launch.join(device, timeout_s=300.0)
    try:
        mesh = init_device_mesh(device.type, tuple(shape))
        lines: list[str] = []
        for dim, size in enumerate(shape):
            if size > 1:
                measured = measure(mesh.get_group(dim), device, dtype)
                costs = measured.costs(usual_costs(device))
                lines += _describe(dim, size, dtype, measured, costs)
        if rank == 0:
            output.write_text(json.dumps(asdict(costs), indent=1) + "\n")
            print("\n".join(lines))
            print(f'costs over dim {dim} in {output}: options={{"costs": "{output}"}}, or COMPILE_FSDP_COSTS={output}')
    finally:
        dist.destroy_process_group()


def _describe(dim: int, size: int, dtype: torch.dtype, measured: Measurements, costs: Costs) -> Iterator[str]:
    yield f"mesh dim {dim}, {size} ranks, {str(dtype).removeprefix('torch.')}"
    for name, link in (("all-gather", measured.gather), ("reduce-scatter", measured.reduction)):
        yield f"  {name:14} {link.latency * 1e6:8.0f} us  {link.bandwidth / 1e9:8.2f} GB/s"
    yield f"  {'copy':14} {'':8}     {measured.copy_bandwidth / 1e9:8.2f} GB/s"
    yield f"  {'product':14} {'':8}     {measured.flops / 1e9:8.0f} GFLOP/s"
    if measured.offload_bandwidth:
        yield f"  {'to the host':14} {'':8}     {measured.offload_bandwidth / 1e9:8.2f} GB/s"
    yield (
        f"  costs          {costs.latency * 1e6:8.0f} us  {costs.comm_bandwidth / 1e9:8.2f} GB/s, copies "
        f"{costs.memory_bandwidth / 1e9:.0f} GB/s, {costs.flops / 1e9:.0f} GFLOP/s"
    )
