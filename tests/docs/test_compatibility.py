"""`make test-matrix` writes pytest's results and keeps the results of earlier runs."""

from __future__ import annotations

from pathlib import Path

from helpers.releases.matrix import Result, merge, parse, read, render

_LOG = """<testsuites><testsuite time="150.0">
<testcase classname="ops.test_copy" name="test_a[1]"/>
<testcase classname="ops.test_copy" name="test_b"><failure message="no"/></testcase>
<testcase classname="ops.test_copy" name="test_c"><error message="no"/></testcase>
<testcase classname="ops.test_copy" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_release_row_has_counts_and_failed_tests(tmp_path: Path) -> None:
    log = tmp_path / "results.xml"
    log.write_text(_LOG)
    result = read(log, "2.12.0", "ops")
    assert result.failed == ("ops.test_copy::test_b", "ops.test_copy::test_c")
    assert result.row.startswith("| 2.12.0 | ") and result.row.endswith(" | ops | 1 | 2 | 1 | 2 |")
    page = render([result])
    assert result.row in page
    assert page.endswith("## Failures with torch 2.12.0\n\n* `ops.test_copy::test_b`\n* `ops.test_copy::test_c`\n")


def test_merge_keeps_other_releases() -> None:
    earlier = [Result("2.9.0", "| 2.9.0 | a |", ("x::y[1-2]",)), Result("2.12.0", "| 2.12.0 | b |", ("x::z",))]
    assert parse(render(earlier)) == earlier
    new = Result("2.12.0", "| 2.12.0 | c |", ())
    assert merge(parse(render(earlier)), new) == [earlier[0], new]
    assert merge(earlier, Result("2.11.0", "| 2.11.0 | d |", ()))[1].torch == "2.11.0"
