"""Notes of passes on a graph, stored in Inductor's caches."""

from __future__ import annotations

from compile_fsdp.torch_compat.dynamo import dynamo_counters

_NOTE = "compile_fsdp "  # Prefix that tells notes from the names of Inductor's counts.


def leave_note(note: str) -> None:
    """Store a note with the graph that Inductor is compiling.

    Inductor stores the counts of a compilation, and counts them again if the graph comes from a cache. So a note is the
    name of a count. (counters["inductor"], CompiledFxGraph.counter_deltas: checked on 2.13.0)
    """
    dynamo_counters()["inductor"][_NOTE + note] += 1


def take_notes() -> list[str]:
    """Return the notes of graphs compiled or taken from a cache since the last call, each once."""
    counts = dynamo_counters()["inductor"]
    names = [name for name in counts if name.startswith(_NOTE)]
    for name in names:
        del counts[name]
    return [name.removeprefix(_NOTE) for name in names]
