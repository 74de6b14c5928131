"""A callable in place of one of Inductor's compiled graphs."""

from __future__ import annotations

from typing import Any

from compile_fsdp.torch_compat.inductor import inductor_output_type

_OutputCode: Any = inductor_output_type()


class PlainOutputCode(_OutputCode):  # type: ignore[misc]
    """Base class with what AOTAutograd and its cache call besides the graph; nothing is to be done there."""

    _boxed_call = True

    def prepare_for_serialization(self) -> None:
        pass

    def post_compile(self, *args: Any) -> None:
        pass

    def set_triton_bundle(self, triton_bundle: Any) -> None:
        pass
