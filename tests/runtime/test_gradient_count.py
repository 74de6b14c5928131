"""Number of gradients that complete a group in a compiled backward."""

from __future__ import annotations

import pytest
import torch

from compile_fsdp.runtime.gradient_count import GradientCount


@pytest.mark.parametrize(("is_taken_back", "complete"), [(False, [True]), (True, [False, True])])
def test_check_of_an_unfit_backward_does_not_change_the_expected_gradients(
    is_taken_back: bool, complete: list[bool]
) -> None:
    count, leaves = GradientCount(), [torch.ones(1, requires_grad=True) for _ in range(2)]
    count.expect(leaves, (), None)
    count.expect_none({id(leaves[0])})
    if is_taken_back:
        count.expect_again()
    assert [count.arrive() for _ in complete] == complete
