"""Differences between torch releases; tests/torch_compat/test_releases.py shows two of them."""

from __future__ import annotations

import torch

# Guards of a deleted model keep alive the globals with the constants that Dynamo evaluated while tracing.
KEEPS_TRACE_CONSTANTS = torch.__version__ < "2.13"

# Eager FSDP2 leaves a group of several modules unsharded for the backward if some of them do not run.
KEEPS_GROUPS_IN_PART = torch.__version__ < "2.13"

# `aot_eager` rounds some gradients differently from eager code.
AOT_ROUNDS_OTHERWISE = torch.__version__ < "2.12"

# DTensor keeps a cache entry for each set of scalar arguments of an operation; Adam's scalars change every step.
CACHES_NUMBERS = torch.__version__ < "2.12"

# Dynamo prints parameters that a compiled function guards by identity, and crashes on a freed parameter.
PRINTS_GUARDED_PARAMETERS = torch.__version__ < "2.12"

# While eager FSDP2 does not reduce gradients, it adds the gradients of a parameter's uses in the parameter's dtype;
# compiled steps add them in the dtype in which they are computed.
SUMS_USES_IN_FULL_PRECISION = torch.__version__ >= "2.15"

# Dynamo cuts a model with graph breaks into fewer graphs.
CUTS_FEWER_PIECES = torch.__version__ < "2.12"
