"""Checks of the installed software: this package, Python and torch."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

from compile_fsdp.tools.doctor.rows import Row, State
from compile_fsdp.torch_compat.releases import check_version

DISTRIBUTION, PACKAGE = "compile-fsdp", "compile_fsdp"


def check_package() -> Row:
    """Check that the package is installed, and show the folder that it runs from."""
    folder = Path(__file__).parents[2]
    try:
        return Row(State.OK, f"{metadata.version(DISTRIBUTION)} in {folder}")
    except metadata.PackageNotFoundError:
        return Row(State.FAULT, f"{folder} was copied, not installed", "install the package with pip")


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Row:
    """Check that the package supports this release of Python."""
    needed = metadata.metadata(DISTRIBUTION)["Requires-Python"].removeprefix(">=")
    if version < tuple(int(part) for part in needed.split(".")):
        shown = ".".join(map(str, version))
        return Row(State.FAULT, f"{shown}, older than {needed}", f"install Python {needed} or later")
    return Row(State.OK, f"{sys.version.split()[0]}, {sys.executable}")


def check_torch() -> Row:
    """Check that torch can be imported, and that the package supports its release."""
    try:
        import torch

        check_version(torch.__version__)
    except (ImportError, OSError) as error:  # OSError if a shared library of torch is missing
        found, _, remedy = str(error).partition("; ")
        return Row(State.FAULT, found, remedy or "install torch again")
    return Row(State.OK, torch.__version__)


def check_private_names() -> Row:
    """Check that torch has all private names and attributes that the package uses."""
    try:
        from compile_fsdp.torch_compat import declarations, required

        required.check_names()
    except ImportError as error:
        found, _, remedy = str(error).partition("; ")
        return Row(State.FAULT, found, remedy or "install a release of torch that the package is for")
    attributes = sum(len(names) for names in declarations.ATTRIBUTES.values())
    return Row(State.OK, f"{len(declarations.NAMES)} names and {attributes} attributes, all there")


def check_dynamo() -> Row:
    """Check that Dynamo supports this interpreter and finds the backend `compile_fsdp` by its entry point."""
    from compile_fsdp.torch_compat.dynamo import list_backends, why_dynamo_refuses

    if (reason := why_dynamo_refuses()) is not None:
        return Row(State.FAULT, reason, "use another Python: without Dynamo, models train eagerly alone")
    remedy = f"install the package again: pip install --force-reinstall --no-deps, with what {DISTRIBUTION} came from"
    if PACKAGE not in list_backends():
        return Row(State.FAULT, f"no entry point registers the backend {PACKAGE}", remedy)
    try:
        for point in metadata.entry_points(group="torch_dynamo_backends", name=PACKAGE):
            point.load()
    except (ImportError, AttributeError) as error:
        return Row(State.FAULT, f"the backend {PACKAGE} cannot be loaded: {error}", remedy)
    return Row(State.OK, f"has the backend {PACKAGE}")
