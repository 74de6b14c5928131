"""Run a command on ranks of its own, as a user does with torchrun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

TIMEOUT_S = 600  # compiling takes minutes on a machine that is busy with other things


def torchrun(folder: Path, *command: object) -> str:
    """Run `command` on two ranks and return what they print.

    Args:
        folder: Where to run it; not the repository, so that its folders do not stand in for the installed package.
        command: A Python file, or "-m" and a module, and the arguments.
    """
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    process = subprocess.Popen(
        [*launcher, *map(str, command)],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=TIMEOUT_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)  # torchrun and its ranks
        process.wait()
        raise
    assert process.returncode == 0, output
    return output
