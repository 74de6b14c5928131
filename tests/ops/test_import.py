"""Importing and ensuring the ops changes no setting of the process and does not load Inductor."""

from __future__ import annotations

from helpers.ranks.fresh import run_fresh

SCRIPT = """
import sys
import torch._dynamo.config, torch._functorch.config, torch._inductor.config

configs = (torch._dynamo.config, torch._functorch.config, torch._inductor.config)
before = [config.get_config_copy() for config in configs]
flags = lambda: (torch.get_default_dtype(), torch.is_grad_enabled(), torch.get_num_threads())
flags_before = flags()

import compile_fsdp.ops
compile_fsdp.ops.ensure_ops()
assert "torch._inductor.lowering" not in sys.modules, "Inductor was loaded"
compile_fsdp.ops.ensure_lowerings()

after = [config.get_config_copy() for config in configs]
for config, old, new in zip(configs, before, after):
    changed = {name: (old.get(name), new[name]) for name in new if old.get(name) != new[name]}
    assert not changed, f"{config.__name__}: {changed}"
print(int(flags() == flags_before))
"""


def test_import_changes_no_setting() -> None:
    assert run_fresh(SCRIPT)[0] == 1
