"""Compile, in place, a model that a trainer has sharded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

from torch import nn
from torch.distributed.fsdp import FSDPModule

from compile_fsdp.api import make_traceable
from compile_fsdp.errors import AlreadyCompiledError, FSDP1Error, NotShardedError
from compile_fsdp.options import Options
from compile_fsdp.torch_compat.nn import wrapped_child
from compile_fsdp.wrap.tree import below


class CompilesSharded:
    """Compiles the models of one trainer; also the base of its callback.

    Attributes:
        remedy: How to make this trainer shard with FSDP2; the last words of errors about models not sharded with FSDP2.
    """

    remedy = ""

    def __init__(self, *, options: Mapping[str, Any] | None = None, fullgraph: bool = True) -> None:
        """
        Args:
            options: Options of the backend, see docs/options.md.
            fullgraph: Whether a graph break is an error.
        Raises:
            UnknownOptionError: an option does not exist or has a wrong value.
        """
        Options.parse(options)
        self._settings: dict[str, Any] = {"fullgraph": fullgraph, "options": dict(options or {})}
        self._compiled: WeakSet[nn.Module] = WeakSet()

    def compile(self, model: nn.Module) -> None:
        """Compile each outermost FSDP2 module in place, unless this object has compiled the module before.

        Raises:
            AlreadyCompiledError: the trainer or its user has compiled the model with `torch.compile`.
            FSDP1Error: the model contains FullyShardedDataParallel modules.
            NotShardedError: the model contains no FSDP2 module.
        """
        wrapped = [fqn or "the root" for fqn, each in model.named_modules() if wrapped_child(each) == "_orig_mod"]
        if wrapped:
            raise AlreadyCompiledError(
                f"expected a model that is not compiled yet, found torch.compile's wrapper at {wrapped}; leave out "
                "torch.compile and the trainer's own setting for it, such as torch_compile or dynamo_backend"
            )
        try:
            make_traceable(model)
        except (FSDP1Error, NotShardedError) as error:
            raise type(error)(f"{error}. Of this trainer: {self.remedy}") from None
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        inner = below(sharded)
        for root in sharded:
            if root not in inner and root not in self._compiled:
                root.compile(backend="compile_fsdp", **self._settings)
                self._compiled.add(root)

    def reshard(self, model: nn.Module) -> None:
        """Free the parameters that stay unsharded after an evaluation.

        FSDP2 keeps parameters such as the root's unsharded for a backward, which an evaluation does not run. A training
        step that starts with unsharded parameters would be compiled again.
        """
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
