"""Module of the user's model that a Dynamo node comes from."""

from __future__ import annotations

import re

from torch import fx

from compile_fsdp.torch_compat.dynamo import module_stack

_MODULE = re.compile(r"""^[LG]\[['"]\w+['"]\]\.?""")
_GETATTR = re.compile(r"""getattr\((.*?), (['"])(.*)\2\)""")
_CHILD = re.compile(r"""\._modules\[['"](.*?)['"]\]""")


def module_fqn(node: fx.Node, depth: int = -1) -> str | None:
    """Return the FQN of the innermost module, or of that at a depth; None if the node's metadata lacks it.

    The FQN of the model itself is "". The model is in the metadata only if the compiled function calls it.
    """
    if not (stack := module_stack(node)):
        return None
    name = stack[depth]
    names: list[str] = []
    while (match := _GETATTR.fullmatch(name)) is not None:  # for a name that is no identifier
        names.insert(0, match[3])
        name = match[1]
    if name.startswith("getattr("):
        return None
    fqn = _CHILD.sub(r".\1", _MODULE.sub("", name)).lstrip(".")
    return ".".join(filter(None, (fqn, *names)))
