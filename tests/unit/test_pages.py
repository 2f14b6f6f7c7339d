"""Pages speak of what is there: keys, options, modules, files, tests and headings; their commands and YAML are read."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from kubetune.cli import make_parser, verb_module
from kubetune.cli.overview import VERBS
from kubetune.config import json_schema
from kubetune.config.aliases import ALIASES
from kubetune.config.load import load_config
from kubetune.config.schema import Config
from kubetune.supervisor.command_line import parse

ROOT = Path(__file__).parents[2]
PAGES = {
    str(page.relative_to(ROOT)): page.read_text("utf-8")
    for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))
    if page.name != "CHANGELOG.md"  # which speaks of what was
}
# Files, and a method of transformers, that begin like a key.
NO_KEYS = {
    "data.json",
    "evaluation.json",
    "model.generate",
    "model.safetensors",
    "mirror.json",
    "tracking.json",
}
# Options of programs that pages speak of besides.
OF_OTHERS = {
    "--create-namespace", "--hf-path", "--isolation", "--lora-adapters", "--mlx-path", "--model-id", "--prompt", "--summary",
}  # fmt: skip
KEY = re.compile(rf"`((?:{'|'.join(Config.model_fields)})(?:\.[a-z0-9_]+)+)\b")


@cache
def code() -> str:
    """Return all of the code, where options are written out."""
    places = (ROOT / folder for folder in ("src", "standin", "benchmarks", "tests"))
    scripts = (path for path in (ROOT / "scripts").iterdir() if path.is_file())
    return "\n".join(
        path.read_text("utf-8", "replace")
        for path in (*(p for f in places for p in f.rglob("*.py")), *scripts)
    )


def headings(page: Path) -> set[str]:
    """Return the anchors that a forge makes of a page's headings."""
    headings_of_page = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.M | re.S), re.M
    )
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings_of_page
    }


def commands(name: str) -> Iterator[tuple[str, bool]]:
    """Yield command lines of kubetune, as they are typed (in blocks of code), or as the text names them."""
    fenced = re.compile(r"^ *```([^\n]*)\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
    typed = "\n".join(text for _, text in fenced.findall(PAGES[name])).replace("\\\n", " ")
    for line in re.findall(
        r"^(?:\$ )?(?:\w+=\S+ )*(?:\.venv/bin/)?kubetune ([a-z].*)$", typed, re.MULTILINE
    ):
        yield re.split(r" [|>…] ", line)[0], True
    for line in re.findall(r"`kubetune\s+([a-z][^`]*)`", fenced.sub("", PAGES[name])):
        yield re.split(r" …", line)[0], False


parser_of = cache(make_parser)


@pytest.mark.parametrize("name", PAGES)
def test_commands_are_understood(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Those among the words of a page may leave out arguments, and say N for a number."""
    for line, typed in commands(name):
        words = shlex.split(line, comments=True)
        assert words[0] in VERBS, line
        mark = getattr(verb_module(words[0]), "COMMAND", None)
        with contextlib.suppress(SystemExit):
            parse(parser_of(words[0]), words[: words.index(mark)] if mark in words else words)
        stderr = capsys.readouterr().err
        assert not stderr or (
            not typed
            and re.search("are required|expected .*one argument|invalid int value", stderr)
        ), line


@pytest.mark.parametrize("name", [name for name in PAGES if "```yaml\n" in PAGES[name]])
def test_yaml_is_a_run_file_or_part_of_one(name: str, tmp_path: Path) -> None:
    """What such a part may leave out is what every run has to say."""
    file = tmp_path / "run.yaml"
    for text in re.findall(r"^```yaml\n(.*?)^```", PAGES[name], re.MULTILINE | re.DOTALL):
        if not text.startswith("apiVersion: "):
            file.write_text(text)
            values = YAML(typ="safe", pure=True).load(text)
            needed = [
                f"{key}=some/thing"
                for key in ("model", "data.train")
                if key.split(".")[0] not in values
            ]
            needed += (
                ["kubernetes.image=some/image"]
                if "image" not in values.get("kubernetes", ["image"])
                else []
            )
            load_config(file, overrides=needed)


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_pages_and_headings(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[name]):
        if re.match(r"[a-z]+:", link):
            continue
        target, _, anchor = link.partition("#")
        page = Path(os.path.normpath((ROOT / name).parent / target)) if target else ROOT / name
        assert page.exists(), link
        assert not anchor or anchor in headings(page), link


@pytest.mark.parametrize("name", PAGES)
def test_what_a_page_names_is_there(name: str) -> None:
    page = PAGES[name]
    keys = {key for key in KEY.findall(page) if key not in NO_KEYS and key not in ALIASES}
    missing = [key for key in keys if json_schema.at(tuple(key.split("."))) is None]
    flags = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", page)) - OF_OTHERS
    missing += [
        flag for flag in flags if flag not in code() and flag.replace("--no-", "--") not in code()
    ]
    modules = re.findall(r"-m (kubetune\.[a-z0-9_.]+)", page)
    missing += [
        module
        for module in modules
        if not any(
            (root / module.replace(".", "/")).with_suffix(suffix).exists()
            for root in (ROOT / "src", ROOT)
            for suffix in (".py", "")
        )
    ]
    tests = set(re.findall(r"\btest_\w+(?=\.py)", page))
    missing += [test for test in tests if not any((ROOT / "tests").rglob(f"{test}.py"))]
    assert not missing
