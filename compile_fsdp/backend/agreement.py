"""Ranks agree on the collectives of a graph before it first runs.

A rank whose graph has other collectives than its peers' hangs, and they with it, until a watchdog ends the job. So each
rank compares what it has compiled with the others, and all of them raise where there is a difference. The comparison
runs over the process groups' key-value stores, not over collectives: it has a time limit of its own, which covers that
some ranks find in a cache what others compile for minutes. The ranks of a process group compare what they issue in it,
and in groups that hold all of them. With Inductor it covers all that the compiled graph issues,
in the order of the passes; with another inner backend what Dynamo has traced, which lacks the collectives that tensor
subclasses issue themselves, as DTensor does for tensor parallelism.

[Note: Agreed once is agreed]
A rank may compile a graph that the others do not, for a batch of another size for example. Its collectives are those
that all have agreed on before, and nobody waits for anybody. What is agreed on is remembered by process group, and is
the same on all of its ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import NoReturn
from weakref import WeakKeyDictionary

import torch.distributed as dist

from compile_fsdp.backend.progress import Phase
from compile_fsdp.errors import CollectiveMismatchError, RankMissingError
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.torch_compat.distributed import group_store, resolve_group

DEFAULT_LIMIT_S = 1800.0

_FAKE = "fake"  # a backend whose other ranks do not exist


@dataclass(slots=True)
class _Agreed:
    """What the ranks of one process group have agreed on.

    Attributes:
        rounds: Comparisons until now.
        digests: Of the sequences.
    """

    rounds: int = 0
    digests: set[str] = field(default_factory=set)


_agreed: WeakKeyDictionary[dist.ProcessGroup, _Agreed] = WeakKeyDictionary()


def agree(sequence: CollectiveSequence, what: str, limit_s: float, shown: bool) -> bool:
    """Compare the collectives of a graph with those of the other ranks of its process groups.

    Args:
        sequence: The collectives.
        what: The graph's name in errors and messages.
        limit_s: Seconds to wait for the other ranks.
        shown: Whether rank 0 says that it waits.
    Returns:
        Whether all ranks of all these groups were here. False where they had agreed on the sequence before.
    Raises:
        CollectiveMismatchError: on every rank of a group whose ranks differ.
        RankMissingError: a rank does not come within the limit.
    """
    are_all_here = True
    with _Meeting(what, limit_s, shown) as meeting:
        for name, group in real_groups(sequence.groups):
            lines = shared_lines(sequence, group)
            digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
            if digest in _agreed_in(group).digests:
                are_all_here = False  # See [Note: Agreed once is agreed].
                continue
            verdict = meeting.decide(group, name, digest, _first_other)
            if verdict:
                _raise_mismatch(meeting, group, int(verdict), lines)
            _agreed_in(group).digests.add(digest)
    return are_all_here


def share_problem(sequence: CollectiveSequence, what: str, problem: str, limit_s: float) -> str:
    """What is wrong on the first rank that has a problem, on all ranks of the process groups; "" if none has.

    Args:
        sequence: Whose process groups.
        what: What the ranks look at, in errors.
        problem: What is wrong on this rank, or "".
        limit_s: Seconds to wait for the other ranks.
    Raises:
        RankMissingError: a rank does not come within the limit.
    """
    return share_by(
        sequence.groups, what, problem, limit_s, lambda problems: next(filter(None, problems), "")
    )


def share_choice(names: Collection[str], what: str, choice: str, limit_s: float) -> str:
    """Whether all ranks of some process groups have chosen the same; decided for all of them together.

    Args:
        names: What graphs call the process groups.
        what: What is chosen, in errors.
        choice: This rank's, as "=" and the choice, or why it has none.
        limit_s: Seconds to wait for the other ranks.
    Returns:
        "" if all have chosen the same; else why one has not.
    Raises:
        RankMissingError: a rank does not come within the limit.
    """

    def judge(choices: Sequence[str]) -> str:
        without = next((each for each in choices if not each.startswith("=")), None)
        return without or (choices[0] if len(set(choices)) == 1 else "the ranks have different ones")

    choice = share_by(names, what, choice, limit_s, judge)
    return "" if choice.startswith("=") else choice


def share_largest(
    names: Collection[str], what: str, own: tuple[int, str], limit_s: float, shown: bool = False
) -> str:
    """What the rank with the largest number says, on all ranks of the process groups; of equals, the first rank.

    Args:
        names: What graphs call the process groups.
        what: What the ranks talk about, in errors.
        own: This rank's number, and what it says.
        limit_s: Seconds to wait for the other ranks.
        shown: Whether rank 0 says that it waits.
    Raises:
        RankMissingError: a rank does not come within the limit.
    """

    def judge(texts: Sequence[str]) -> str:
        return max(texts, key=lambda text: int(text.partition(" ")[0]))

    return share_by(names, what, f"{own[0]} {own[1]}", limit_s, judge, shown).partition(" ")[2]


def share_by(
    names: Collection[str],
    what: str,
    own: str,
    limit_s: float,
    judge: Callable[[Sequence[str]], str],
    shown: bool = False,
) -> str:
    """What becomes of this rank's text when one process group after the other decides, on all of their ranks.

    Args:
        names: What graphs call the process groups.
        what: What the ranks talk about, in errors.
        own: What this rank says.
        limit_s: Seconds to wait for the other ranks.
        judge: What the first rank of a process group makes of what all of its ranks say, by rank.
        shown: Whether rank 0 says that it waits.
    Raises:
        RankMissingError: a rank does not come within the limit.
    """
    with _Meeting(what, limit_s, shown) as meeting:
        for name, group in real_groups(names):
            own = meeting.decide(group, name, own, judge)
    return own


def real_groups(names: Collection[str]) -> Iterator[tuple[str, dist.ProcessGroup]]:
    """Of the process groups that graphs call by these names, those with other ranks, in one order on all of them."""
    for name in sorted(names):
        group = resolve_group(name)
        if group.size() > 1 and dist.get_backend(group) != _FAKE:
            yield name, group


def shared_lines(sequence: CollectiveSequence, group: dist.ProcessGroup) -> tuple[str, ...]:
    """Of a graph's collectives, those that all ranks of a process group must issue alike, as text."""
    return sequence.lines([each for each in sequence.groups if _holds_all_of(resolve_group(each), group)])


def _holds_all_of(other: dist.ProcessGroup, group: dist.ProcessGroup) -> bool:
    """Whether every rank of `group` is in `other`, too: what it issues there must be equal on all of them.

    Ranks of one data-parallel group may be in different tensor-parallel groups, whose shards differ in size.
    """
    return set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(other))


def _agreed_in(group: dist.ProcessGroup) -> _Agreed:
    return _agreed.setdefault(group, _Agreed())


def _first_other(digests: Sequence[str]) -> str:
    return next((str(rank) for rank, digest in enumerate(digests) if digest != digests[0]), "")


class _Meeting:
    """Where ranks wait for each other.

    Attributes:
        what: What they look at, in errors and messages.
        limit_s: Seconds to wait for the other ranks.
        prefix: Of the keys of the present decision in the store.
    """

    def __init__(self, what: str, limit_s: float, shown: bool) -> None:
        self.what = what
        self.limit_s = limit_s
        self.prefix = ""
        self._phase = Phase(f"waiting for the other ranks' {what}", shown)

    def __enter__(self) -> _Meeting:
        return self

    def __exit__(self, *_: object) -> None:
        self._phase.end()

    def decide(self, group: dist.ProcessGroup, name: str, own: str, judge: Callable[[Sequence[str]], str]) -> str:
        """What the first rank of a group makes of what all of its ranks say, by rank."""
        agreed, store = _agreed_in(group), group_store(group)
        prefix = f"compile_fsdp/{name}/{agreed.rounds}"
        agreed.rounds += 1
        # A process group that was destroyed and made again may meet at the same store.
        self.prefix = f"{prefix}/{(store.add(f'{prefix}/arrivals', 1) - 1) // group.size()}"
        store.set(f"{self.prefix}/{group.rank()}", own)
        if group.rank() == 0:
            texts = [self.get(group, rank, str(rank)) for rank in range(group.size())]
            store.set(f"{self.prefix}/verdict", judge(texts))
        return self.get(group, 0, "verdict")

    def get(self, group: dist.ProcessGroup, rank: int, key: str) -> str:
        """What a rank says."""
        store = group_store(group)
        try:
            store.wait([f"{self.prefix}/{key}"], timedelta(seconds=self.limit_s))
        except RuntimeError as error:  # a FileStore has no error of its own for it
            raise RankMissingError(
                f"expected rank {dist.get_global_rank(group, rank)} to compile its {self.what} within "
                f"{self.limit_s:g} s, got nothing from it; look for its error, or for a step that it does not compile; "
                "if it only needs longer, raise the option agreement_timeout_s"
            ) from error
        return store.get(f"{self.prefix}/{key}").decode()


def _raise_mismatch(meeting: _Meeting, group: dist.ProcessGroup, other: int, lines: tuple[str, ...]) -> NoReturn:
    if group.rank() in (0, other):
        group_store(group).set(f"{meeting.prefix}/lines/{group.rank()}", json.dumps(lines))
    first, second = (json.loads(meeting.get(group, rank, f"lines/{rank}")) for rank in (0, other))
    ranks = [dist.get_global_rank(group, rank) for rank in (0, other)]
    found = first_difference(ranks, first, second)
    raise CollectiveMismatchError(
        f"expected the same collectives in the {meeting.what} of all ranks, got {found}; build and "
        "shard the same model with the same options on all ranks, and let no branch of its forward depend on the rank"
    )


def first_difference(ranks: Sequence[int], first: Sequence[str], second: Sequence[str]) -> str:
    """Where the collectives of two ranks differ, for an error."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    at = next(differing, min(len(first), len(second)))
    own = [lines[at] if at < len(lines) else "no further collective" for lines in (first, second)]
    return f"at position {at}: on rank {ranks[0]} {own[0]}; on rank {ranks[1]} {own[1]}"
