"""Graphs under construction, with the fake values of AOTAutograd; passes/dynamo/ has those of Dynamo."""

from __future__ import annotations

import pytest

from helpers.graphs.build import GraphBuilder, Layer


@pytest.fixture
def build() -> GraphBuilder:
    return GraphBuilder()


@pytest.fixture
def layer() -> Layer:
    return Layer()
