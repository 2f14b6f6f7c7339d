"""A headless Chromium, that of this machine, driven by Playwright: it reaches nothing but this machine."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Page

_CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
# For which anything is waited for: a shared machine is slow at times.
_SECONDS = 900.0

needed = pytest.mark.skipif(
    _CHROMIUM is None or find_spec("playwright") is None, reason="needs Chromium, Playwright"
)


@contextmanager
def opened(errors: list[str]) -> Iterator[Page]:
    """Yield a page of a browser of its own. `errors` gets what it throws, and what it is refused."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        words = ["--no-sandbox", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"]
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=words)
        page = browser.new_page()
        page.set_default_timeout(_SECONDS * 1000)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on(
            "console",
            lambda message: errors.append(message.text) if message.type == "error" else None,
        )
        yield page
        browser.close()


def enter(page: Page, address: str, token: str) -> None:
    """Open a server by its token, at the end the page of runs."""
    page.goto(f"{address}/?token={token}")
    # The page that sets the cookie goes on to the runs by itself. Whatever is opened before that would
    # be interrupted by it.
    page.wait_for_url(f"{address}/")


def unmarked(page: str) -> str:
    """Return the text of a page without its marks of words in which no line ends."""
    return re.sub('<span class="whole">(.*?)</span>', r"\1", page)


def show(page: Page, address: Path | str, width: int = 1280, *, dark: bool = False) -> None:
    """Open a file or an address at a width, light or dark."""
    page.set_viewport_size({"width": width, "height": 900})
    page.emulate_media(color_scheme="dark" if dark else "light")
    page.goto(address if isinstance(address, str) else address.absolute().as_uri())
