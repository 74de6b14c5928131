"""Compare the collectives of a graph across ranks before its first run.

If one rank issues collectives that differ from its peers', all of them hang until a watchdog ends the job. So ranks
compare their graphs, and each of them raises if there is a difference. The comparison uses the key-value stores of the
process groups instead of collectives, because it needs a separate time limit: some ranks load a graph from a cache
while their peers compile it for minutes. The ranks of a process group compare the collectives in this group and in
groups that contain all of them. With Inductor, these are all collectives of the compiled graph, in the order of the
passes. With a different inner backend, they are the collectives in Dynamo's graph, without those that tensor
subclasses issue themselves, as DTensor does for tensor parallelism.

[Note: Agreed once is agreed]
A rank may compile a graph that its peers do not compile, for a different batch size for example. If all ranks have
agreed on its collectives before, the rank waits for nobody. Each process group has a set of agreed sequences, which is
equal on all of its ranks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from operator import attrgetter
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from compile_fsdp.backend.progress import Phase
from compile_fsdp.errors import CollectiveMismatchError, RankMissingError
from compile_fsdp.passes.analysis.sequence import CollectiveSequence
from compile_fsdp.torch_compat.distributed import group_store, resolve_group

DEFAULT_LIMIT_S = 1800.0

_FAKE = "fake"  # backend of a process group whose peers do not exist


@dataclass(slots=True)
class _Agreed:
    """Sequences that the ranks of one process group have agreed on."""

    rounds: int = 0  # number of decisions begun so far
    # By SHA-256 digest of a sequence: whether the ranks' graphs were equal in all else, too.
    are_equal: dict[str, bool] = field(default_factory=dict)


_agreed: WeakKeyDictionary[dist.ProcessGroup, _Agreed] = WeakKeyDictionary()


class GraphAgreement(NamedTuple):
    """How far the ranks agree on a graph, beyond its collectives."""

    are_all_here: bool  # whether all ranks of its groups met; False if a group had agreed on the collectives before
    are_equal: bool  # whether the ranks that met, now or over these collectives before, had equal graphs


def agree(sequence: CollectiveSequence, graph: str, what: str, limit_s: float, shown: bool) -> GraphAgreement:
    """Compare a graph's collectives with the peers in its process groups, which may differ in the rest of the graph.

    `graph` is the text of the whole graph. `what` names it in errors and messages; `limit_s` and `shown` are arguments
    of `share_by`.

    Raises:
        CollectiveMismatchError: the ranks of a group differ; raised on each of them.
        RankMissingError: a rank does not arrive within the limit.
    """
    are_all_here, are_equal = True, True
    with Phase(f"waiting for the other ranks' {what}", shown):
        for group in real_groups(sequence.groups):
            lines = shared_lines(sequence, group)
            digest, agreed = hash_lines(lines), _agreed_in(group).are_equal
            if digest in agreed:
                are_all_here = False  # See [Note: Agreed once is agreed].
            else:
                own = f"{digest} {hash_lines([graph])}"
                collectives, graphs = _decide(group, what, own, limit_s, _count_different).split()
                if collectives != "1":
                    found = _decide(group, what, json.dumps(lines), limit_s, partial(_first_mismatch, group))
                    raise CollectiveMismatchError(
                        f"expected the same collectives in the {what} of all ranks, got {found}; build and shard the "
                        "same model with the same options on all ranks, and let no branch of its forward depend on the "
                        "rank"
                    )
                agreed[digest] = graphs == "1"
            are_equal = are_equal and agreed[digest]
    return GraphAgreement(are_all_here, are_equal)


def _count_different(texts: Sequence[str]) -> str:
    """Count the different words at each position of the ranks' texts."""
    return " ".join(str(len({*words})) for words in zip(*map(str.split, texts), strict=True))


def note_agreed(sequence: CollectiveSequence) -> None:
    """Note that all ranks have agreed on a graph's collectives: see [Note: Agreed once is agreed]."""
    for group in real_groups(sequence.groups):
        _agreed_in(group).are_equal.setdefault(hash_lines(shared_lines(sequence, group)), True)


def share_choice(names: Collection[str], what: str, choice: str, limit_s: float) -> str:
    """Decide whether all ranks of the process groups have equal choices.

    `choice` is this rank's choice as "=" and a text, or its problem, for which it has none. Returns "" if all choices
    are equal; else the first problem, or that the choices differ. See `share_by` for the remaining arguments and the
    error.
    """

    def judge(choices: Sequence[str]) -> str:
        without = next((each for each in choices if not each.startswith("=")), None)
        return without or (choices[0] if len(set(choices)) == 1 else "the ranks have different ones")

    choice = share_by(names, what, choice, limit_s, judge)
    return "" if choice.startswith("=") else choice


def share_largest(names: Collection[str], what: str, own: tuple[int, str], limit_s: float, shown: bool = False) -> str:
    """Share the text of the rank with the largest number; the first rank wins a tie.

    `own` is this rank's number and text. See `share_by` for the remaining arguments and the error.
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
    """Let each process group in turn decide on a text.

    Args:
        names: Names of the process groups in graphs.
        what: Subject of the decision in errors.
        own: This rank's text.
        limit_s: Seconds to wait for the peers.
        judge: Makes the new text of a process group from its ranks' texts, in their order; the first rank calls it.
        shown: Whether rank 0 prints that it waits.
    Returns:
        This rank's text after all decisions.
    Raises:
        RankMissingError: a rank does not arrive within the limit.
    """
    with Phase(f"waiting for the other ranks' {what}", shown):
        for group in real_groups(names):
            own = _decide(group, what, own, limit_s, judge)
    return own


def are_fake(names: Collection[str]) -> bool:
    """Return whether the collectives of some of the process groups do nothing."""
    return any(_FAKE in dist.get_backend_config(resolve_group(name)) for name in names)


def real_groups(names: Collection[str]) -> Iterator[dist.ProcessGroup]:
    """Yield the named process groups that have peers, in an order that ranks share.

    Names in graphs are numbered by each process; torch's own names are equal on all ranks of a group.
    """
    for group in sorted(map(resolve_group, names), key=attrgetter("group_name")):
        if group.size() > 1 and _FAKE not in dist.get_backend_config(group):
            yield group


def shared_lines(sequence: CollectiveSequence, group: dist.ProcessGroup) -> tuple[str, ...]:
    """Return the collectives that a process group's ranks must issue alike."""
    return sequence.lines([each for each in sequence.groups if _holds_all_of(resolve_group(each), group)])


def _holds_all_of(other: dist.ProcessGroup, group: dist.ProcessGroup) -> bool:
    """Return whether every rank of `group` is in `other`.

    These ranks must issue equal collectives in `other`. Ranks of one data-parallel group may be in different
    tensor-parallel groups, whose shards differ in size.
    """
    return set(dist.get_process_group_ranks(group)) <= set(dist.get_process_group_ranks(other))


def hash_lines(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _agreed_in(group: dist.ProcessGroup) -> _Agreed:
    return _agreed.setdefault(group, _Agreed())


def _decide(
    group: dist.ProcessGroup, what: str, own: str, limit_s: float, judge: Callable[[Sequence[str]], str]
) -> str:
    """Return the result of `judge` on the texts of a group's ranks; the group's first rank calls it."""
    agreed, store = _agreed_in(group), group_store(group)
    prefix = f"compile_fsdp/{agreed.rounds}"
    agreed.rounds += 1
    # A process group that is destroyed and created again may get its old store.
    prefix = f"{prefix}/{(store.add(f'{prefix}/arrivals', 1) - 1) // group.size()}"

    def get(rank: int, key: str) -> str:
        """Wait until a rank has set a key, and return the text."""
        try:
            store.wait([f"{prefix}/{key}"], timedelta(seconds=limit_s))
        except RuntimeError as error:  # FileStore has no error class for a timeout
            raise RankMissingError(
                f"expected rank {dist.get_global_rank(group, rank)} to compile its {what} within {limit_s:g} s, got "
                "nothing from it; look for its error, or for a step that it does not compile; if it only needs longer, "
                "raise the option agreement_timeout_s"
            ) from error
        return store.get(f"{prefix}/{key}").decode()

    store.set(f"{prefix}/{group.rank()}", own)
    if group.rank() == 0:
        store.set(f"{prefix}/verdict", judge([get(rank, str(rank)) for rank in range(group.size())]))
    return get(0, "verdict")


def _first_mismatch(group: dist.ProcessGroup, texts: Sequence[str]) -> str:
    """Describe the difference between the first rank and the first rank that differs from it."""
    other = next(rank for rank, text in enumerate(texts) if text != texts[0])
    ranks = [dist.get_global_rank(group, rank) for rank in (0, other)]
    return first_difference(ranks, json.loads(texts[0]), json.loads(texts[other]))


def first_difference(ranks: Sequence[int], first: Sequence[str], second: Sequence[str]) -> str:
    """Describe where the collectives of two ranks first differ, for errors."""
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    at = next(differing, min(len(first), len(second)))
    own = [lines[at] if at < len(lines) else "no further collective" for lines in (first, second)]
    return f"at position {at}: on rank {ranks[0]} {own[0]}; on rank {ranks[1]} {own[1]}"
