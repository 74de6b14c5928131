"""What MkDocs does not do by itself, run as its hooks.

* The API pages are made of the package that is installed. The folder of the same name in a checkout lacks `passes` and
  `ops`, and an installation in editable mode has no folder with all of it: so its parts are put together in one.
  Sections of docstrings follow each other without a blank line, and the parser wants one.
* The changelog, the measurements and the examples are pages, too. Pages link to each other by their places in the
  repository, where GitHub finds them; the site has no folder docs/, and what lies beside it in the repository lies
  below it there.
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

_staged = tempfile.TemporaryDirectory(prefix="compile_fsdp_site_")


@event_priority(100)  # before mkdocstrings reads its paths
def on_config(config: MkDocsConfig) -> MkDocsConfig:
    for name in (PACKAGE, *(f"{PACKAGE}.{part}" for part in PARTS)):
        (installed,) = importlib.import_module(name).__path__
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
    if page.file.generated_by is not None:  # from beside docs/
        return re.sub(r"\]\(((?:\.\./)*)docs/", r"](\1", markdown)
    return markdown if "/" in page.file.src_uri else markdown.replace("](../", "](")
