"""The page of a run's result: evaluate, export, push and check, each a job of the server, and what came of them."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kubetune.config.schema.model import DTYPE_NAMES
from kubetune.errors import ConfigError
from kubetune.reporting.verdict_lines import verdict
from kubetune.rundir import checkpoints
from kubetune.ui.jobs import FOLDER, result_job
from kubetune.ui.result.options import words_of
from kubetune.ui.result.outcomes import (
    comparison_in,
    end_in_words,
    exports_of,
    pushes_of,
    state_of_end,
)
from kubetune.ui.result.overview import cards_of, next_verb
from kubetune.ui.result.result_choices import (
    evaluations_of,
    forms_of,
    gguf_types_of,
    pushed_forms_of,
)
from kubetune.ui.run_commands import launchers
from kubetune.ui.site import Site, act, find_run, page, run_of, site_of


def result(request: Request) -> Response:
    """Show what can be done with a run's result, what is being done, and what was done."""
    site = site_of(request)
    run_dir = run_of(request)
    name = site.records.name_of(run_dir)
    (record,) = site.records.read([run_dir])
    job = site.jobs.look(result_job(name))

    # The answer of the last command. While it is written, it is no JSON yet.
    comparison = None
    if not job["running"] and "--compare=base" in job["words"]:
        comparison = comparison_in(site.jobs.result(result_job(name)), site.folder / FOLDER)
    gguf_types = gguf_types_of(run_dir)
    exports = exports_of(run_dir)
    pushes = pushes_of(record.events)
    facts = {
        "title": f"Result of {record.name}",
        "run": name,
        "run_name": record.name,
        "job": job,
        "job_words": shlex.join(["kubetune", *job["words"]]),
        "job_name": result_job(name),
        "job_state": state_of_end(job["code"]),
        "job_end": end_in_words(job["code"]),
        "job_dir": shlex.quote(str(run_dir)),
        "blocked": _blocked(site, run_dir),
        "checkpoints": checkpoints.steps(run_dir),
        "dtypes": sorted(set(DTYPE_NAMES.values())),
        "evaluations": evaluations_of(run_dir),
        "forms": forms_of(run_dir, gguf_types),
        "gguf_types": gguf_types,
        "pushed_forms": pushed_forms_of(run_dir),
        "push_to": record.config.push,
        "cards": cards_of(record, exports, pushes),
        # What was begun last stays open.
        "first_verb": job["words"][0] if job["words"] else next_verb(exports, pushes),
        "exports": exports,
        "evaluation": record.evaluation,
        "verdict": verdict(record.verdict, record.benchmarks),
        "comparison": comparison,
        "pushes": pushes,
    }
    # Each form has its own command line.
    return page(request, "result.html", "", facts)


def _blocked(site: Site, run_dir: Path) -> str:
    """Return why nothing can be begun for this run now; "" if it can."""
    name = site.records.name_of(run_dir)
    words = site.jobs.look(result_job(name))["words"]
    if site.jobs.is_running(result_job(name)):
        return f"{name} is busy with {shlex.join(['kubetune', *words])}; wait for its end, or cancel it"
    if launchers(site, run_dir):
        return (
            f"{name} still trains on this machine, and a second model would take its memory; wait for its end, or "
            "stop it first"
        )
    try:
        checkpoints.choose(run_dir)
    except ConfigError as error:
        return str(error)
    return ""


def _words(site: Site, body: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """Return the run that a request is about, and the command that it asks for."""
    run_dir = find_run(site, str(body.get("dir", "")))
    options = body.get("options")
    if not isinstance(options, dict):
        raise ConfigError("options: expected texts by name")
    return run_dir, words_of(str(body.get("verb", "")), run_dir, options)


async def command(request: Request) -> Response:
    """Answer with the command line of what is chosen, or with what is wrong with it."""

    def show(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
        _, words = _words(site, body)
        return {"command": shlex.join(["kubetune", *words])}

    return await act(request, show)


async def start(request: Request) -> Response:
    """Start the verb for a run. Answer with its job and its command line."""
    return await act(request, _start)


def _start(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    # The choices are checked first: they stay wrong whatever else is at work.
    run_dir, words = _words(site, body)
    blocked = _blocked(site, run_dir)
    if blocked:
        raise ConfigError(blocked)
    name = result_job(site.records.name_of(run_dir))
    site.jobs.start(name, words)
    return {"job": name, "command": shlex.join(["kubetune", *words])}


async def cancel(request: Request) -> Response:
    """End what is being done with a run's result. The verb takes away what it has half written."""
    return await act(request, _cancel)


def _cancel(site: Site, body: Mapping[str, Any]) -> dict[str, Any]:
    run_dir = find_run(site, str(body.get("dir", "")))
    name = site.records.name_of(run_dir)
    process = site.jobs.process(result_job(name))
    if process is None:
        raise ConfigError(f"nothing is being done with the result of {name}, or it has ended")
    # Only to the verb: it ends what it has begun itself, and takes half-written folders away.
    process.send_signal(signal.SIGTERM)
    return {}
