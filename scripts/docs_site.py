"""Build the site of the documentation: `scripts/docs [FOLDER]`, dist/docs if left out.

The pages link to files outside docs (tests that prove a promise, examples, the license). So the site is built from a
copy of the checkout's shape that holds the pages and every file they link to: each link works on a forge and on the site.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOME = "docs/index.html"
FIRST_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>kubetune</title>
<meta http-equiv="refresh" content="0; url={HOME}">
<a href="{HOME}">kubetune</a>
</html>
"""
LINK = re.compile(r"\]\(([^)\s#]+)[^)]*\)")


def copy_pages(target: Path) -> list[Path]:
    """Copy every page, and every file that one links to, to the same place below `target`; return the pages."""
    menu = tomllib.loads((ROOT / "zensical.toml").read_text("utf-8"))["project"]["nav"]
    # The generator puts a page of the menu that it does not find there all the same, as a link to nothing.
    waiting = [*(ROOT / page for page in menu_pages(menu)), *sorted((ROOT / "docs").rglob("*.md"))]
    pages = []
    while waiting:
        source = waiting.pop()
        copy = target / source.relative_to(ROOT)
        if copy.exists():
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, copy)
        if source.suffix == ".md":
            pages.append(copy)
            waiting += _linked_files(source)
    return pages


def menu_pages(menu: Any) -> Iterator[str]:
    """Yield the page of each entry of a menu: a path, or a list of entries with one name each."""
    if isinstance(menu, str):
        yield menu
    for entry in menu if isinstance(menu, list) else []:
        for inner in entry.values():
            yield from menu_pages(inner)


def _linked_files(page: Path) -> list[Path]:
    """Return the files of the checkout that a page links to; a link to a folder stands for the files in it."""
    files = []
    for link in LINK.findall(page.read_text("utf-8")):
        if re.match(r"[a-z]+:", link):
            continue
        path = (page.parent / link).resolve()
        if path.is_dir():
            files += [file for file in sorted(path.iterdir()) if file.is_file()]
        else:
            files.append(path)
    return files


def build(site: Path) -> int:
    """Build the site strictly into `site`, which is replaced; return the exit code of the generator."""
    with tempfile.TemporaryDirectory() as scratch:
        work = Path(scratch)
        copy_pages(work / "pages")
        shutil.copyfile(ROOT / "zensical.toml", work / "zensical.toml")
        command = [sys.executable, "-m", "zensical", "build", "--strict"]
        done = subprocess.run(command, cwd=work, check=False)
        if done.returncode == 0:
            shutil.rmtree(site, ignore_errors=True)
            shutil.copytree(work / "site", site)
            # The generator makes the README the first page. On the site that is the page with the four ways in.
            (site / "index.html").write_text(FIRST_PAGE, "utf-8")
    return done.returncode


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "dist" / "docs")
    folder: Path = parser.parse_args().folder
    code = build(folder)
    if code == 0:
        print(f"Open {folder / 'index.html'}")
    sys.exit(code)
