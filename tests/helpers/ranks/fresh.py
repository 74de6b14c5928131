"""Run code in a new process that has imported and compiled nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def run_fresh(source: str, *arguments: Any, **environment: str) -> tuple[Any, str]:
    """Run code that can import the helpers.

    Args:
        source: The code; it prints its result as the last line, as JSON.
        arguments: Passed to the code as a JSON list in `sys.argv[1]`.
        environment: Variables to set.
    Returns:
        The result, and the output printed before it.
    """
    paths = os.pathsep.join([str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**os.environ, "PYTHONPATH": paths, **environment}
    command = [sys.executable, "-c", source, json.dumps(arguments)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *before, result = done.stdout.splitlines()
    return json.loads(result), "\n".join(before)
