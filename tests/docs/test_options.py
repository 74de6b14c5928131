"""docs/options.md has every option, with the default that it has."""

from __future__ import annotations

import dataclasses
import re

from torch.distributed.fsdp import BackwardPrefetch

from compile_fsdp import Options
from helpers.pages.code_blocks import DOCS


def test_table_is_complete_and_right() -> None:
    rows = re.findall(r"^\| `(\w+)` \| `([^`]+)` \|", (DOCS / "options.md").read_text(), flags=re.MULTILINE)
    documented = {name: eval(default, {"BackwardPrefetch": BackwardPrefetch}) for name, default in rows}
    assert documented == {field.name: getattr(Options(), field.name) for field in dataclasses.fields(Options)}
