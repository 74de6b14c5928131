"""Mutants of the passes that no test can tell from the passes, by `Mutant.key`, each with the reason."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {
    "aliases.Aliases.__init__: self._joined -> True": "speed: without joins, every class is its own root",
    "pack_gathers._Joining._stays_unsharded: packed.pack not in self._stays -> True": "speed: computed once per pack",
    "pack_reductions._reduce: node is packed.collective -> True": "only the names of collectives are ever read",
    "remove_unshard_copies._Removal._run_one: resized_placeholders(graph) -> True": "speed: it would find no window",
}
