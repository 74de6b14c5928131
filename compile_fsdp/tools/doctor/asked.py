"""Whether this process is `compile-fsdp doctor`, which runs where the package itself cannot be imported.

[Note: A doctor for what does not import]
`import compile_fsdp` fails with a torch that does not fit, or where torch cannot make the folder for its caches. The
command that is to say so would fail with it. For that command the package imports nothing: each check imports what it
needs, and meets the error first. A second import of torch's modules would end in another one.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAME = "doctor"


def is_asked_for() -> bool:
    """By the arguments of the process: `compile-fsdp doctor`, or `python -m compile_fsdp doctor`."""
    if sys.argv[1:2] != [NAME]:
        return False
    if sys.argv[0] == "-m":  # while Python looks for the module, whose name stands in place of it
        return sys.orig_argv[-len(sys.argv)] == "compile_fsdp"
    return Path(sys.argv[0]).stem == "compile-fsdp"
