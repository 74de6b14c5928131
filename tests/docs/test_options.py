"""docs/options.md lists every option with its default."""

from __future__ import annotations

import dataclasses
import re

from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp import Options
from helpers.pages.code_blocks import DOCS


def test_table_has_every_option_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (DOCS / "options.md").read_text(), flags=re.MULTILINE)
    documented = {name: eval(default, {"BackwardPrefetch": BackwardPrefetch}) for name, default in rows}
    assert documented == {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}
