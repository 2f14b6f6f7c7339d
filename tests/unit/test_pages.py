"""Pages speak of what is there: keys of the run file, options, modules, files and tests that they name."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from kubetune.config import json_schema
from kubetune.config.aliases import ALIASES, RENAMED
from kubetune.config.schema import Config

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))
    if page.name != "CHANGELOG.md"  # which speaks of what was
}
NO_KEYS = {"data.json", "evaluation.json", "model.generate", "model.safetensors", "mirror.json", "tracking.json"}
"""Files, and a method of transformers, that begin like a key."""
OF_OTHERS = {"--isolation", "--lora-adapters", "--model-id", "--summary"}
"""Options of programs that pages speak of besides."""
KEY = re.compile(rf"`((?:{'|'.join(Config.model_fields)})(?:\.[a-z0-9_]+)+)\b")


@cache
def code() -> str:
    """All of the code, where options are written out."""
    places = (ROOT / folder for folder in ("kubetune", "standin", "benchmarks", "tests"))
    scripts = (path for path in (ROOT / "scripts").iterdir() if path.is_file())
    return "\n".join(
        path.read_text("utf-8", "replace") for path in (*(p for f in places for p in f.rglob("*.py")), *scripts)
    )


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name: str) -> None:
    page, folder = PAGES[name], (ROOT / name).parent
    keys = {key for key in KEY.findall(page) if key not in NO_KEYS and key not in ALIASES}
    missing = [key for key in keys if json_schema.at(tuple(key.split("."))) is None and key not in RENAMED]
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - OF_OTHERS
    missing += [flag for flag in flags if flag not in code() and flag.replace("--no-", "--") not in code()]
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page)
    missing += [link for link in links if not (folder / link).exists()]
    modules = re.findall(r"-m (kubetune\.[a-z_.]+)", page)
    missing += [
        module
        for module in modules
        if not any((ROOT / module.replace(".", "/")).with_suffix(suffix).exists() for suffix in (".py", ""))
    ]
    tests = set(re.findall(r"\btest_\w+(?=\.py)", page))
    missing += [test for test in tests if not any((ROOT / "tests").rglob(f"{test}.py"))]
    assert not missing
