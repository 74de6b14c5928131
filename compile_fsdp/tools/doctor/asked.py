"""Detect `compile-fsdp doctor`, which runs even if the package itself cannot be imported.

[Note: A doctor for a failing import]
`import compile_fsdp` fails with an unsupported release of torch, or if torch cannot make its cache folder. So that the
doctor can report these faults, the package imports nothing for this command, and each check imports the modules that it
needs. The check must meet the error first, because a second import of torch's modules fails with a different error.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAME = "doctor"


def is_asked_for() -> bool:
    """Whether the process runs `compile-fsdp doctor` or `python -m compile_fsdp doctor`, by its arguments."""
    if sys.argv[1:2] != [NAME]:
        return False
    if sys.argv[0] == "-m":  # until Python has found the module, whose path it puts here
        return sys.orig_argv[-len(sys.argv)] == "compile_fsdp"
    return Path(sys.argv[0]).stem == "compile-fsdp"
