"""Module of the user's model that a Dynamo node comes from."""

from __future__ import annotations

import re

from torch import fx

from compile_fsdp.torch_compat.dynamo import innermost_module

_MODULE = re.compile(r"""^L\[['"]\w+['"]\]\.?""")
_GETATTR = re.compile(r"""getattr\((.*?), (['"])(.*)\2\)""")
_CHILD = re.compile(r"""\._modules\[['"](.*?)['"]\]""")


def module_fqn(node: fx.Node) -> str | None:
    """Return the FQN of the innermost module, "" for the outermost module; None if the node's metadata lacks it."""
    if (name := innermost_module(node)) is None:
        return None
    names: list[str] = []
    while (match := _GETATTR.fullmatch(name)) is not None:  # for a name that is no identifier
        names.insert(0, match[3])
        name = match[1]
    if name.startswith("getattr("):
        return None
    fqn = _CHILD.sub(r".\1", _MODULE.sub("", name)).lstrip(".")
    return ".".join(filter(None, (fqn, *names)))
