"""Read a documentation page's code blocks and run them in a new process."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import traceback
import types
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from helpers.ranks.fake_world import fake_world
from helpers.ranks.forked import forkserver

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
TIMEOUT_S = 250.0

# torchrun's variables for a world of one rank; port 0 picks a free port.
LAUNCHED = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block."""

    language: str  # word after the opening fence
    line: int  # number of its first line of text, from 1
    text: str  # text between the fences


def read_blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages, in order."""
    markdown = page.read_text()
    return [
        Block(match[1], markdown.count("\n", 0, match.start(2)) + 1, match[2])
        for match in _FENCE.finditer(markdown)
        if match[1] in languages
    ]


@dataclass(frozen=True, slots=True)
class Setting:
    """Environment of a page's code."""

    before: str = ""  # code that runs first and defines the names that the page assumes
    inner_backend: str = "aot_eager"  # default of the option
    fake_ranks: int | None = None  # size of a fake world in which the page is rank 0; None for a real world of one rank
    languages: tuple[str, ...] = ("python", "py")  # languages of the blocks to run


def run_page(page: Path, setting: Setting, folder: Path) -> None:
    """Run a page's code blocks in a new process in `folder`.

    The blocks run in order and share their globals. The first text block after a code block must equal the output
    printed since the previous comparison.

    Raises:
        AssertionError: if a block raises, prints other text, or does not end in time.
    """
    context = forkserver()
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_serve, args=(page, setting, folder, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        failure = ours.recv() if ours.poll(TIMEOUT_S) else f"not finished after {TIMEOUT_S:.0f} s"
    except EOFError:
        process.join()
        failure = f"the process ended with exit code {process.exitcode}"
    process.kill()
    process.join()
    assert failure is None, f"{page.name}: {failure}"


def _serve(page: Path, setting: Setting, folder: Path, connection: Connection) -> None:
    # Inductor's cache goes into the page's folder.
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    os.chdir(folder)
    if setting.fake_ranks is None:
        os.environ.update(LAUNCHED)
    try:
        with fake_world(setting.fake_ranks) if setting.fake_ranks is not None else contextlib.nullcontext():
            _set_inner_backend(setting.inner_backend)
            _run(page, setting)
        connection.send(None)
    except BaseException:
        connection.send(traceback.format_exc())


def _set_inner_backend(name: str) -> None:
    from compile_fsdp import Options

    defaults = Options.__init__.__defaults__
    assert defaults is not None and defaults[0] == "inductor"
    Options.__init__.__defaults__ = (name, *defaults[1:])


def _run(page: Path, setting: Setting) -> None:
    # An importable module, because Dynamo looks up the globals of compiled code by module name.
    module = types.ModuleType("page")
    sys.modules[module.__name__] = module
    printed = io.StringIO()
    exec(compile(setting.before, "what a page takes as given", "exec"), vars(module))
    is_code_next = False
    for block in read_blocks(page, *setting.languages, "text"):
        where = f"{page}, line {block.line}"
        if block.language != "text":
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with contextlib.redirect_stdout(printed):
                exec(code, vars(module))
            is_code_next = True
        elif is_code_next:
            assert printed.getvalue() == block.text, f"{where}: printed instead:\n{printed.getvalue()}"
            printed.seek(0)
            printed.truncate()
            is_code_next = False
