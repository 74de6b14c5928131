"""The file of a bundle: an unusable one is refused, and a write replaces all of it or nothing."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from compile_fsdp.errors import NotPortableError
from compile_fsdp.replay import bundle
from helpers.ranks.fresh import run_fresh


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: path.write_bytes(change(path.read_bytes())) and None


def _fact(name: str) -> Callable[[Path], None]:
    """Change one fact in the bundle's header."""

    def change(content: bytes) -> bytes:
        magic, head, body = content.split(b"\n", 2)
        parsed = json.loads(head)
        parsed["facts"][name] = "something else"
        return b"\n".join((magic, json.dumps(parsed).encode(), body))

    return _bytes(change)


_FACTS = (
    *("torch", "python", "processor", "code of compile_fsdp", "options", "settings of Inductor"),
    *("parameters", "buffers", "modules", "code of the modules"),
)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (lambda path: path.unlink(), "none yet"),
        (_bytes(lambda content: b""), "no bundle"),
        (_bytes(lambda content: b"PK" + content), "no bundle"),
        (_bytes(lambda content: content.replace(b"bundle 1", b"bundle 2", 1)), "different version"),
        (_bytes(lambda content: content[:40]), "first lines are damaged"),
        (_bytes(lambda content: content.replace(b'"sha256"', b'"sha255"', 1)), "first lines are damaged"),
        (_bytes(lambda content: content[:-1]), "damaged"),
        (_bytes(lambda content: content + b"."), "damaged"),
        (_bytes(lambda content: content[:-9] + b"!" + content[-8:]), "damaged"),
        (lambda path: path.chmod(0o606), "everybody may write"),
        *((_fact(name), f"different {name}") for name in _FACTS),
    ],
)
def test_unusable_bundle_is_refused_with_the_reason(damage: Callable[[Path], None], named: str, tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    facts = dict.fromkeys(_FACTS, "this")
    bundle.write(path, facts, {"a": 1})
    assert bundle.read(path, facts) == {"a": 1}
    damage(path)
    with pytest.raises(NotPortableError, match=named):
        bundle.read(path, facts)


def test_bundle_owned_by_another_user_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    bundle.write(path, {}, None)
    if os.getuid() != 0:
        pytest.skip("only root can give files away")
    os.chown(path, 12345, -1)
    with pytest.raises(NotPortableError, match="another user"):
        bundle.read(path, {})


def test_bundle_that_cannot_be_unpickled_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    bundle.write(path, {}, _Gone())
    name, module = _Gone.__name__, sys.modules[__name__]
    gone = getattr(module, name)
    delattr(module, name)
    try:
        with pytest.raises(NotPortableError, match="cannot be read: AttributeError"):
            bundle.read(path, {})
    finally:
        setattr(module, name, gone)


class _Gone:
    pass


_WRITE_MANY = """
import json, sys
from pathlib import Path

from compile_fsdp.replay import bundle

path, text = json.loads(sys.argv[1])
for _ in range(200):
    bundle.write(Path(path), {"a": "b"}, text * 10_000)
print(json.dumps(None))
"""


def test_concurrent_writes_never_leave_a_partial_bundle(tmp_path: Path) -> None:
    path, texts = tmp_path / "step.bundle", ("one", "other")
    bundle.write(path, {"a": "b"}, texts[0] * 10_000)
    seen = set()
    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(run_fresh, _WRITE_MANY, str(path), text) for text in texts]
        while not all(writer.done() for writer in writers):
            seen.add(bundle.read(path, {"a": "b"}))
        for writer in writers:
            writer.result()
    assert seen == {text * 10_000 for text in texts}
    assert list(tmp_path.iterdir()) == [path]


def test_failed_write_keeps_the_previous_bundle(tmp_path: Path) -> None:
    path = tmp_path / "step.bundle"
    bundle.write(path, {}, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))  # a larger file cannot be written
    try:
        with pytest.raises(OSError, match="too large"):
            bundle.write(path, {}, "x" * 200_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert bundle.read(path, {}) == "before"
    assert list(tmp_path.iterdir()) == [path]


_DESCRIBE_OPTIONS = """
import json
from compile_fsdp import Options
from compile_fsdp.passes import PASSES
from compile_fsdp.replay import bundle

names = [each.__name__ for each in PASSES]
print(json.dumps([bundle._describe_options(Options(disabled_passes=frozenset(names[:n]))) for n in (1, len(names))]))
"""


def test_options_have_equal_descriptions_in_all_processes() -> None:
    one, other = (run_fresh(_DESCRIBE_OPTIONS, PYTHONHASHSEED=seed)[0] for seed in ("1", "2"))
    assert one == other
    assert one[0] != one[1]
