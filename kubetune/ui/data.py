"""The page of data: rows as the model sees them, of a run or a run file, as `kubetune data check --html` shows some."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from shlex import quote
from urllib.parse import urlencode

from anyio import to_thread
from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.files import read_object
from kubetune.config.load import load_config, read_config
from kubetune.config.schema import Config
from kubetune.data.prepared.fingerprint import fingerprint
from kubetune.data.reading.sources import require_sources
from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
from kubetune.errors import ConfigError, KubetuneError
from kubetune.rundir import metrics
from kubetune.rundir.starts import day_of
from kubetune.ui.rows import ORDERS, PAGE, PROBLEMS, Query, open_rows
from kubetune.ui.site import Missing, Site, answer, body_of, find_run, page, site_of

MOST_BAD = 50
"""Bad records of a page."""
_MOST_FILES = 200


def data(request: Request) -> Response:
    """Rows of what is chosen, by the filters that are set."""
    site, asked = site_of(request), request.query_params
    run, file = asked.get("dir", ""), asked.get("file", "")
    common = {
        "title": "Data",
        "listed": site.records.listed(),
        "files": _files(site),
        "run": run,
        "file": file,
        "orders": ORDERS,
        "problems": PROBLEMS,
    }
    if not run and not file:
        return page(
            request,
            "rows.html",
            "kubetune data check RUN.yaml --html data.html",
            {**common, "found": None},
        )
    config, prepared, target = _chosen(site, run, file)
    query = _query(asked)
    opened = open_rows(config, prepared)
    facts = {
        **common,
        "query": query,
        "target": str(target),
        "task": config.task,
        "limit": config.data.max_length,
    }
    verb = f"kubetune data check {quote(str(target))} --html data.html"
    if opened is None:
        return page(
            request,
            "rows.html",
            f"kubetune data prepare {quote(str(target))}",
            {**facts, "found": None, "absent": True},
        )
    found = opened.look(query)
    kept = {key: value for key, value in asked.items() if key != "at" and value}
    return page(request, "rows.html", verb, {
        **facts, "found": found, "splits": opened.counts,
        "sources": opened.sources.get(query.split, []), "findings": opened.findings(),
        "after": urlencode({**kept, "at": found.next}) if found.next is not None else "",
        "before": urlencode({**kept, "at": max(0, query.at - PAGE)}) if query.at and not query.text else "",
        "first": urlencode(kept) if query.at else "",
    })  # fmt: skip


def _files(site: Site) -> list[str]:
    """Run files beside the runs."""
    found = sorted(
        path.name
        for path in site.folder.glob("[!.]*.yaml")
        if path.is_file() and not path.is_symlink()
    )
    return found[:_MOST_FILES]


def _chosen(site: Site, run: str, file: str) -> tuple[Config, str, Path]:
    """The config that is chosen, the fingerprint of its rows, and the file that the command line takes."""
    target = _target(site, run, file)
    if run:
        config, path = read_config(target.parent), target.parent / metrics.DATA
        known = read_object(path) if path.is_file() else {}
        return config, str(known.get("fingerprint", "")), target
    config = load_config(target, environ=os.environ)
    require_sources(config.sources)
    tokenizer = load_tokenizer(config.model, cache_folder(config.data.cache), date=day_of(config))
    return config, fingerprint(config, tokenizer), site.folder / file


def _target(site: Site, run: str, file: str) -> Path:
    """The run file of a run, or one beside the runs. Raises Missing."""
    if run:
        return find_run(site, run) / metrics.CONFIG
    if file not in _files(site):
        raise Missing(f"{file}: no run file of this name in {site.folder}")
    return site.folder / file


def _query(asked: Mapping[str, str]) -> Query:
    """The filters of an address. Raises ConfigError for those without sense."""
    numbers = {}
    for key in ("source", "low", "high", "at"):
        text = asked.get(key, "").strip()
        if text and not (text.isdecimal() and len(text) < 12):
            raise ConfigError(f"{key}: found {text!r}; expected a whole number")
        numbers[key] = int(text) if text else None
    problem, order = asked.get("problem", ""), asked.get("order") or "file"
    if problem not in ("", *PROBLEMS) or order not in ORDERS:
        raise ConfigError(
            f"problem and order: expected one of {', '.join(PROBLEMS)}, and one of {', '.join(ORDERS)}"
        )
    return Query(
        asked.get("split") or "train", numbers["source"], numbers["low"] or 0, numbers["high"], problem, order,
        asked.get("text", "").strip()[:200], numbers["at"] or 0,
    )  # fmt: skip


def bad(request: Request) -> Response:
    """Bad records, a page at a time, as the last check of all found them."""
    site, asked = site_of(request), request.query_params
    run, file = asked.get("dir", ""), asked.get("file", "")
    target, at = _target(site, run, file), _query(asked).at
    name = _job_of("check", run or file)
    seen, path = site.jobs.look(name), site.jobs.result(name)
    total, found = bad_records(path, at) if path.is_file() and not seen["running"] else (None, [])
    kept = urlencode({"dir": run} if run else {"file": file})
    facts = {
        "title": "Bad records", "run": run, "file": file, "target": str(target), "kept": kept, "seen": seen, "at": at,
        "total": total, "found": found, "checked": path.stat().st_mtime if total is not None else None,
        "after": at + MOST_BAD if total is not None and at + MOST_BAD < total else None,
        "before": max(0, at - MOST_BAD) if at else None,
    }  # fmt: skip
    return page(request, "bad.html", f"kubetune data check {quote(str(target))} --json", facts)


def bad_records(path: Path, at: int) -> tuple[int | None, list[tuple[str, str, str]]]:
    """Number of records that `kubetune data check --json` refused, and some of them: file, line, what was found there.

    Each stands on a line of its own, so that none but these are held. None where the check came to no end.
    """
    with path.open(encoding="utf-8") as lines:
        if not any(line == '  "problems": {\n' for line in lines):
            return None, []
        total = int(next(lines).partition(": ")[2].rstrip(",\n"))
        next(lines)  # the head of the list
        kept = [
            json.loads(line.strip().rstrip(","))
            for line in islice(lines, at, min(at + MOST_BAD, total))
        ]
    problems = []
    for text in kept:
        parts = re.fullmatch(r"(.*?):(\d+): (.*)", text, re.DOTALL)
        problems.append((parts[1], parts[2], parts[3]) if parts else ("", "", text))
    return total, problems


async def prepare(request: Request) -> Response:
    """Begin `kubetune data prepare` for a run or a run file whose rows are not here."""
    return await _begin(request, "data", ["data", "prepare"])


async def check(request: Request) -> Response:
    """Begin `kubetune data check` of all records of a run or a run file."""
    return await _begin(request, "check", ["data", "check", "--json"])


async def _begin(request: Request, kind: str, words: list[str]) -> Response:
    site, asked = site_of(request), await body_of(request)
    run, file = str(asked.get("dir") or ""), str(asked.get("file") or "")

    def begin() -> Response:
        try:
            target = _target(site, run, file)
            name = _job_of(kind, run or file)
            site.jobs.start(name, [*words, str(target)])
        except KubetuneError as error:
            return answer({"problems": [str(error)]})
        return answer({"problems": [], "job": name})

    return await to_thread.run_sync(begin)


def _job_of(kind: str, chosen: str) -> str:
    """By the whole path: many runs have the same last name."""
    return f"{chosen}.{kind}"
