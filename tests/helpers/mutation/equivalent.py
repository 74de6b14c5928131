"""Mutants that behave like the original passes, by `Mutant.key`, with reasons."""

from __future__ import annotations

_NODE = "type: what a schema has as a tensor is a node; mypy has to know"
_AGAIN = "speed: looked at again, it gives the same"
_NO_EVENT = "type: what is noted of no parameter is never asked for; mypy has to know"

EQUIVALENT: dict[str, str] = {
    "aliases.Aliases.__init__: self._joined -> True": "speed: without joins, every class is its own root",
    "check._window_faults: not resized_placeholders(graph) -> False": "speed: it would find no window",
    "choose.fit: fastest > budget -> True": "speed: the search would come to no choice as well",
    'collectives.collective_arguments: op.namespace not in ("_c10d_functional", "_dtensor", "compile_fsdp") -> False': (
        "speed: no other op of these graphs has a group"
    ),
    "collectives._infer: target is WAIT -> False": "speed: the op itself, run on fake tensors, gives the same",
    "collectives._match: isinstance(each, fx.Node) -> True": _NODE,
    "collectives._match: isinstance(node, fx.Node) -> True": _NODE,
    "collectives._match: len(tensors) != len(inputs) -> False": _NODE,
    "effects._read_schema.select: a.keyword_only -> False": "no call has so many positional arguments",
    "effects.Effects._schema: (known := self._schemas.get(id(op))) is None -> True": _AGAIN,
    "effects.parameter_of: isinstance(written, fx.Node) -> True": _NODE,
    "effects.Effects._summary_of_module: (known := self._summaries.get(id(module))) is None -> True": _AGAIN,
    "legalize_windows._find_delays: event is not None -> True": _NO_EVENT,
    "legalize_windows.legalize_windows: node is not None -> True": _NODE,
    "legalize_windows.legalize_windows: not nodes -> False": "speed: it would find nothing to move",
    "offload_saved.offload_saved: not leaving -> False": "speed: nothing would be sent",
    "op_facts._hint: isinstance(value, (SymInt, SymFloat, SymBool)) -> False": "speed: fake tensors take symbols, too",
    "remove_unread._has_no_effect: isinstance(collective, fx.Node) -> True": _NODE,
    "remove_unread._sent: not isinstance(each, fx.Node) -> False": _NODE,
    "remove_unshard_copies._remove_windows: resized_placeholders(graph) -> True": "speed: it would find no window",
    "remove_unshard_copies.remove_unshard_copies: windows -> True": "speed: compiled again",
    "remove_unshard_copies._find_window_fault: node is not None -> True": "type: a window has one; mypy has to know",
    "save_frozen_outputs.save_frozen_outputs: not frozen -> False": "speed: it would find nothing to mark",
    "schedule_collectives._preparations: node not in found -> True": _AGAIN,
    "schedule_collectives._reorder: fixed is not end -> True": "fx: put before itself, a node stays where it is",
    "schedule_collectives._results: node not in found -> True": _AGAIN,
    "sinking.Scan.__init__: (event := self.find_event(node)) is not None -> True": _NO_EVENT,
    "read_step.read_step: group.frees -> True": "what is never freed has a window that ends before it begins",
    "read_step.read_step: measure -> False": _AGAIN,
    "read_step._find_saved: not value.is_saved -> False": "speed: what no op saves has nothing to hand on",
    "read_step._find_origins: source in seen -> False": _AGAIN,
    "subgraphs.find_window_subgraphs.visit: aliases -> False": _AGAIN,
    "subgraphs.find_window_subgraphs.visit: id(module) not in visited -> True": _AGAIN,
    "subgraphs.find_window_subgraphs.visit: id(module) in found -> True": (
        "speed: shared is only asked about what was found"
    ),
    "unfilled_reads.find_unfilled_reads: not unfilled -> False": "speed: it would find no read",
    "windows.resized_placeholders: node is not None -> True": _NODE,
}
