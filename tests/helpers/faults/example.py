"""examples/train.py as a module, with a model that compiles quickly."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from compile_fsdp.tools.bench.llama import ModelConfig

EXAMPLE = Path(__file__).parents[3] / "examples" / "train.py"


def load_example(layers: int, seq_len: int) -> ModuleType:
    """Load the example; its preset "tiny" has few and narrow layers, because tracing dominates the time of a start."""
    spec = importlib.util.spec_from_file_location("train", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = sys.modules["train"] = importlib.util.module_from_spec(spec)  # its dataclasses look it up
    spec.loader.exec_module(module)
    module.PRESETS["tiny"] = module.Preset(ModelConfig(dim=32, layers=layers, heads=2, hidden=64), seq_len, 2, 3e-3)
    return module
