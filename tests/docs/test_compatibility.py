"""What `make test-matrix` writes is what pytest has said."""

from __future__ import annotations

from pathlib import Path

from matrix import Result, read, render

_LOG = """<testsuites><testsuite time="150.0">
<testcase classname="ops.test_copy" name="test_a[1]"/>
<testcase classname="ops.test_copy" name="test_b"><failure message="no"/></testcase>
<testcase classname="ops.test_copy" name="test_c"><error message="no"/></testcase>
<testcase classname="ops.test_copy" name="test_d"><skipped message="no GPU"/></testcase>
</testsuite></testsuites>"""


def test_counts_and_names_of_a_release(tmp_path: Path) -> None:
    log = tmp_path / "results.xml"
    log.write_text(_LOG)
    result = read(log, "2.12.0", "ops")
    failed = ("ops.test_copy::test_b", "ops.test_copy::test_c")
    assert result == Result("2.12.0", "ops", passed=1, skipped=1, failed=failed, minutes=2.5)
    page = render([result, Result("2.13.0", "ops", 4, 0, (), 1.0)])
    assert "| 2.12.0 | ops | 1 | 2 | 1 | 2 |\n| 2.13.0 | ops | 4 | 0 | 0 | 1 |" in page
    assert page.endswith("## Failures with torch 2.12.0\n\n* `ops.test_copy::test_b`\n* `ops.test_copy::test_c`\n")
