"""The site of the documentation is built strictly, shows every page in its menu, and fetches nothing from elsewhere."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from urllib.parse import unquote

from scripts.docs_site import menu_pages

ROOT = Path(__file__).parents[2]


def test_the_menu_names_every_page() -> None:
    menu = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages <= set(menu_pages(menu))


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, ROOT / "scripts" / "docs_site.py", tmp_path / "site"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    home = (tmp_path / "site" / "docs" / "index.html").read_text("utf-8")
    fetched = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?:[^\" >]+)", home)
    assert fetched == []
    assert (tmp_path / "site" / "docs" / "tutorials" / "first-model.html").is_file()
    # A link to a proof leads to the file on the site too.
    assert (tmp_path / "site" / "tests" / "crash" / "test_kill.py").is_file()
    assert dead_links(tmp_path / "site") == []


def test_no_cell_of_a_table_is_a_paragraph() -> None:
    pages = [ROOT / "README.md", ROOT / "standin" / "README.md", *(ROOT / "docs").rglob("*.md")]
    assert [cell for page in pages for cell in long_cells(page)] == []


def long_cells(page: Path) -> list[str]:
    """Return page and line of each table cell of more than 40 words; blocks of code have no cells."""
    cells = []
    in_code = False
    for number, line in enumerate(page.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        if in_code or not line.lstrip().startswith("|"):
            continue
        for cell in re.split(r"(?<!\\)\|", line):
            if len(cell.split()) > 40:
                cells.append(f"{page.relative_to(ROOT)}:{number}: {cell.strip()}")
    return cells


def dead_links(site: Path) -> list[str]:
    """Return the links of the site to files that it does not have; folders, which no server need show, are none."""
    dead = []
    for page in site.rglob("*.html"):
        for link in re.findall(r"(?:href|src)=\"?([^\" >]+)", page.read_text("utf-8")):
            target = unquote(re.split("[#?]", link)[0])
            if not target or re.match("[a-z]+:", target):
                continue
            base = site if target.startswith("/") else page.parent
            path = base / target.lstrip("/")
            if not path.is_file() and not (path / "index.html").is_file():
                dead.append(f"{page.relative_to(site)}: {link}")
    return dead
