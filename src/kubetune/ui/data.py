"""The page of data: the rows of a run or of a run file, as the model sees them.

`kubetune data check --html` shows some of them.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from shlex import quote
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.files import read_object
from kubetune.config import consent
from kubetune.config.load import load_config
from kubetune.config.resolved import read_config
from kubetune.config.schema import Config
from kubetune.data.prepared.fingerprint import fingerprint
from kubetune.data.reading.hub import is_local
from kubetune.data.reading.sources import locate, require_sources
from kubetune.data.spec import DataSpec
from kubetune.data.text.tokenizer import cache_folder, load_tokenizer
from kubetune.errors import ConfigError, KubetuneError
from kubetune.reporting.histogram import DrawnBar
from kubetune.rundir import metrics
from kubetune.rundir.starts import day_of
from kubetune.ui.form.form_fields import TASKS
from kubetune.ui.row_search import ORDERS, PAGE, PROBLEMS, Query, open_rows
from kubetune.ui.site import Missing, Site, act, find_run, page, site_of

MOST_BAD = 50  # bad records of a page
_MOST_FOLDERS = 6  # before a file's name
_MOST_FILES = 200  # run files to choose from


def data(request: Request) -> Response:
    """Show the rows of a run or a run file that fit the filters."""
    site = site_of(request)
    params = request.query_params
    run = params.get("dir", "")
    file = params.get("file", "")
    facts: dict[str, Any] = {
        "title": "Data",
        "of_runs": _files_of_runs(site) if not run and not file else [],
        "files": _files(site),
        "run": run,
        "file": file,
        "orders": ORDERS,
        "problems": PROBLEMS,
        "tasks": TASKS,
    }
    if not run and not file:
        return page(request, "rows.html", "kubetune data check RUN.yaml --html data.html", facts)

    config, prepared, target = _chosen(site, run, file)
    query = _query(params)
    opened = open_rows(config, prepared)
    if opened is None and run:
        # Today's form of the rows, or today's files, have another fingerprint than the run recorded.
        opened = open_rows(config, _fingerprint_today(site, run, target))
        facts["recorded"] = prepared
    facts |= {
        "query": query,
        "target": str(target),
        "task": config.task,
        "limit": config.data.max_length,
    }
    if opened is None:
        facts["absent"] = True
        return page(request, "rows.html", f"kubetune data prepare {quote(str(target))}", facts)

    rows = opened.look(query)
    facts |= {
        "row_page": rows,
        "splits": opened.counts,
        "sources": opened.sources.get(query.split, []),
        "findings": opened.findings(),
        "bars": [] if "recorded" in facts else _lengths(site, run, query.split),
        **_pages_around(params, query, rows.next),
    }
    verb = f"kubetune data check {quote(str(target))} --html data.html"
    return page(request, "rows.html", verb, facts)


def _pages_around(params: Mapping[str, str], query: Query, following: int | None) -> dict[str, str]:
    """Return the addresses of the pages around this one, which keep all filters; "" for those that there are not.

    `following`: the first row after this page.
    """
    filters = {key: value for key, value in params.items() if key != "at" and value}
    after = ""
    if following is not None:
        after = urlencode({**filters, "at": following})
    first = ""
    if query.at:
        first = urlencode(filters)
    # A page with a text ends after its 20th hit, so the beginning of the page before it is unknown.
    before = ""
    if query.at and not query.text:
        before = urlencode({**filters, "at": max(0, query.at - PAGE)})
    return {"after": after, "before": before, "first": first}


def _lengths(site: Site, run: str, split: str) -> list[DrawnBar]:
    """Return how long the rows of a run's training data are, which the run keeps; nothing for other rows."""
    if not run or split != "train":
        return []
    bars: list[DrawnBar] = site.records.data_of(find_run(site, run))["bars"]
    return bars


def _files_of_runs(site: Site) -> list[dict[str, Any]]:
    """Return the files that runs were trained on, the last used first: of each its data sets, and their runs.

    Runs have the same data set if they have the same prepared rows; before these are known, the same sources.
    """
    sets: dict[str, dict[str, Any]] = {}
    for listed in site.records.listed():
        if listed["state"] == "damaged":
            continue
        facts_of_run = site.records.data_of(Path(listed["path"]))
        entry = sets.setdefault(facts_of_run["key"], {**facts_of_run, "runs": []})
        run = {name: listed[name] for name in ("dir", "model", "started")}
        entry["runs"].append({**run, "name": listed["name"] or listed["dir"]})

    by_files: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for entry in sets.values():
        entry["runs"].sort(key=_started, reverse=True)
        by_files.setdefault(tuple(entry["paths"]), []).append(entry)
    files = []
    for paths, of_files in by_files.items():
        of_files.sort(key=_last_used, reverse=True)
        files.append({"paths": paths, "names": of_files[0]["names"], "sets": of_files})
    _tell_apart(files)
    return sorted(files, key=lambda file: _last_used(file["sets"][0]), reverse=True)


def _tell_apart(files: Sequence[dict[str, Any]]) -> None:
    """Put folders before the names of files that are called alike: a/train.jsonl, b/train.jsonl."""
    depth = 1
    while depth < _MOST_FOLDERS:
        depth += 1
        names = [file["names"] for file in files]
        alike = [file for file in files if names.count(file["names"]) > 1]
        for file in alike:
            file["names"] = ["/".join(Path(path).parts[-depth:]) for path in file["paths"]]
        if not alike:
            break


def _started(run: Mapping[str, Any]) -> str:
    return run["started"] or ""


def _last_used(entry: Mapping[str, Any]) -> str:
    return _started(entry["runs"][0])


def _files(site: Site) -> list[str]:
    """Return the names of the run files next to the runs."""
    # Hidden files and links are left out: a link may lead to any file of this machine.
    names = []
    for path in site.folder.glob("[!.]*.yaml"):
        if path.is_file() and not path.is_symlink():
            names.append(path.name)
    return sorted(names)[:_MOST_FILES]


def _chosen(site: Site, run: str, file: str) -> tuple[Config, str, Path]:
    """Return the config, the fingerprint of its rows, and the file that the command line takes."""
    target = _target(site, run, file)
    # A run has recorded which rows it was trained on. They may have been deleted since.
    if run:
        config = read_config(target.parent)
        path = target.parent / metrics.DATA
        prepared = {}
        if path.is_file():
            prepared = read_object(path)
        return config, str(prepared.get("fingerprint", "")), target

    # For a run file, the rows are those that a run would prepare now.
    config = load_config(target, environ=os.environ)
    return config, _fingerprint_of(DataSpec.of(config)), site.folder / file


def _fingerprint_of(spec: DataSpec) -> str:
    """Return the fingerprint of the rows that a run with these settings would prepare now. Raise KubetuneError."""
    require_sources(spec.sources)
    cache = cache_folder(spec.data.cache)
    tokenizer = load_tokenizer(spec.model, cache, date=day_of(spec.data))
    return fingerprint(spec, tokenizer)


def _fingerprint_today(site: Site, run: str, target: Path) -> str:
    """Return the fingerprint under which the rows of a run are prepared today, "" where that is not known."""
    # Whoever only looks at a page fetches nothing from the hub.
    is_begun = bool(site.jobs.look(_job_of("data", run))["words"])
    with suppress(KubetuneError):
        config = load_config(target, environ=os.environ)
        sources = chain(*config.sources.values())
        is_here = is_local(config.model.tokenizer or config.model.path)
        if is_begun or (is_here and all(locate(source).files for source in sources)):
            return _fingerprint_of(DataSpec.of(config))
    return ""


def _target(site: Site, run: str, file: str) -> Path:
    """Return the run file of a run, or one next to the runs. Raise Missing."""
    if run:
        return find_run(site, run) / metrics.CONFIG
    if file not in _files(site):
        raise Missing(f"{file}: no run file of this name in {site.folder}")
    return site.folder / file


def _query(params: Mapping[str, str]) -> Query:
    """Return the filters of an address. Raise ConfigError for a filter that does not exist."""
    # A number of more digits than rows can have would be one that no index takes.
    numbers: dict[str, int | None] = dict.fromkeys(("source", "low", "high", "at"))
    for key in numbers:
        text = params.get(key, "").strip()
        if not text:
            continue
        if not text.isdecimal() or len(text) > 11:
            raise ConfigError(f"{key}: found {text!r}; expected a whole number")
        numbers[key] = int(text)

    problem = params.get("problem", "")
    order = params.get("order") or "file"
    if problem not in ("", *PROBLEMS) or order not in ORDERS:
        raise ConfigError(
            f"problem and order: expected one of {', '.join(PROBLEMS)}, and one of {', '.join(ORDERS)}"
        )

    return Query(
        split=params.get("split") or "train",
        source=numbers["source"],
        low=numbers["low"] or 0,
        high=numbers["high"],
        problem=problem,
        order=order,
        text=params.get("text", "").strip()[:200],
        at=numbers["at"] or 0,
    )


def bad(request: Request) -> Response:
    """Show the records that the last check refused, a page at a time."""
    site = site_of(request)
    params = request.query_params
    run = params.get("dir", "")
    file = params.get("file", "")
    target = _target(site, run, file)
    at = _query(params).at

    # The answer of the last check that was begun here, once it has ended.
    name = _job_of("check", run or file)
    job = site.jobs.look(name)
    result = site.jobs.result(name)
    total = None
    checked = None
    after = None
    before = None
    records: list[tuple[str, str, str]] = []
    if result.is_file() and not job["running"]:
        total, records = bad_records(result, at)
    if total is not None:
        checked = result.stat().st_mtime
        if at + MOST_BAD < total:
            after = at + MOST_BAD
    if at:
        before = max(0, at - MOST_BAD)

    facts = {
        "title": "Bad records",
        "run": run,
        "file": file,
        "target": str(target),
        "kept": urlencode({"dir": run} if run else {"file": file}),
        "seen": job,
        "at": at,
        "total": total,
        "records": records,
        "checked": checked,
        "after": after,
        "before": before,
    }
    return page(request, "bad.html", f"kubetune data check {quote(str(target))} --json", facts)


def bad_records(path: Path, at: int) -> tuple[int | None, list[tuple[str, str, str]]]:
    """Return how many records `kubetune data check --json` refused, and a page of them: file, line and problem.

    The answer has one problem a line, so only the lines of the page are parsed. The number is None if the
    check did not come to its end.
    """
    # {
    #   "ok": false,
    #   "problems": {
    #     "total": 1234,
    #     "first": [
    #       "data/train.jsonl:12: …",
    with path.open(encoding="utf-8") as lines:
        if not any(line == '  "problems": {\n' for line in lines):
            return None, []
        total = int(next(lines).partition(": ")[2].rstrip(",\n"))
        next(lines)  # the head of the list
        of_page = list(islice(lines, at, min(at + MOST_BAD, total)))

    records = []
    for line in of_page:
        text = json.loads(line.strip().rstrip(","))
        # data/train.jsonl:12: messages: expected a list. A problem of all data has no place.
        parts = re.fullmatch(r"(.*?):(\d+): (.*)", text, re.DOTALL)
        if parts is None:
            records.append(("", "", text))
        else:
            records.append((parts[1], parts[2], parts[3]))

    return total, records


async def prepare(request: Request) -> Response:
    """Begin `kubetune data prepare` for a run or a run file without rows here."""
    return await _begin(request, "data", ["data", "prepare"])


async def check(request: Request) -> Response:
    """Begin `kubetune data check` of all records of a run or a run file."""
    return await _begin(request, "check", ["data", "check", "--json"])


async def _begin(request: Request, kind: str, words: list[str]) -> Response:
    """Start a command for a run or a run file, as a job of a kind. Answer with the job's name."""

    def begin(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
        run = str(body.get("dir") or "")
        file = str(body.get("file") or "")
        target = _target(site, run, file)
        name = _job_of(kind, run or file)
        if run:
            # The run directory may be somebody else's, and rows are written to the cache that its file names.
            data = load_config(target, environ=os.environ).data
            verb = " ".join(words)
            instead = f"do it in a terminal: kubetune {verb} {quote(str(target))}"
            consent.require(consent.of_cache(data), target.parent, instead=instead)

        site.jobs.start(name, [*words, str(target)])
        return {"job": name}

    return await act(request, begin)


def _job_of(kind: str, chosen: str) -> str:
    """Return the name of a job. It has the whole path, since many runs have the same last name."""
    return f"{chosen}.{kind}"
