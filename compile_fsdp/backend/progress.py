"""Announce long compilation phases on the first rank."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import AbstractContextManager

import torch.distributed as dist

PATIENCE_S = 2.0


class Phase(AbstractContextManager["Phase"]):
    """A piece of work from its creation to `end()`, announced on stderr if it takes more than `PATIENCE_S` seconds."""

    def __init__(self, text: str, shown: bool = True) -> None:
        self._text = text
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None
        self._announced = False
        if shown and (not dist.is_initialized() or dist.get_rank() == 0):
            self._timer = threading.Timer(PATIENCE_S, self._announce)
            self._timer.daemon = True
            self._timer.start()

    def __exit__(self, *_: object) -> None:
        self.end()

    def _announce(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._announced = True
                self._write("...")

    def end(self) -> None:
        """End the phase, also after a failure; a second call does nothing."""
        with self._lock:
            timer, self._timer = self._timer, None
        if timer is None:
            return
        timer.cancel()
        if self._announced:
            self._write(f"took {time.monotonic() - self._start:.0f} s")

    def _write(self, what: str) -> None:
        print(f"compile_fsdp: {self._text} {what}", file=sys.stderr, flush=True)
