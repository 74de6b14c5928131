"""The command `compile-fsdp precompile`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch.distributed as dist

from compile_fsdp.errors import ScriptError
from compile_fsdp.replay import bundle
from compile_fsdp.tools.check.failures import run_reported
from compile_fsdp.tools.launch import fake_world
from compile_fsdp.tools.protect_files import protected_files
from compile_fsdp.tools.scripts import add_script, ended_after

DESCRIPTION = """\
Run a training script in one process, as one rank of a world whose collectives do nothing, and write the bundles of its
models into a folder. A job of N ranks that finds these bundles traces nothing: in the folder compile_fsdp of Inductor's
cache folder, or where the option `bundle` says. The script's own writes do not reach its files.
"""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world", type=int, required=True, metavar="N", help="ranks of the job")
    parser.add_argument(
        "--rank", type=int, default=0, metavar="R", help="rank and GPU of the process (default 0); each GPU has bundles"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder that gets the bundles")
    add_script(parser)


def run(args: argparse.Namespace) -> None:
    if dist.is_torchelastic_launched():
        raise ScriptError("expected one process, got ranks that torchrun has started; run the command without it")
    with fake_world(args.world, args.rank), protected_files("precompile", args.script) as files:
        with bundle.kept_in(args.out.absolute()) as outcomes, ended_after(args.steps):
            run_reported(args.script, args.args)
        files.keep(outcomes)
    if not outcomes:
        raise ScriptError(
            f"expected a step that a bundle can hold, of a model compiled by its compile method, got none from "
            f"{args.script}; the level INFO of the logger compile_fsdp says why"
        )
    for path, outcome in outcomes.items():
        print(f"{outcome} {path}")
