"""What tests of whole runs share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import browser, toy

if TYPE_CHECKING:
    from playwright.sync_api import Page


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a toy model and its data, once for each file of tests."""
    return toy.make_inputs(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def errors() -> list[str]:
    """Return what the browser of a file of tests has complained of so far."""
    return []


@pytest.fixture(scope="module")
def tab(errors: list[str]) -> Iterator[Page]:
    """Yield a page of a browser, opened once for each file of tests."""
    with browser.opened(errors) as page:
        yield page
