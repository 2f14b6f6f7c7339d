"""The site of the documentation is built strictly, shows every page in its menu, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def paths(menu: Any) -> Iterator[str]:
    """Yield the page of each entry of a menu."""
    if isinstance(menu, str):
        yield menu
    for entry in menu if isinstance(menu, list) else []:
        for inner in entry.values():
            yield from paths(inner)


def test_the_menu_names_every_page() -> None:
    menu = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(paths(menu))


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "docs_site.py", tmp_path / "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "index.html").read_text("utf-8")
    fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", home)
    assert fetched == []
    assert (tmp_path / "site" / "docs" / "tutorials" / "first-model.html").is_file()
    # A link to a proof leads to the file on the site too.
    assert (tmp_path / "site" / "tests" / "crash" / "test_kill.py").is_file()
