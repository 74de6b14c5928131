"""The page of `explain` in a real browser."""

from __future__ import annotations

import re
from pathlib import Path

from compile_fsdp.tools.explain import Report
from compile_fsdp.tools.explain.html import compare
from compile_fsdp.tools.explain.report import page_data
from helpers.models.explained import HOSTILE
from helpers.pages.open_page import OpenPage


def test_page_loads_without_errors_or_network_requests(opened: OpenPage) -> None:
    assert opened.errors == []
    assert len(opened.requests) == 1 and opened.requests[0].startswith("file:")
    assert opened.page.locator("h1").inner_text() == "Model"


def test_timeline_and_memory_charts_are_drawn(opened: OpenPage) -> None:
    for kind in ("compute", "gather", "reduce"):
        assert opened.count(f"#timeline rect.{kind}") > 0
    assert opened.count("#timeline rect.wait") > 0  # a step begins with exposed communication
    assert opened.page.locator("#memory path.area").bounding_box()["height"] > 50  # type: ignore[index]
    assert opened.count("#memory path.eager") == 1
    opened.page.locator("#timeline rect.gather").first.hover()
    assert "all-gather" in opened.page.locator("#tip").inner_text()


def test_search_filters_diff_groups_and_timeline(opened: OpenPage) -> None:
    page = opened.page
    lines, groups = opened.count("#diff div"), opened.count("#groups tbody tr:visible")
    assert groups == 3 and opened.count(".event.dim") == 0
    page.locator("#search").press_sequentially("blocks.1.gate")
    assert opened.count("#groups tbody tr:visible") == 1
    found = [text for text in page.locator("#diff div").all_inner_texts()]
    assert found and all("blocks.1.gate" in text for text in found)
    assert opened.count("#diff mark") >= len(found)
    assert 0 < opened.count(".event:not(.dim)") < opened.count(".event")
    assert re.fullmatch(rf"\d+ events, 1 group, {len(found)} lines", page.locator("#found").inner_text())
    page.locator("#search").fill("nothing has this name")
    assert opened.count("#groups tbody tr:visible") == 0
    assert page.locator("#diff").inner_text() == "No line matches."
    page.locator("#search").fill("")
    assert (opened.count("#diff div"), opened.count("#groups tbody tr:visible")) == (lines, groups)


def test_pass_tab_shows_the_changed_lines(opened: OpenPage) -> None:
    page = opened.page
    page.locator("#tabs button", has_text="remove_unshard_copies").first.click()
    removed = page.locator("#diff .del").all_inner_texts()
    assert sum("fsdp.copy_" in line for line in removed) == 4  # one for each parameter of the blocks
    assert "4 of 6 windows removed" in page.locator("#summary").inner_text()
    hidden = opened.count("#diff .skip")
    page.locator("#whole").check()
    assert opened.count("#diff .skip") == 0 < hidden
    assert opened.errors == []


def test_timeline_zooms_to_one_graph_and_back(opened: OpenPage) -> None:
    page = opened.page
    whole = opened.count("#timeline rect.reduce")
    page.locator("#zoom button", has_text="forward").click()
    assert opened.count("#timeline rect.reduce") == 0 < whole
    page.locator("#timeline svg").dblclick(position={"x": 700, "y": 5})
    assert opened.count("#timeline rect.reduce") == whole


def test_markup_in_names_is_escaped(opened: OpenPage, report: Report, tmp_path: Path) -> None:
    assert opened.page.title() == "Model - compile_fsdp explain"
    assert HOSTILE in opened.page.locator("#groups").inner_text()
    text = (tmp_path / "report.html").read_text()
    assert text.count("<script") == text.count("</script") == 2
    assert HOSTILE not in text


def test_page_has_no_external_references(report: Report, tmp_path: Path) -> None:
    report.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    assert set(re.findall(r"https?://[^\s\"']+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text


def test_edits_reproduce_graph_before_and_after_each_pass(report: Report) -> None:
    for graph, shown in zip(report.graphs, page_data(report)["graphs"], strict=True):
        for i in range(1, len(graph.stages)):
            edits = shown["stages"][i]["edits"]
            texts = [
                [shown["lines"][n] for sign, numbers in edits for n in numbers if sign != skipped] for skipped in "+-"
            ]
            assert texts == [list(graph.stages[i - 1].lines), list(graph.stages[i].lines)]


def test_replaced_line_is_a_deletion_and_an_insertion() -> None:
    assert compare([1, 2, 3], [1, 4, 3, 5]) == [(" ", [1]), ("-", [2]), ("+", [4]), (" ", [3]), ("+", [5])]
    assert compare([1, 2], [1, 2]) == [(" ", [1, 2])]
