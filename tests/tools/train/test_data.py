"""Batches depend on seed, step and rank alone, and hold the text that is in the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from compile_fsdp.tools.train.config import TrainError
from compile_fsdp.tools.train.data import Batches, Corpus, open_corpus


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "texts"
    (root / "b").mkdir(parents=True)
    (root / ".hidden").mkdir()
    (root / "a.txt").write_bytes(b"0123")
    (root / "b" / "c.txt").write_bytes(b"456")
    (root / "b" / "empty.txt").write_bytes(b"")
    (root / "d.txt").write_bytes(b"789")
    (root / ".hidden" / "e.txt").write_bytes(b"no")
    return root


def test_folder_reads_as_one_string_in_sorted_order(folder: Path) -> None:
    corpus = open_corpus(folder)
    assert corpus.size_bytes == 10
    whole = b"0123456789"
    for start in range(11):
        for length in range(11 - start):
            assert corpus.read(start, length) == whole[start : start + length]


def test_one_file(folder: Path) -> None:
    corpus = open_corpus(folder / "a.txt")
    assert corpus.read(0, corpus.size_bytes) == b"0123"


def test_default_is_the_standard_library() -> None:
    corpus = open_corpus(None)
    assert corpus.size_bytes > 5_000_000
    names = {file.name for file in corpus.files}
    assert {"argparse.py", "dataclasses.py"} <= names
    assert not any("site-packages" in file.parts for file in corpus.files)


@pytest.mark.parametrize("name", ["missing", "void"])
def test_nothing_to_read_is_an_error_that_names_the_path(tmp_path: Path, name: str) -> None:
    (tmp_path / "void").mkdir()
    with pytest.raises(TrainError, match=name):
        open_corpus(tmp_path / name)


def test_text_shorter_than_a_sequence_is_an_error(folder: Path) -> None:
    with pytest.raises(TrainError, match="seq_len=10 bytes of text, got 10"):
        batches(open_corpus(folder), seq_len=10)


def test_file_that_shrinks_while_read_is_an_error(folder: Path) -> None:
    corpus = open_corpus(folder)
    (folder / "d.txt").write_bytes(b"7")
    with pytest.raises(TrainError, match=r"d\.txt became shorter"):
        corpus.read(7, 3)


def test_targets_are_the_next_bytes_and_every_place_is_drawn(folder: Path) -> None:
    stream = batches(open_corpus(folder), seq_len=3)
    seen = set()
    for step in range(50):
        tokens, targets = stream.at(step)
        assert tokens.shape == targets.shape == (2, 3)
        assert tokens.dtype == targets.dtype == torch.int64
        assert torch.equal(targets, tokens + 1)  # the text counts up
        seen.update(tokens[:, 0].tolist())
    assert seen == set(b"0123456")


def test_a_batch_depends_on_seed_step_and_rank_alone(folder: Path) -> None:
    corpus = open_corpus(None)
    forwards = [batches(corpus).at(step)[0] for step in range(4)]
    backwards = [batches(corpus).at(step)[0] for step in reversed(range(4))]
    assert all(torch.equal(a, b) for a, b in zip(forwards, reversed(backwards), strict=True))
    others = [batches(corpus, seed=1), batches(corpus, rank=1)]
    assert not any(torch.equal(other.at(0)[0], forwards[0]) for other in others)
    assert not torch.equal(forwards[0], forwards[1])


def test_the_global_batch_does_not_depend_on_the_number_of_ranks() -> None:
    corpus = open_corpus(None)
    alone = batches(corpus, batch_size=4, world_size=1).at(7)[0]
    spread = [batches(corpus, batch_size=2, rank=rank, world_size=2).at(7)[0] for rank in range(2)]
    assert torch.equal(torch.cat(spread), alone)


def batches(
    corpus: Corpus, seq_len: int = 16, batch_size: int = 2, seed: int = 0, rank: int = 0, world_size: int = 2
) -> Batches:
    return Batches(corpus, seq_len, batch_size, seed, rank, world_size)
