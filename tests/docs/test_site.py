"""The site builds without a warning, and its API pages have every public name."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.pages.code_blocks import DOCS, ROOT

API = {
    "compile_fsdp": "compile_fsdp",
    "compile_fsdp.wrap": "wrap",
    "compile_fsdp.state": "state",
    "compile_fsdp.passes": "passes",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built like `make docs`, with warnings as errors."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / "mkdocs.yml"), "-d", str(folder)]
    # Runs in docs/, because a folder of the root could be imported instead of the installed package.
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=DOCS, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_built(site: Path) -> None:
    pages = [page.relative_to(DOCS).with_suffix("") for page in DOCS.rglob("*.md")]
    assert pages
    assert [page for page in pages if not (site / page / "index.html").exists() and page.name != "index"] == []
    assert (site / "index.html").exists()


def test_benchmark_results_are_pages(site: Path) -> None:
    for result in (ROOT / "benchmarks/results").glob("*.md"):
        assert (site / "benchmarks/results" / result.stem / "index.html").exists()
    assert 'href="../benchmarks/results/first_step_cpu_202611/"' in (site / "passes/index.html").read_text()


@pytest.mark.parametrize("module", API)
def test_api_page_has_every_public_name(site: Path, module: str) -> None:
    html = (site / "api" / API[module] / "index.html").read_text()
    names = importlib.import_module(module).__all__
    # The id of a function may include the name of the file that defines it.
    missing = [name for name in names if not re.search(rf'id="{module}(\.\w+)*\.{name}"', html)]
    assert missing == []
