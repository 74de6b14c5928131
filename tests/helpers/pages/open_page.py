"""A page in a browser, with the browser's errors and requests."""

from __future__ import annotations

from pathlib import Path

from playwright.sync_api import ConsoleMessage, Page


class OpenPage:
    """`explain`'s report in a browser, with the browser's errors, warnings and requests."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri(), timeout=120_000)  # ms; a busy machine renders slowly

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()
