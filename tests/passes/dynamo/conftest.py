"""A graph under construction, with the fake values of Dynamo."""

from __future__ import annotations

import pytest

from helpers.graphs.build import Layer


@pytest.fixture
def layer() -> Layer:
    return Layer(is_of_dynamo=True)
