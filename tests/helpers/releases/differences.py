"""What the installed torch does otherwise than newer ones; tests/torch_compat/test_releases.py shows the last two."""

from __future__ import annotations

import torch

# What was evaluated while Dynamo traced stays: guards of a model that is gone hold the globals it was put into.
KEEPS_TRACE_CONSTANTS = torch.__version__ < "2.13"

# Eager FSDP2 leaves a group of several modules unsharded for the backward if not all of them run.
KEEPS_GROUPS_IN_PART = torch.__version__ < "2.13"

# `aot_eager` rounds some gradients in bfloat16 otherwise than eager code.
AOT_ROUNDS_OTHERWISE = torch.__version__ < "2.12"
