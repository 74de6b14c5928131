"""`python -m compile_fsdp` runs the command `compile-fsdp`."""

import sys

from compile_fsdp.cli import main

if __name__ == "__main__":
    sys.exit(main())
