"""What can go wrong on the user's side: one exception type for each mistake, with what to do about it.

All of them are raised before any collective is issued and leave model and state usable.
"""

from __future__ import annotations

from compile_fsdp.compat import ShortenTraceback


class CompileFSDPError(ShortenTraceback):
    """Base of every error this project raises.

    It derives from the one exception family (itself a `RuntimeError`) that Dynamo hands through unchanged, so
    that an error found while a model is being traced reaches the user as itself, not inside an internal error.
    """

    def __init__(self, message: str) -> None:
        super().__init__(message, first_useful_frame=None)


class NotShardedError(CompileFSDPError):
    """The model given to the backend, or to `make_traceable`, has no FSDP2 module."""


class NotRootError(CompileFSDPError):
    """The compiled module is not the root of its FSDP2 modules."""


class FSDP1Error(CompileFSDPError):
    """The model contains `FullyShardedDataParallel` (FSDP1) modules, which cannot be traced."""


class ProcessGroupMissingError(CompileFSDPError):
    """No process group is initialised."""


class ParameterDeviceError(CompileFSDPError):
    """Parameters are on the meta device, or on another device than the mesh."""


class OutputTypeError(CompileFSDPError):
    """A sharded module returns an object whose tensors cannot be found."""


class UnknownOptionError(CompileFSDPError):
    """An option of the backend does not exist or has a wrong value."""


class UnsupportedFeatureError(CompileFSDPError):
    """A feature of FSDP2 that works eagerly and cannot be compiled yet."""


class BackwardError(CompileFSDPError):
    """Base of the errors for what a compiled backward cannot do."""


class SecondBackwardError(BackwardError):
    """A second backward through the same compiled graph."""


class DoubleBackwardError(BackwardError):
    """`create_graph=True`: a backward through the compiled backward."""


class PartialBackwardError(BackwardError):
    """`torch.autograd.grad`, or `backward(inputs=...)`, through a compiled sharded model."""


class OpDefinitionError(CompileFSDPError):
    """An operator of torch is defined otherwise than the runtime needs it."""
