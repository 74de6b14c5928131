"""Imports that must precede the first compiled autograd backward."""

from __future__ import annotations

from helpers.ranks.fresh import run_fresh

PROGRAM = """
import sys
import torch
from compile_fsdp.backend.boundary import ForwardGraph
from compile_fsdp.backend.compiled_forward import CompiledForward, ParameterInputs
from compile_fsdp.backend.step import Step
from compile_fsdp.options import Options

torch.cuda.is_available = lambda: True  # in this process alone
assert "torch._inductor.cudagraph_trees" not in sys.modules
none = frozenset()
ForwardGraph(CompiledForward(print, ParameterInputs((), (), none, none, none, none), None, Step(Options())))
print(int("torch._inductor.cudagraph_trees" in sys.modules))
"""


def test_cudagraph_trees_is_imported_before_the_first_backward() -> None:
    assert run_fresh(PROGRAM) == (1, "")
