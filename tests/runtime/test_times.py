"""Dynamo never traces functions marked `at_run_time`."""

from __future__ import annotations

import logging
from types import CodeType
from unittest import mock

import pytest
import torch
from torch import nn

import compile_fsdp
from compile_fsdp.runtime.backward import reduce
from compile_fsdp.runtime.hooks import before_forward, complete
from compile_fsdp.runtime.tracing import RUN_TIME
from helpers.models.blockwise import compile_whole
from helpers.ranks.fake_world import fake_world


class _Inlined(logging.Handler):
    """Log handler that collects the code objects that Dynamo inlines."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[CodeType] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if str(record.msg).startswith("INLINING"):
            self.found.update(each for each in record.args or () if isinstance(each, CodeType))


def _step() -> None:
    """Run one step with hooks, prefetch, a frozen group and gradients."""
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    model[1].requires_grad_(False)
    for module in (*model, model):
        compile_fsdp.fully_shard(module, reshard_after_forward=module is not model[2])
    model[0].set_modules_to_forward_prefetch([model[1]])
    compile_whole(model, inner_backend="aot_eager")(torch.ones(2, 4)).sum().backward()


def test_dynamo_never_traces_run_time_functions(caplog: pytest.LogCaptureFixture) -> None:
    logger, handler = logging.getLogger("torch._dynamo.symbolic_convert"), _Inlined()
    caplog.set_level(logging.DEBUG, logger.name)
    with mock.patch.object(logger, "handlers", [handler]), fake_world(2):
        _step()
    traced = {function.__code__ for function in (before_forward, complete, reduce)}
    assert traced <= handler.found
    assert [code.co_name for code in RUN_TIME & handler.found] == []
    assert len(RUN_TIME) > 40
