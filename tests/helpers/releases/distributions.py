"""`make dist`: build a reproducible sdist, and a wheel from it.

    SOURCE_DATE_EPOCH=1700000000 python tests/helpers/releases/distributions.py dist

setuptools dates the files of a wheel by SOURCE_DATE_EPOCH, but takes their permissions from the checkout and the umask.
Its sdist contains the build time and the user's name. Therefore the sources are copied with fixed permissions, both are
built under one umask, and the sdist is repacked.

The tests stay out of the sdist: they need the documentation, the benchmarks and the examples of a checkout as well.
"""

from __future__ import annotations

import gzip
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]

# Everything that goes into a distribution or selects its contents.
PARTS = ("compile_fsdp", "passes", "ops", "pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")


def copy_sources(root: Path, target: Path) -> None:
    """Copy a checkout's sources to a new folder, with fixed permissions."""
    target.mkdir()
    for part in PARTS:
        if (root / part).is_dir():
            shutil.copytree(root / part, target / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(root / part, target / part)
    for path in (target, *target.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)


def build_sdist(sources: Path, out: Path) -> Path:
    """Build the sdist of a folder created by `copy_sources`; return its path in `out`."""
    sdist = _build(sources, "sdist", out)
    sdist.write_bytes(repack(sdist.read_bytes(), int(os.environ["SOURCE_DATE_EPOCH"])))
    return sdist


def build_wheel(sources: Path, out: Path) -> Path:
    """Build the wheel of a folder created by `copy_sources` or `unpack`; return its path in `out`."""
    return _build(sources, "wheel", out)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist into a folder; return the folder of the sources in it."""
    with tarfile.open(sdist) as archive:
        archive.extraction_filter = getattr(tarfile, "data_filter", None)  # early releases of 3.11 lack it
        archive.extractall(folder)
    (sources,) = folder.iterdir()
    return sources


def repack(sdist: bytes, epoch: int) -> bytes:
    """Repack an sdist with sorted files, no owner, and one timestamp."""
    plain, packed = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=io.BytesIO(sdist)) as source, tarfile.open(fileobj=plain, mode="w") as target:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            member.mtime, member.mode = epoch, 0o755 if member.isdir() else 0o644
            member.uid = member.gid = 0
            member.uname = member.gname = ""
            member.pax_headers = {}  # they repeat the time in nanoseconds
            target.addfile(member, source.extractfile(member))
    with gzip.GzipFile(fileobj=packed, mode="wb", filename="", mtime=epoch) as compressed:
        compressed.write(plain.getvalue())
    return packed.getvalue()


def _build(sources: Path, kind: str, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(sources)]
    done = subprocess.run(command, cwd=out, umask=0o022, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"expected python -m build to make a {kind}, got:\n{done.stdout}{done.stderr}")
    (built,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return built


def main() -> None:
    out = Path(sys.argv[1]).resolve()
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir()
    with tempfile.TemporaryDirectory() as folder:
        copy_sources(ROOT, Path(folder, "sources"))
        sdist = build_sdist(Path(folder, "sources"), out)
        print(sdist)
        print(build_wheel(unpack(sdist, Path(folder, "unpacked")), out))


if __name__ == "__main__":
    main()
