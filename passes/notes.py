"""What passes say of a graph, stored with it in Inductor's caches."""

from __future__ import annotations

from compile_fsdp.torch_compat.dynamo import dynamo_counters

# Before each note, among the names of what Inductor counts.
_NOTE = "compile_fsdp "


def leave_note(note: str) -> None:
    """While Inductor compiles a graph: store a note with it, in its caches.

    Inductor stores what it has counted during the compilation, and counts it again when the graph comes from a cache:
    the note is the name of a count. (counters["inductor"], CompiledFxGraph.counter_deltas: checked on 2.13.0)
    """
    dynamo_counters()["inductor"][_NOTE + note] += 1


def take_notes() -> list[str]:
    """The notes of graphs that were compiled, or came from a cache, since the last call. Each is listed once."""
    counts = dynamo_counters()["inductor"]
    names = [name for name in counts if name.startswith(_NOTE)]
    for name in names:
        del counts[name]
    return [name.removeprefix(_NOTE) for name in names]
