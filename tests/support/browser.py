"""Real Chromium, without a screen, and what it says about a page."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or importlib.util.find_spec("playwright") is None,
    reason="Chromium is missing: run `make servers`",
)
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"]

# Adds up how much of what is seen moves by itself, as browsers measure it.
LAYOUT_SHIFT = """
window.layoutShift = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) window.layoutShift += entry.value;
}).observe({ type: "layout-shift", buffered: true });
"""


# All at once: it may change between two questions.
TABLE = """
(() => {
  const texts = (cells) => [...cells].map((cell) => cell.textContent);
  const table = document.getElementById("ranks");
  return [texts(table.querySelectorAll("th")), [...table.tBodies[0].rows].map((row) => texts(row.cells))];
})()
"""


class Tab:
    """A page in the browser.

    Attributes:
        page: Playwright's.
        complaints: What the browser's console, or the page, has complained of.
        asked: Addresses that were asked for.
    """

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        self.asked: list[str] = []
        page.add_init_script(LAYOUT_SHIFT)
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.asked.append(request.url))

    def _hear(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.complaints.append(text)

    def text(self, selector: str) -> str:
        found: str = self.page.text_content(selector)
        return found

    def rows(self) -> list[dict[str, str]]:
        """The table of ranks, a mapping from title to text for each row."""
        titles, rows = self.page.evaluate(TABLE)
        return [dict(zip(titles, row, strict=True)) for row in rows]

    def tiles(self) -> dict[str, str]:
        names = self.page.locator("#numbers dt").all_text_contents()
        return dict(zip(names, self.page.locator("#numbers dd").all_text_contents(), strict=True))


@contextmanager
def browser() -> Iterator[Any]:
    """Run the browser."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield running
        finally:
            running.close()


@contextmanager
def tab(running: Any, width: int = 1280, height: int = 900, scheme: str = "light") -> Iterator[Tab]:
    """Open a tab with a session of its own."""
    context = running.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    try:
        yield Tab(context.new_page())
    finally:
        context.close()
