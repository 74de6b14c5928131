"""The supported releases of torch, checked without an import of torch."""

from __future__ import annotations

OLDEST, NEWEST = (2, 11), (2, 15)


def check_version(version: str) -> None:
    """Raise ImportError for a version that is older than `OLDEST` or newer than `NEWEST`."""
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        (oldest, newest), (major, minor) = (f"{a}.{b}" for a, b in (OLDEST, NEWEST)), NEWEST
        raise ImportError(
            f"compile_fsdp works with torch {oldest} to {newest}, found torch {version}; install one of these, with "
            f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
        )
