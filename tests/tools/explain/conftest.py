"""Fixtures: a graph under construction, the report of one compiled step, and a browser."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Browser, sync_playwright

import compile_fsdp
from compile_fsdp.tools.explain import Report
from helpers.graphs.build import GraphBuilder
from helpers.models.explained import WORLD, Model
from helpers.pages.open_page import OpenPage


@pytest.fixture
def build() -> GraphBuilder:
    return GraphBuilder()


@pytest.fixture(scope="session")
def report() -> Report:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return compile_fsdp.explain(Model(), torch.randn(16, 4), world_size=WORLD)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        problem = "expected a browser for the page's tests, got none; install Debian's or Ubuntu's package chromium"
        # .ci/run installs a browser.
        pytest.fail(problem) if os.environ.get("CI") == "true" else pytest.skip(problem)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_report(browser: Browser, tmp_path: Path) -> Iterator[Callable[[Report], OpenPage]]:
    """Function that opens a report's page in the browser."""
    path = tmp_path / "report.html"
    page = browser.new_page(viewport={"width": 1400, "height": 1000})

    def open_it(report: Report) -> OpenPage:
        report.save_html(path)
        return OpenPage(page, path)

    yield open_it
    page.close()


@pytest.fixture
def opened(report: Report, open_report: Callable[[Report], OpenPage]) -> OpenPage:
    return open_report(report)
