"""Run the command `compile-fsdp` as `python -m compile_fsdp`."""

import sys

from compile_fsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
