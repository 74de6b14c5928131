"""Choose which modules of a model to shard: policies, plans, checks, and modules that run in full precision."""

from compile_fsdp.wrap.groups import Group, Plan
from compile_fsdp.wrap.policies import CustomPolicy, ModuleWrapPolicy, Policy, RepeatedBlocksPolicy, SizePolicy
from compile_fsdp.wrap.sharding import apply, auto_shard, plan

__all__ = [
    "CustomPolicy",
    "Group",
    "ModuleWrapPolicy",
    "Plan",
    "Policy",
    "RepeatedBlocksPolicy",
    "SizePolicy",
    "apply",
    "auto_shard",
    "plan",
]
