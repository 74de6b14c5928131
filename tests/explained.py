"""The model whose step the tests of `explain` look at, and the report's page in a browser."""

from __future__ import annotations

from pathlib import Path

import torch
from playwright.sync_api import ConsoleMessage, Page
from torch import nn

WORLD = 1024
HOSTILE = "</script><script>document['title']='owned'</script>"


class Block(nn.Module):
    """Two rows of each parameter for each rank, so that shards are even, and blocks of a packed buffer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * WORLD, bias=False)
        self.gate = nn.Linear(width, 2 * WORLD, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.up(x)) * self.gate(x)
        return x + hidden.view(len(x), -1, x.shape[1]).mean(1)


class Model(nn.Module):
    """Two blocks, and a root with a module whose name is markup."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.add_module(HOSTILE, nn.Linear(width, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return getattr(self, HOSTILE)(x)


class OpenPage:
    """The report in the browser, and what the browser said of it."""

    def __init__(self, page: Page, path: Path) -> None:
        self.page = page
        self.errors: list[str] = []
        self.requests: list[str] = []
        page.on("console", self._console)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))
        page.goto(path.as_uri())

    def _console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.errors.append(message.text)

    def count(self, selector: str) -> int:
        return self.page.locator(selector).count()
