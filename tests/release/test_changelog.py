"""The changelog is in the form that it says, and its newest release is the one of the package."""

from __future__ import annotations

import re
from datetime import date
from importlib.metadata import version

from helpers.releases.distributions import ROOT

TEXT = (ROOT / "CHANGELOG.md").read_text()
RELEASES = re.findall(r"^## \[(\d+\.\d+\.\d+)\] - (.*)$", TEXT, flags=re.MULTILINE)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_newest_release_is_this_one() -> None:
    assert RELEASES[0][0] == version("compile-fsdp")


def test_releases_stand_newest_first_with_their_dates() -> None:
    keys = [(date.fromisoformat(day), *map(int, number.split("."))) for number, day in RELEASES]
    assert len(keys) == len(re.findall("^## (?!Unreleased$)", TEXT, flags=re.MULTILINE))
    assert keys == sorted(set(keys), reverse=True)


def test_changes_are_of_the_usual_kinds() -> None:
    kinds = re.findall(r"^### (.*)$", TEXT, flags=re.MULTILINE)
    assert kinds
    assert set(kinds) <= KINDS
