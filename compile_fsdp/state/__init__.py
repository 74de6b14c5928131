"""Optimizer state by parameter name, and checkpoints that load under any sharding of the model."""

from compile_fsdp.state.checkpoint import PendingSave, async_save, save
from compile_fsdp.state.folder import find_latest
from compile_fsdp.state.layout import Region
from compile_fsdp.state.names import ParamInfo, param_info
from compile_fsdp.state.optim import load_optim_state_dict, optim_state_dict
from compile_fsdp.state.rekey import rekey_optim_state
from compile_fsdp.state.restore import load

__all__ = [
    "ParamInfo",
    "PendingSave",
    "Region",
    "async_save",
    "find_latest",
    "load",
    "load_optim_state_dict",
    "optim_state_dict",
    "param_info",
    "rekey_optim_state",
    "save",
]
