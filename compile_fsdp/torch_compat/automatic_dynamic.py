"""Dynamo's record of the numbers and sizes that changed between traces, which it makes symbols in the next trace."""

from __future__ import annotations

from typing import Any

import torch._dynamo.pgo
from torch._dynamo.source import GetItemSource
from torch._guards import TracingContext

from compile_fsdp.torch_compat.declarations import needs


@needs("torch._dynamo.pgo.get_code_state", "torch._guards.TracingContext.get")
def keep_list_items_constant() -> None:
    """Forget the items of lists and tuples in sharded modules that the present trace has read. (2.13.0)

    Dynamo makes a changed number a symbol, and takes a constant for different from any symbol in `1 in [symbol]`,
    without a guard. Numbers in modules that are not sharded stay constants.
    """
    guards: Any = TracingContext.get().guards_context.dynamo_guards
    items = (guard for guard in guards if isinstance(guard.originating_source, GetItemSource))
    names = [guard.name for guard in items if guard.originating_source.guard_source.is_fsdp_module()]
    for state in torch._dynamo.pgo.get_code_state().values():
        for name in names:
            state.automatic_dynamic.pop(name, None)
