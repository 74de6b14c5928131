"""The changelog follows Keep a Changelog, and its newest release is the package's version."""

from __future__ import annotations

import re
from datetime import date
from importlib.metadata import version

from helpers.releases.distributions import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (.*)$", TEXT, flags=re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_newest_release_is_the_package_version() -> None:
    assert RELEASES[0][0] == version("compile-fsdp")


def test_releases_are_dated_and_newest_first() -> None:
    keys = [(date.fromisoformat(day), *map(int, number.split("."))) for number, day in RELEASES]
    assert len(keys) == len(re.findall("^## (?!Unreleased$)", TEXT, flags=re.MULTILINE))
    assert keys == sorted(set(keys), reverse=True)


def test_change_kinds_follow_keep_a_changelog() -> None:
    kinds = re.findall(r"^### (.*)$", TEXT, flags=re.MULTILINE)
    assert kinds
    assert set(kinds) <= KINDS
