"""Both ops through Inductor, by torch's lowerings."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.lowering import lowerings

from compile_fsdp.errors import OpDefinitionError
from compile_fsdp.ops import copy_, ensure_lowerings, ensure_ops, resize_storage_bytes_
from helpers.graphs.execution import freed

pytestmark = pytest.mark.filterwarnings("ignore:dynamo_pgo force disabled")


@pytest.fixture(autouse=True)
def ops() -> Iterator[None]:
    ensure_ops()
    ensure_lowerings()
    torch._dynamo.reset()
    # The code cache ignores lowerings.
    with inductor_config.patch(force_disable_caches=True):
        yield


def test_torchs_lowerings_are_kept() -> None:
    before = dict(lowerings)
    ensure_lowerings()
    assert lowerings == before


def test_error_names_a_missing_lowering_that_only_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(lowerings, resize_storage_bytes_)
    with pytest.raises(OpDefinitionError, match="Inductor lowering of inductor::resize_storage_bytes_, found none"):
        ensure_lowerings()


def test_a_window_opens_fills_and_closes() -> None:
    def window(unsharded: Tensor, gathered: Tensor) -> Tensor:
        resize_storage_bytes_(unsharded, 64)
        copy_(unsharded, gathered)
        read = torch.relu(unsharded @ unsharded)
        resize_storage_bytes_(unsharded, 0)
        return read

    compiled = torch.compile(window, fullgraph=True)
    unsharded = freed(4, 4)
    for _ in range(2):  # The second step starts with the storage that the first step has freed.
        gathered = torch.randn(4, 4)
        torch.testing.assert_close(compiled(unsharded, gathered), torch.relu(gathered @ gathered))
        assert unsharded.untyped_storage().nbytes() == 0


def test_window_that_stays_open_leaves_the_tensor_filled() -> None:
    def window(unsharded: Tensor, gathered: Tensor) -> Tensor:
        unsharded.untyped_storage().resize_(16)
        copy_(unsharded, gathered)
        return unsharded * 2

    unsharded = freed(4)
    assert torch.compile(window, fullgraph=True)(unsharded, torch.ones(4)).tolist() == [2.0] * 4
    assert unsharded.untyped_storage().nbytes() == 16
    assert unsharded.tolist() == [1.0] * 4


def fill(tensor: Tensor, data: Tensor) -> Tensor:
    def step(tensor: Tensor, data: Tensor) -> Tensor:
        copy_(tensor, data * 2)
        return tensor + 1

    return torch.compile(step, fullgraph=True)(tensor, data)


@pytest.mark.parametrize("shape", [(3,), (2, 1)])
@pytest.mark.parametrize("dtypes", [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.bfloat16)])
def test_torchs_lowering_broadcasts_and_widens(shape: tuple[int, ...], dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    tensor, data = torch.zeros(2, 3, dtype=dtypes[0]), torch.ones(shape, dtype=dtypes[1])
    assert fill(tensor, data).tolist() == [[3.0] * 3] * 2
    assert tensor.tolist() == [[2.0] * 3] * 2


def test_torchs_lowering_writes_a_destination_that_is_not_contiguous() -> None:
    base = torch.zeros(3, 2)
    tensor = base.t()
    fill(tensor, torch.arange(6.0).reshape(2, 3))
    assert base.tolist() == [[0.0, 6.0], [2.0, 8.0], [4.0, 10.0]]


@pytest.mark.xfail(strict=True, reason="See [Note: Inductor's fsdp.copy_ wants one dtype]")
def test_torchs_lowering_narrows() -> None:
    tensor = torch.zeros(2, dtype=torch.bfloat16)
    fill(tensor, torch.ones(2))
    assert tensor.tolist() == [2.0] * 2
