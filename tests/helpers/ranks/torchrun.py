"""Run a command on two ranks with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

TIMEOUT_S = 600  # compiling takes minutes on a busy machine
GRACE_S = 60  # torchrun gives its ranks 30


def torchrun(
    folder: Path, *command: object, max_restarts: int = 0, environment: Mapping[str, str] | None = None
) -> str:
    """Run `command` on two ranks and return their output.

    Args:
        folder: Working directory; outside the repository, so that ranks import the installed package.
        command: A Python file, or "-m" and a module, and the arguments.
        max_restarts: How often torchrun restarts the ranks after a failure.
        environment: Variables added to this process's environment.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, "--max-restarts", str(max_restarts), *map(str, command)],
        cwd=folder,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S * (1 + max_restarts))
    except BaseException:
        stop(process)
        raise
    assert process.returncode == 0, output
    return output


def stop(process: subprocess.Popen[str]) -> None:
    """Stop torchrun and, through it, its ranks, because each rank has its own session."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
