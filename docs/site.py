"""MkDocs hooks for API pages and for pages outside of docs/.

* API pages come from the imported package. A checkout has `passes` and `ops` beside the package, so all parts are
  copied into one folder. Sections of docstrings lack the blank line that the parser needs.
* The changelog, the benchmark results and the examples are pages, too. Links are relative to the repository; the site
  has no folder docs/, so links lose this folder.
"""

from __future__ import annotations

import importlib
import re
import shutil
import tempfile
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import event_priority
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

PACKAGE = "compile_fsdp"
PARTS = ("passes", "ops")
BESIDE = ("CHANGELOG.md", "benchmarks/results/*.md", "examples/*.md", "examples/*.py")

# The title of a section of a docstring, right below other text.
_SECTION = re.compile(r"(?<=[^\n])\n( +(?:Args|Returns|Raises|Yields|Attributes|Source):)")

# The first cell of an error's row, which becomes an anchor.
_ERROR = re.compile(r"^\| `(\w+)` \|", flags=re.MULTILINE)

_staged = tempfile.TemporaryDirectory(prefix="compile_fsdp_site_")


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for name in (PACKAGE, *(f"{PACKAGE}.{part}" for part in PARTS)):
        installed, *_ = importlib.import_module(name).__path__
        target = Path(_staged.name, *name.split("."))
        shutil.copytree(installed, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
    for path in Path(_staged.name).rglob("*.py"):
        path.write_text(_SECTION.sub(r"\n\n\1", path.read_text()))
    config.plugins["mkdocstrings"].config["handlers"]["python"]["paths"] = [_staged.name]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    root = Path(config.config_file_path).parent
    for path in sorted(path for pattern in BESIDE for path in root.glob(pattern)):
        name = path.relative_to(root).as_posix()
        files.append(File.generated(config, name, abs_src_path=str(path), inclusion=InclusionLevel.NOT_IN_NAV))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    if page.file.src_uri == "errors.md":
        markdown = _ERROR.sub(lambda found: f'| <a id="{found[1].lower()}"></a>`{found[1]}` |', markdown)
    if page.file.generated_by is not None:  # from beside docs/
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    return markdown if "/" in page.file.src_uri else markdown.replace("](../", "](")
