"""Bytes of real text, cut into batches that depend on the seed, the step and the rank alone."""

from __future__ import annotations

import bisect
import itertools
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from compile_fsdp.tools.train.config import TrainError

# Installed packages and test data sit in the standard library's folder on some machines and not on others.
NOT_STANDARD_LIBRARY = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
)


@dataclass(frozen=True, slots=True)
class Corpus:
    """Files read as one long string of bytes, in the order given, without loading them."""

    name: str
    files: tuple[Path, ...]
    starts: tuple[int, ...]
    """Offset in bytes of each file in the long string, and as the last entry the size of the string."""

    @classmethod
    def of(cls, name: str, files: list[Path]) -> Corpus:
        sizes = [file.stat().st_size for file in files]
        return cls(name, tuple(files), tuple(itertools.accumulate(sizes, initial=0)))

    @property
    def size_bytes(self) -> int:
        return self.starts[-1]

    def read(self, start: int, length: int) -> bytes:
        """The `length` bytes at offset `start`, across file borders."""
        assert start in range(self.size_bytes - length + 1)
        parts: list[bytes] = []
        index = bisect.bisect_right(self.starts, start) - 1
        while length > 0:
            skipped = start - self.starts[index]
            wanted = min(length, self.starts[index + 1] - start)
            with self.files[index].open("rb") as file:
                file.seek(skipped)
                part = file.read(wanted)
            if len(part) != wanted:
                raise TrainError(f"{self.files[index]} became shorter while it was being read; start again")
            parts.append(part)
            start, length, index = start + wanted, length - wanted, index + 1
        return b"".join(parts)


def open_corpus(path: Path | None) -> Corpus:
    """The file at `path`, every file in the folder at `path`, or Python's standard library.

    Raises:
        TrainError: there is nothing to read at `path`.
    """
    if path is None:
        return standard_library()
    if path.is_file():
        files = [path]
    elif path.is_dir():
        # Hidden files and folders are settings and version control, not text.
        files = [file for file in sorted_files(path, "*") if not is_hidden(file.relative_to(path))]
    else:
        raise TrainError(f"expected a file or a folder at --data, got {path}, which does not exist")
    corpus = Corpus.of(str(path), files)
    if corpus.size_bytes == 0:
        raise TrainError(f"expected text at --data, got {path}, which holds no bytes")
    return corpus


def standard_library() -> Corpus:
    """The source text of the running Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [
        file
        for file in sorted_files(root, "*.py")
        if NOT_STANDARD_LIBRARY.isdisjoint(file.relative_to(root).parts)
    ]
    corpus = Corpus.of("the Python standard library", files)
    if corpus.size_bytes == 0:
        raise TrainError(
            f"found no source text of the standard library in {root}; give a file or folder with --data"
        )
    return corpus


def is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def sorted_files(root: Path, pattern: str) -> list[Path]:
    """The files below `root` that match, in an order that every rank and every run agrees on."""
    return sorted((file for file in root.rglob(pattern) if file.is_file()), key=lambda file: file.parts)


@dataclass(frozen=True, slots=True)
class Batches:
    """The batches of one rank.

    Sequences start at random places. There is no state to save, since a batch depends on its step alone.
    """

    corpus: Corpus
    seq_len: int
    batch_size: int
    seed: int
    rank: int
    world_size: int

    def __post_init__(self) -> None:
        if self.corpus.size_bytes <= self.seq_len:
            raise TrainError(
                f"expected more than seq_len={self.seq_len} bytes of text, got {self.corpus.size_bytes} in "
                f"{self.corpus.name}; give more text or a smaller --seq-len"
            )

    def at(self, step: int) -> tuple[Tensor, Tensor]:
        """The batch of one step.

        Returns:
            tokens: (batch_size, seq_len) int64, one per byte.
            targets: (batch_size, seq_len) int64, the byte after each token.
        """
        # Every rank draws the starts for all ranks and takes its row, so that the global batch does not depend on the
        # number of ranks that its sequences are spread over.
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        last_start = self.corpus.size_bytes - self.seq_len  # exclusive: a sequence is seq_len + 1 bytes
        starts = torch.randint(last_start, (self.world_size, self.batch_size), generator=generator)[self.rank]
        text = b"".join(self.corpus.read(start, self.seq_len + 1) for start in starts.tolist())
        flat = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
        sequences = flat.view(self.batch_size, self.seq_len + 1)
        return sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous()
