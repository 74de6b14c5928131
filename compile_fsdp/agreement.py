"""Ranks agree on the collectives of a graph before it first runs.

A rank whose graph has other collectives than its peers' hangs, and they with it, until a watchdog ends the job. So each
rank compares what it has compiled with the others, and all of them raise where there is a difference. The comparison
runs over the process groups' key-value stores, not over collectives: it has a time limit of its own, which covers that
some ranks find in a cache what others compile for minutes. With Inductor it covers all that the compiled graph issues,
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
from dataclasses import dataclass, field
from datetime import timedelta
from weakref import WeakKeyDictionary

import torch.distributed as dist

from compile_fsdp.compat import Store, group_store, resolve_group
from compile_fsdp.errors import CollectiveMismatchError, RankMissingError
from compile_fsdp.passes.sequence import CollectiveSequence
from compile_fsdp.progress import Phase

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


def agree(sequence: CollectiveSequence, what: str, limit_s: float, shown: bool) -> None:
    """Compare the collectives of a graph with those of the other ranks of its process groups.

    Args:
        sequence: The collectives.
        what: The graph's name in errors and messages.
        limit_s: Seconds to wait for the other ranks.
        shown: Whether rank 0 says that it waits.
    Raises:
        CollectiveMismatchError: on every rank of a group whose ranks differ.
        RankMissingError: a rank does not come within the limit.
    """
    digest = hashlib.sha256("\n".join(sequence.lines).encode()).hexdigest()
    phase = Phase(f"waiting for the other ranks' {what}", shown)
    try:
        for name in sorted(sequence.groups):
            group = resolve_group(name)
            if group.size() > 1 and dist.get_backend(group) != _FAKE:
                _agree_in(group, name, what, digest, sequence.lines, limit_s)
    finally:
        phase.end()


def _agree_in(
    group: dist.ProcessGroup, name: str, what: str, digest: str, lines: tuple[str, ...], limit_s: float
) -> None:
    agreed = _agreed.setdefault(group, _Agreed())
    if digest in agreed.digests:
        return  # See [Note: Agreed once is agreed].
    store = group_store(group)
    prefix = f"compile_fsdp/{name}/{agreed.rounds}"
    agreed.rounds += 1
    # A process group that was destroyed and made again may meet at the same store.
    prefix += f"/{(store.add(f'{prefix}/arrivals', 1) - 1) // group.size()}"
    rank, limit = group.rank(), timedelta(seconds=limit_s)
    store.set(f"{prefix}/lines/{rank}", json.dumps(lines))
    store.set(f"{prefix}/digest/{rank}", digest)
    if rank == 0:
        differing = None
        for other in range(1, group.size()):
            _wait(store, f"{prefix}/digest/{other}", limit, group, other, what, limit_s)
            if differing is None and store.get(f"{prefix}/digest/{other}").decode() != digest:
                differing = other
        store.set(f"{prefix}/verdict", json.dumps(differing))
    _wait(store, f"{prefix}/verdict", limit, group, 0, what, limit_s)
    differing = json.loads(store.get(f"{prefix}/verdict"))
    if differing is None:
        agreed.digests.add(digest)
        return
    first, second = (json.loads(store.get(f"{prefix}/lines/{each}")) for each in (0, differing))
    ranks = [dist.get_global_rank(group, each) for each in (0, differing)]
    raise CollectiveMismatchError(_difference(what, ranks, first, second))


def _wait(
    store: Store, key: str, limit: timedelta, group: dist.ProcessGroup, other: int, what: str, limit_s: float
) -> None:
    try:
        store.wait([key], limit)
    except RuntimeError as error:  # a FileStore has no error of its own for it
        raise RankMissingError(
            f"expected rank {dist.get_global_rank(group, other)} to compile its {what} within {limit_s:g} s, got "
            "nothing from it; look for its error, or for a step that it does not compile; if it only needs longer, "
            "raise the option agreement_timeout_s"
        ) from error


def _difference(what: str, ranks: list[int], first: list[str], second: list[str]) -> str:
    differing = (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    at = next(differing, min(len(first), len(second)))
    own = [lines[at] if at < len(lines) else "no further collective" for lines in (first, second)]
    return (
        f"expected the same collectives in the {what} of all ranks, got at position {at}: on rank {ranks[0]} {own[0]}; "
        f"on rank {ranks[1]} {own[1]}; build and shard the same model with the same options on all ranks, and let no "
        "branch of its forward depend on the rank"
    )
