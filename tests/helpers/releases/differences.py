"""What the installed torch does otherwise than newer ones; tests/torch_compat/test_releases.py shows two of them."""

from __future__ import annotations

import torch

# What was evaluated while Dynamo traced stays: guards of a model that is gone hold the globals it was put into.
KEEPS_TRACE_CONSTANTS = torch.__version__ < "2.13"

# Eager FSDP2 leaves a group of several modules unsharded for the backward if not all of them run.
KEEPS_GROUPS_IN_PART = torch.__version__ < "2.13"

# `aot_eager` rounds some gradients otherwise than eager code.
AOT_ROUNDS_OTHERWISE = torch.__version__ < "2.12"

# DTensor keeps a cache entry for each set of numbers that an operation is called with; Adam's differ from step to step.
CACHES_NUMBERS = torch.__version__ < "2.12"

# Dynamo prints parameters that a compiled function guards by their identity, and dies of one that is freed.
PRINTS_GUARDED_PARAMETERS = torch.__version__ < "2.12"

# Eager FSDP2 adds the gradients of a parameter's several uses in the parameter's own dtype while it does not reduce
# them; compiled steps add them in the dtype in which they are computed.
SUMS_USES_IN_FULL_PRECISION = torch.__version__ >= "2.15"

# Eager FSDP2 allocates gradients of lower precision, and those of parameters that stay unsharded, otherwise.
ALLOCATES_GRADIENTS_OTHERWISE = torch.__version__ >= "2.15"

# Dynamo cuts a model with graph breaks into fewer pieces.
CUTS_FEWER_PIECES = torch.__version__ < "2.12"
