"""Replay a traced step, in its process or from a file."""

import time

# The time when this process imported the package.
IMPORTED_S = time.time()
