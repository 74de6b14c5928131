"""Check torch's version and private names at import, so that an unsupported torch fails with a clear error."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator, Mapping
from functools import cache
from pkgutil import resolve_name
from types import FunctionType

import torch

from compile_fsdp.torch_compat import declarations


def check_attributes(attributes: Mapping[type, tuple[str, ...]] = declarations.ATTRIBUTES) -> None:
    """Raise AttributeError if a class does not define a declared attribute, and none of its methods sets it."""
    for cls, names in attributes.items():
        if (left := set(names) - set(dir(cls))) and (gone := left - set(_set_by_methods(cls))):
            raise AttributeError(f"{cls.__module__}.{cls.__qualname__} has no {', '.join(sorted(gone))}")


def check_names() -> None:
    """Raise ImportError if torch does not have a name that functions use when called.

    The check imports the compiler, so it runs before the first graph instead of at import.
    """
    for name in declarations.NAMES:
        try:
            _look_up(name)
        except (ImportError, AttributeError) as error:
            raise moved(error) from error


def moved(error: Exception) -> ImportError:
    """Build the error for a missing private name of torch."""
    return ImportError(
        f"compile_fsdp uses a private name of torch that torch {torch.__version__} does not have: {error}; install "
        "torch 2.13.0, which it was checked with, and report it"
    )


def _set_by_methods(cls: type) -> Iterator[str]:
    for base in cls.__mro__:
        yield from vars(base).get("__annotations__", ())
        for member in vars(base).values():
            function = inspect.unwrap(getattr(member, "fget", member))
            if isinstance(function, FunctionType):
                yield from (each.argval for each in dis.get_instructions(function) if each.opname == "STORE_ATTR")


# Cached because every graph looks up all names again.
_look_up = cache(resolve_name)

declarations.check_version(torch.__version__)
try:
    for name in ("autograd", "dispatch", "distributed", "dynamo", "fsdp", "inductor", "nn"):
        importlib.import_module(f"compile_fsdp.torch_compat.{name}")
    check_attributes()
except (ImportError, AttributeError) as error:
    raise moved(error) from error
