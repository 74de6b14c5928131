"""Format sizes, times, counts, lists of names and paragraphs, and parse sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

WIDTH = 80  # columns of a paragraph on the terminal


def format_bytes(size: int) -> str:
    """Format a size, as in `1.5 MiB`."""
    value, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{value:.0f} {unit}" if unit == "B" or value >= 100 else f"{value:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Format a time, as in `1.5 ms`."""
    if seconds >= 1:
        return f"{seconds:.3g} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} us"


def count(number: int, noun: str) -> str:
    """Return the number with its noun, as in `1 group` and `2 groups`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def list_names(names: Iterable[str]) -> str:
    """List the first few names, and the number of further names."""
    first, others = (every := list(names))[:4], every[4:]
    return ", ".join(first) + (f" and {len(others)} more" if others else "")


def fill(text: str, first: str = "", rest: str = "") -> str:
    """Break a paragraph into lines for the terminal; `first` begins the first line, and `rest` the others."""
    texts = textwrap.TextWrapper(WIDTH, first, rest, break_long_words=False, break_on_hyphens=False)
    return texts.fill(text)


def parse_bytes(text: str) -> int:
    """Return the bytes of a size such as `24GiB`, `1.5 MiB` or `4096`; ValueError for a text that is no such size."""
    number = text.rstrip("KMGTiB ")
    units = {"": 1, "B": 1, **{f"{prefix}iB": 2 ** (10 * i) for i, prefix in enumerate("KMGT", start=1)}}
    try:
        return int(float(number) * units[text[len(number) :].strip()])
    except (ValueError, KeyError, OverflowError):
        raise ValueError(f"a size such as 24GiB or 4096, got {text!r}") from None
