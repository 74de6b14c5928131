"""Commands that run a script leave the user's files unchanged."""

from __future__ import annotations

import builtins
import operator
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compile_fsdp.cli import main
from compile_fsdp.tools.overlay import Access, Overlay
from compile_fsdp.tools.protect_files import protected_files
from compile_fsdp.tools.scripts import run_script
from helpers.ranks.forked import COMMAND, run_forked
from helpers.releases.skip import skip_before

_SCRIPT = """\
import os, shutil, sys
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from compile_fsdp import fully_shard, state
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
for module in (model[0], model):
    fully_shard(module)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
options = {"bundle": "step.bundle"} if sys.argv[1:] == ["bundle"] else {"inner_backend": "eager"}
model.compile(backend="compile_fsdp", fullgraph=True, options=options)

def save():
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    if dist.get_rank() == 0:
        torch.save(full, "runs/model.pt")
        torch.save(full, "runs/model.tmp")
        os.replace("runs/model.tmp", "runs/best.pt")
        shutil.rmtree("runs/old", ignore_errors=True)
    dcp.save(model.state_dict(), checkpoint_id="runs/sharded")
    dcp.load(model.state_dict(), checkpoint_id="runs/sharded")
    state.save(model, optimizer, "runs/state", step=1)
    state.async_save(model, optimizer, "runs/state", step=2).wait()
    assert state.find_latest("runs/state").name == "step-00000002"
    with open(f"runs/log{dist.get_rank()}.csv", "a") as log:
        log.write("1,2\\n")

for step in range(1000):
    model(torch.ones(4, 8)).sum().backward()
    assert step < 2, "the command goes on"
    if step == 0:
        save()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Current folder, with a script and the checkpoints of an earlier run."""
    torch._dynamo.reset()
    (tmp_path / "train.py").write_text(_SCRIPT)
    runs = tmp_path / "runs"
    for name in ("model.pt", "best.pt", "old/model.pt", "sharded/.metadata", "log0.csv"):
        (runs / name).parent.mkdir(parents=True, exist_ok=True)
        (runs / name).write_text(f"the user's {name}\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


Files = dict[str, tuple[int, int, bytes]]


def read_all(folder: Path) -> Files:
    """Mode, mtime and content of a folder and everything below it, by path."""
    found = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.stat()
        content = path.read_bytes() if path.is_file() else b""
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_mtime_ns, content)
    return found


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (["check"], []),
        (["explain", "--out", "{out}/page.html"], []),
        (["precompile", "--world", "8", "--out", "{out}"], ["bundle"]),
    ],
    ids=["check", "explain", "precompile"],
)
def test_command_leaves_the_users_files_unchanged(
    project: Path,
    tmp_path_factory: pytest.TempPathFactory,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    arguments: list[str],
) -> None:
    if command[0] == "precompile":
        skip_before("2.13")
    before, out = read_all(project), tmp_path_factory.mktemp("out")
    asked = [part.format(out=out) for part in command]
    assert main([*asked, "train.py", *arguments]) == 0
    assert read_all(project) == before
    said = " ".join(capsys.readouterr().out.split())
    names = "runs/best.pt, runs/log0.csv, runs/model.pt, runs/sharded/.metadata and 2 more"
    assert f"not written: {names} ({command[0]} runs the script without its writes)" in said
    assert f"not removed: runs/old ({command[0]} runs the script without its writes)" in said
    assert [path.name for path in out.iterdir()] == {"check": [], "explain": ["page.html"]}.get(
        command[0], ["step.bundle"]
    )


def test_bundle_is_written_into_the_users_folder(project: Path) -> None:
    skip_before("2.13")
    before = read_all(project)
    assert main(["precompile", "--world", "8", "--out", "runs", "train.py", "bundle"]) == 0
    after = read_all(project)
    assert after.keys() - before.keys() == {"runs/step.bundle"}
    assert after | {"runs": before["runs"]} == before | {"runs/step.bundle": after["runs/step.bundle"]}


def test_file_that_appears_meanwhile_was_not_removed(tmp_path: Path) -> None:
    theirs, own = tmp_path / "theirs", tmp_path / "own"
    for folder in (theirs, own):
        folder.mkdir()
    (theirs / "before").touch()
    overlay = Overlay(str(own))
    overlay.find(str(theirs / "new"), Access.MAKE)
    overlay.find(str(theirs), Access.LIST)
    (theirs / "meanwhile").touch()
    assert overlay.changes(str(theirs)) == ([], [])


def test_no_message_if_script_writes_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text(_SCRIPT.replace("        save()", "        pass"))
    assert main(["check", "train.py"]) == 0
    assert "not written" not in capsys.readouterr().out


def test_steps_option_ends_script_and_must_be_positive(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "train.py").write_text(_SCRIPT.replace("step < 2", "step < 3"))
    assert main(["explain", "--steps", "3", "--out", "page.html", "train.py"]) == 0
    assert (project / "page.html").exists()
    for command in (["explain", "--out", "page.html"], ["precompile", "--world", "2", "--out", "."]):
        assert main([*command, "--steps", "0", "train.py"]) == 2
        assert "expected --steps to be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_read_redirected_writes_of_each_other(project: Path) -> None:
    before = read_all(project / "runs")
    out = run_forked(project, COMMAND, "check", "train.py")
    assert out.count("train.py on 2 ranks, 2 steps: compiles whole") == 1
    assert out.count("not written: ") == 1
    assert read_all(project / "runs") == before


def run(project: Path, source: str) -> dict[str, object]:
    """Run a script in the project with protected files; return its globals."""
    path = project / "script.py"
    path.write_text(source)
    with protected_files("check", path):
        return run_script(path, [])


@pytest.fixture
def unchanged(project: Path) -> Iterator[Path]:
    """The project; fails if a test changes files other than script.py or leaves functions replaced."""
    before = read_all(project / "runs")
    functions = _present_functions()
    yield project
    assert read_all(project / "runs") == before
    assert sorted(path.name for path in project.iterdir()) == ["runs", "script.py", "train.py"]
    assert all(map(operator.is_, functions, _present_functions()))


def _present_functions() -> tuple[object, ...]:
    return builtins.open, os.stat, os.replace, shutil.rmtree, sqlite3.connect, torch.UntypedStorage.from_file


def test_script_reads_back_its_redirected_writes(unchanged: Path) -> None:
    names = run(
        unchanged,
        """
import bz2, json, os, shutil, sqlite3, tempfile
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

with open("runs/log0.csv", "a") as file:
    file.write("more")
appended = Path("runs/log0.csv").read_text()
Path("runs/model.pt").write_text("mine")
overwritten = open(b"runs/model.pt").read()
with open("runs/best.pt", "r+") as file:
    file.write("THE")
changed = open(os.path.abspath("runs/best.pt")).read()

os.makedirs("runs/new/deep", exist_ok=True)
os.makedirs("runs/new/deep", exist_ok=True)
with open("runs/new/deep/x.json", "w") as file:
    json.dump([1], file)
loaded = json.load(open("runs/new/deep/x.json"))
torch.save(torch.ones(2), "runs/new/t.pt")
tensor = torch.load("runs/new/t.pt"), torch.load("runs/new/t.pt", mmap=True)
save_file({"a": torch.ones(2)}, "runs/new/t.safetensors")
safe = load_file("runs/new/t.safetensors")["a"]
np.save("runs/new/a.npy", np.ones(2))
array = np.load("runs/new/a.npy")
with bz2.open("runs/new/a.bz2", "wt") as file:
    file.write("packed")
packed = bz2.open("runs/new/a.bz2", "rt").read()
handle, temporary = tempfile.mkstemp(dir="runs/new")
os.write(handle, b"by handle")
os.close(handle)
os.replace(temporary, "runs/new/final")
final = Path("runs/new/final").read_text()
with sqlite3.connect("runs/new/db") as db:
    db.execute("create table t (a)")

shutil.copy2("runs/best.pt", "runs/new/copy.pt")
os.rename("runs/old", "runs/older")
renamed = Path("runs/older/model.pt").read_text(), Path("runs/old").exists()
os.symlink("older", "runs/latest")
linked = Path("runs/latest/model.pt").read_text(), os.path.islink("runs/latest")
shutil.rmtree("runs/sharded")
os.remove("runs/latest")
Path("runs/older/model.pt").unlink()
os.rmdir("runs/older")
shutil.move("runs/new/final", "runs/moved")
os.utime("runs/model.pt")
os.chmod("runs/log0.csv", 0o600)
names = sorted(os.listdir("runs")), sorted(entry.name for entry in os.scandir("runs") if entry.is_file())
walked = {os.path.join(folder, name) for folder, _, files in os.walk("runs") for name in files}
globbed = {str(path) for path in Path("runs").rglob("*") if path.is_file()}
""",
    )
    expected = {
        "appended": "the user's log0.csv\nmore",
        "overwritten": "mine",
        "changed": "THE user's best.pt\n",
        "loaded": [1],
        "packed": "packed",
        "final": "by handle",
        "renamed": ("the user's old/model.pt\n", False),
        "linked": ("the user's old/model.pt\n", True),
        "names": (["best.pt", "log0.csv", "model.pt", "moved", "new"], ["best.pt", "log0.csv", "model.pt", "moved"]),
    }
    assert {name: names[name] for name in expected} == expected
    assert all(torch.equal(each, torch.ones(2)) for each in (*names["tensor"], names["safe"]))  # type: ignore[misc]
    assert names["walked"] == names["globbed"]
    assert {"runs/new/deep/x.json", "runs/moved", "runs/new/db"} < names["walked"]  # type: ignore[operator]


def test_writes_through_links_and_renamed_folders_are_redirected(unchanged: Path) -> None:
    names = run(
        unchanged,
        """
import os
from pathlib import Path

os.rename("runs/old", "runs/older")
open("runs/older/model.pt", "a").write("more")
os.symlink(os.path.abspath("runs/sharded"), "runs/absolute")
open("runs/absolute/.metadata", "w").write("mine")
os.link("runs/model.pt", "runs/hard")
open("runs/hard", "a").write("more")
os.chdir("runs")
open("log0.csv", "a").write("more")
Path("best.pt").write_text("mine")
os.chdir("..")
paths = ("older/model.pt", "sharded/.metadata", "model.pt", "log0.csv", "best.pt")
contents = [Path("runs", path).read_text() for path in paths]
""",
    )
    assert names["contents"] == [
        *("the user's old/model.pt\nmore", "mine", "the user's model.pt\nmore", "the user's log0.csv\nmore", "mine")
    ]


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("open('nowhere/x', 'w')", FileNotFoundError),
        ("open('runs/model.pt', 'x')", FileExistsError),
        ("open('runs/missing')", FileNotFoundError),
        ("open('runs', 'w')", IsADirectoryError),
        ("os.mkdir('runs')", FileExistsError),
        ("os.rmdir('runs')", OSError),
        ("os.remove('runs/missing')", FileNotFoundError),
        ("os.remove('runs/model.pt') or open('runs/model.pt')", FileNotFoundError),
        ("os.rename('runs/missing', 'runs/x')", FileNotFoundError),
        ("os.utime('runs/missing')", FileNotFoundError),
        ("io.FileIO('runs/model.pt', 'w')", PermissionError),
        ("posix.unlink('runs/model.pt')", PermissionError),
    ],
)
def test_failing_file_operations_raise_os_errors(unchanged: Path, line: str, error: type[OSError]) -> None:
    with pytest.raises(error):
        run(unchanged, f"import io, os, posix\n{line}\n")


def test_temporary_files_and_caches_are_written(
    unchanged: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache := tmp_path_factory.mktemp("cache")))
    monkeypatch.delenv("HF_HOME", raising=False)
    other = tmp_path_factory.mktemp("other")
    run(
        unchanged,
        f"import subprocess\nopen({str(other / 'a')!r}, 'w').write('a')\nopen({str(cache / 'b')!r}, 'w').write('b')\n"
        f"open('/dev/null', 'w').write('c')\nsubprocess.run(['cp', {str(cache / 'b')!r}, {str(cache / 'd')!r}])\n",
    )
    assert [(folder / name).read_text() for folder, name in ((other, "a"), (cache, "b"), (cache, "d"))] == [
        *("a", "b", "b")
    ]


def test_write_through_link_in_temporary_folder_is_redirected(
    unchanged: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    link = tmp_path_factory.mktemp("other") / "link"
    link.symlink_to(unchanged / "runs")
    names = run(unchanged, f"open({str(link / 'model.pt')!r}, 'w').write('a')\nseen = open('runs/model.pt').read()\n")
    assert names["seen"] == "a"


def test_current_folder_is_restored_after_the_script(unchanged: Path) -> None:
    names = run(unchanged, "import os\nos.mkdir('runs/new')\nos.chdir('runs/new')\nopen('x', 'w').write('a')\n")
    assert names and Path.cwd() == unchanged


def test_threads_stay_redirected_after_the_script(unchanged: Path) -> None:
    go = threading.Event()
    threading.Event.of_test = go  # type: ignore[attr-defined]
    names = run(
        unchanged,
        """
import threading

def save():
    threading.Event.of_test.wait(60)
    open("runs/model.pt", "w").write("late")

thread = threading.Thread(target=save)
thread.start()
""",
    )
    thread = names["thread"]
    assert isinstance(thread, threading.Thread)
    (unchanged / "written").write_text("by another thread")
    (unchanged / "written").unlink()
    go.set()
    thread.join()
    with protected_files("check", unchanged / "script.py"):
        pass  # restores the replaced functions
