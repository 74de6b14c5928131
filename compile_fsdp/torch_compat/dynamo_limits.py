"""What Dynamo traces wrongly, or leaves to eager code."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from types import FunctionType
from typing import Any

import torch
import torch._dynamo.config
import torch._dynamo.pgo
from torch._dynamo import symbolic_convert
from torch._dynamo.source import GetItemSource
from torch._guards import TracingContext

from compile_fsdp.torch_compat.declarations import needs

# Whether Dynamo records the writes of an object in the table that it had when it met the object. (2.13.0, 2.14.0)
_WRITES_TO_OLD_TABLE = "2.13" <= torch.__version__ < "2.15"


@needs("torch._dynamo.symbolic_convert.InstructionTranslator.current_tx", "torch._guards.TracingContext.try_get")
def keep_later_writes() -> None:
    """Let Dynamo keep the attributes that are written behind an op with a body, such as torch.cond. (2.13.0, 2.14.0)

    Behind the body, Dynamo goes on with a copy of its table of writes. What it then records in the earlier table is
    lost. Outside a trace, this function does nothing.
    """
    if not _WRITES_TO_OLD_TABLE or TracingContext.try_get() is None:
        return
    table: Any = symbolic_convert.InstructionTranslator.current_tx().output.side_effects
    if hasattr(table, "compile_fsdp_is_followed"):
        return
    table.compile_fsdp_is_followed = True
    for variable in table.id_to_variable.values():
        if (attributes := getattr(variable, "dict_vt", None)) is not None:
            attributes.items.side_effects = table


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


@needs("torch._dynamo.config.allow_rnn")
def traces_rnns() -> bool:
    """Whether Dynamo traces nn.LSTM, nn.GRU and nn.RNN, in place of running them as eager code. (2.13.0)"""
    return bool(torch._dynamo.config.allow_rnn)


def find_assumed_constant(objects: Iterable[object]) -> str | None:
    """Name a function that the user marked with `torch.compiler.assume_constant_result`. (2.13.0)

    It is one of the objects or a method of one; Dynamo calls it in a trace, and does not guard a method.
    """
    every = list(objects)
    methods = (each for base in {base for each in every for base in type(each).__mro__} for each in vars(base).values())
    for function in filter(lambda each: isinstance(each, FunctionType), chain(every, methods)):
        is_known = str(function.__module__).startswith(("torch.", "compile_fsdp."))
        if hasattr(function, "_dynamo_marked_constant") and not is_known:
            return str(function.__qualname__)
    return None
