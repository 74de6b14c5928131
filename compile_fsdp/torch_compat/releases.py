"""The releases of torch that this is for, known without torch."""

from __future__ import annotations

OLDEST, NEWEST = (2, 11), (2, 15)


def check_version(version: str) -> None:
    """Refuse a torch that is too old or too new.

    Raises:
        ImportError: it is neither of these releases nor between them.
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    if not OLDEST <= release <= NEWEST:
        (oldest, newest), (major, minor) = (f"{a}.{b}" for a, b in (OLDEST, NEWEST)), NEWEST
        raise ImportError(
            f"compile_fsdp works with torch {oldest} to {newest}, found torch {version}; install one of these, with "
            f"pip install 'torch>={oldest},<{major}.{minor + 1}'"
        )
