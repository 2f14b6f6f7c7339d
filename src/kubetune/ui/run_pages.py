"""Pages of runs: all of a folder, one, and several laid over each other; as `kubetune runs`, `watch` and `report`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.responses import Response

from kubetune.base.humanize import counted, estimate
from kubetune.errors import (
    ENVIRONMENT,
    GATE,
    LOST_PEER,
    OK,
    ConfigError,
    KubetuneError,
    OutOfMemory,
)
from kubetune.library.listing import ARCHIVED, SORTS, in_order, is_like, metric_names, value_of
from kubetune.reporting.look.metric_values import label_of
from kubetune.reporting.page import curves_of, page_of
from kubetune.reporting.reading import RunRecord
from kubetune.rundir.labels import read_labels
from kubetune.rundir.starts import train_again
from kubetune.rundir.status import LIVE, read_status, state_of
from kubetune.ui.chat.opening import ASKING
from kubetune.ui.failure import failure_of, mend_of
from kubetune.ui.log_file import rank_of
from kubetune.ui.run_commands import launchers
from kubetune.ui.run_index import by_step, spark
from kubetune.ui.site import Site, html, page, run_of, runs_of, site_of

MOST_COMPARED = 12
# What a tab says of a run's state before its name.
SIGNS = {"done": "✓", "warned": "⚠", "failed": "✕", "running": "▶", "starting": "▶"}
MOST_BESIDE = 4  # charts beside the table of runs
Facts = dict[str, Any]  # of a run, as `Records.listed` returns them
# Pairs that are offered to be compared, and the newest runs among which they are looked for.
_MOST_PAIRS = 3
_PAIRED = 40


def _row(site: Site, run: Mapping[str, Any], metric: str) -> dict[str, Any]:
    """Return what the table shows of a run. `metric` is the one that was chosen, "" for what each run is about."""
    run_dir = Path(run["path"])
    evaluation = run["evaluation"] or {}
    main = run["main"]
    if metric:
        main = metric if evaluation.get(metric) is not None else None
    measured = spark(by_step(run["measured"], main)) if main else ""
    return {
        **run,
        "main": main,
        # Of its metric, else of its loss.
        "spark": measured or run["spark"],
        "spark_of": label_of(main) if main and measured else "training loss",
        "left": estimate(run["seconds_left"]),
        # The form changes labels that were given here, not the tags for trackers.
        "labels": read_labels(run_dir),
        "sweep": site.records.sweep_of(run_dir),
    }


def all_runs(request: Request) -> Response:
    """Show the table of runs, filtered by a text and a state and sorted, with a curve of each.

    At the address of Compare it asks which runs are compared; those that it names are chosen already.
    """
    site = site_of(request)
    params = request.query_params
    sort = params.get("sort", "started")
    descends = params.get("order", "desc") == "desc"
    text = params.get("text", "").strip()
    state = params.get("state", "")

    # Sorted and filtered here, so that an address shows the same to everybody.
    runs = site.records.listed()
    metrics = metric_names(runs)
    metric = params.get("metric", "")
    if metric not in ("", *metrics):
        raise ConfigError(f"metric: found {metric!r}; expected {', '.join(metrics)}")
    sorts = [*SORTS, *metrics]
    if sort not in sorts:
        raise ConfigError(f"sort: found {sort!r}; expected {', '.join(sorts)}")
    shown = [run for run in runs if is_like(run, text, state)]
    # A metric that only filtered out runs have sorts nothing.
    if any(value_of(run, sort) is not None for run in shown):
        shown = in_order(shown, sort, reverse=descends)
    rows = [_row(site, run, metric) for run in shown]
    sweeps = site.records.sweeps()
    order = "desc" if descends else "asc"
    is_choosing = request.url.path == "/compare"
    facts = {
        "title": "Compare" if is_choosing else _title(runs),
        "chosen": params.getlist("dir"),
        "most": MOST_COMPARED,
        "pairs": _pairs(site, runs) if is_choosing else [],
        "entries": _with_sweeps(rows, sweeps, is_filtered=bool(text or state)),
        "sweeps": sweeps,
        "shown": _count_in_words(rows, len(runs)),
        "total": len(runs),
        "kept": urlencode({"text": text, "state": state}),
        "sorting": urlencode({"sort": sort, "order": order, "metric": metric}),
        "has_prices": any(run["price"] is not None for run in shown),
        "text": text,
        "state": state,
        "states": _states(runs),
        "sort": sort,
        "order": order,
        "metric": metric,
        "metrics": metrics,
        "charts_later": True,
    }

    verb = "kubetune report RUN --compare RUN"
    if not is_choosing:
        verb = _list_in_words(site, sort, state, text, descends=descends)
    return page(request, "runs.html", verb, facts)


def _pairs(site: Site, runs: Sequence[Facts]) -> list[tuple[Facts, Facts]]:
    """Return pairs of runs that say something of each other: of the same data and metric, the newest first."""
    newest = sorted(runs, key=lambda run: run["started"] or "", reverse=True)
    before: dict[tuple[str, str, str], Facts] = {}
    pairs = []
    for run in newest[:_PAIRED]:
        # Trials are compared on the page of their sweep.
        is_measured = run["state"] in ("done", "stopped") and run["main"] and not run["archived"]
        if not is_measured or site.records.sweep_of(Path(run["path"])) is not None:
            continue
        of_data = site.records.data_of(Path(run["path"]))
        # Rewards of other functions say nothing of each other.
        rewards = of_data["rewards"] if run["main"] == "eval_reward" else ""
        key = (of_data["key"], run["main"], rewards)
        if key in before:
            pairs.append((before[key], run))
        before[key] = run
    return pairs[:_MOST_PAIRS]


def _list_in_words(site: Site, sort: str, state: str, text: str, *, descends: bool) -> str:
    """Return the command line that prints the same list."""
    words = ["kubetune", "runs", str(site.folder), "--sort", sort]
    if descends:
        words.append("--reverse")
    # With "=", since a text may begin with a dash.
    if state:
        words.append(f"--state={state}")
    if text:
        words.append(f"--filter={text}")
    return shlex.join(words)


def _count_in_words(rows: Sequence[Mapping[str, Any]], total: int) -> str:
    """Return how many runs are shown, and how many of these are folded below their sweeps."""
    shown = len(rows)
    text = counted(total, "run") if shown == total else f"{shown:,} of {counted(total, 'run')}"
    sweeps = [row["sweep"] for row in rows if row["sweep"]]
    if not sweeps:
        return text
    return f"{text}, {len(sweeps):,} of them in {counted(len(set(sweeps)), 'sweep')}"


def _title(runs: Sequence[Mapping[str, Any]]) -> str:
    """Return what the browser's tab says: how many runs are at work, if any."""
    at_work = sum(run["state"] in LIVE for run in runs)
    return f"Runs, {at_work} at work" if at_work else "Runs"


def _states(runs: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Return how many runs there are by state: "" for all that are not archived, which come last."""
    listed = [run["state"] for run in runs if not run["archived"]]
    counts = {"": len(listed)}
    for name in sorted(set(listed)):
        counts[name] = listed.count(name)
    if len(listed) < len(runs):
        counts[ARCHIVED] = len(runs) - len(listed)
    return counts


def _with_sweeps(
    rows: Sequence[dict[str, Any]], sweeps: Sequence[dict[str, Any]], *, is_filtered: bool
) -> list[dict[str, Any]]:
    """Return runs and sweeps as lines of one table: the trials of a sweep below it, where its first one would be.

    A sweep without any run is first: it has just begun. If runs are filtered, such a sweep is left out.
    """
    trials: dict[str, list[dict[str, Any]]] = {sweep["dir"]: [] for sweep in sweeps}
    for row in rows:
        if row["sweep"] in trials:
            trials[row["sweep"]].append(row)
    by_dir = {}
    for sweep in sweeps:
        began = [row["started"] for row in trials[sweep["dir"]] if row["started"]]
        by_dir[sweep["dir"]] = {**sweep, "started": min(began, default=None)}
    entries = []
    if not is_filtered:
        entries = [sweep for name, sweep in by_dir.items() if not trials[name]]
    for row in rows:
        if row["sweep"] not in trials:
            entries.append(row)
        elif row is trials[row["sweep"]][0]:
            entries += [by_dir[row["sweep"]], *trials[row["sweep"]]]
    return entries


def curves(request: Request) -> Response:
    """Show a few curves of the runs that are chosen in the table, beside it."""
    site = site_of(request)
    run_dirs = runs_of(request)
    if not 1 <= len(run_dirs) <= MOST_COMPARED:
        raise ConfigError(f"found {len(run_dirs)} runs; expected 1 to {MOST_COMPARED}")
    facts = curves_of(site.records.read(run_dirs), MOST_BESIDE)
    return html("curves.html", facts)


def one_run(request: Request) -> Response:
    """Show everything about one run, and its state at this moment."""
    site = site_of(request)
    run_dir = run_of(request)
    (record,) = site.records.read([run_dir])
    template, facts = page_of([record])

    status = read_status(run_dir, rank_of(request))
    progress = status["progress"]

    # Heartbeats tell the state of a run that continues; the record tells the state of one that has ended.
    state, reason = state_of(
        progress["exit_status"], status["ranks"], progress["launched"], progress["waits_for"]
    )
    is_live = state in LIVE
    if is_live:
        facts["state"] = state
        facts["reason"] = reason

    facts |= _what_to_do(site, record, facts["state"], facts["reason"], progress["exit_status"])
    facts |= {
        "labels": record.labels,
        "run_dir": site.records.name_of(run_dir),
        "sweep": site.records.sweep_of(run_dir),
        "rollouts_link": address(site, run_dir, path="/rollouts"),
        "now": status,
        "progress": progress,
        "left": estimate(progress["seconds_left"]),
        "is_live": is_live,
        "unread": record.numbers.unread,
        "charts_later": True,
    }

    task = record.config.task
    talking = "Compare answers" if task in ("preference", "distill") else "Chat"
    facts["asking"] = ASKING.get(task, talking)
    verb = "watch" if is_live else "report"
    words = shlex.join(["kubetune", verb, str(run_dir)])
    if facts["cautions"] and facts["state"] == "done":
        facts["state_of_page"] = "warned"
    sign = SIGNS.get(facts["state_of_page"], "")
    facts["title"] = f"{sign} {facts['title']}".strip()
    return page(request, f"live_{template}", words, facts)


def _what_to_do(
    site: Site, run: RunRecord, state: str, reason: str, ended: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return what can be done with a run, and first of all, in its state; of a failed one also the cause."""
    # A run can be stopped on the machine of its processes, and continued where nothing runs it.
    is_running_here = bool(launchers(site, run.path))
    can_continue = not is_running_here and state != "running" and not _is_over(ended)
    failure = None
    mend = None
    if state == "failed" and not is_running_here:
        failure = failure_of(run, reason)
        mend = mend_of(site, run, reason)
    return {
        "state_of_page": state,
        "failure": failure,
        "mend": mend,
        "first_action": _first_action(
            state,
            can_stop=is_running_here,
            can_mend=mend is not None,
            can_continue=can_continue,
            is_passing=_is_passing(ended),
            has_checkpoints=bool(run.checkpoints),
        ),
        # Without a checkpoint the same command begins anew.
        "continuing": "Continue" if run.checkpoints else "Run again",
        "can_stop": is_running_here,
        "can_continue": can_continue,
        "stop_words": shlex.join(["kubetune", "stop", str(run.path)]) if is_running_here else "",
        # One that would fail the same way is told how it would not.
        "again_words": mend["words"] if mend else "",
        "continue_words": _continue_words(run.path) if can_continue and not mend else "",
    }


def _first_action(
    state: str,
    *,
    can_stop: bool,
    can_mend: bool,
    can_continue: bool,
    is_passing: bool,
    has_checkpoints: bool,
) -> str:
    """Return what one does next with a run in this state: the first button of its page."""
    if can_stop:
        return "stop"
    if can_mend:
        return "mend"
    # One that failed by itself would fail the same way.
    if can_continue and (state != "failed" or is_passing):
        return "continue"
    if state == "done" and has_checkpoints:
        return "chat"
    return "again"


def _continue_words(run_dir: Path) -> str:
    """Return the command line that *Continue* starts, or "" if the run file cannot be read.

    The job says then what is wrong with the file.
    """
    try:
        return shlex.join(["kubetune", *train_again(run_dir)])
    except KubetuneError:
        return ""


def _is_over(ended: Mapping[str, Any] | None) -> bool:
    """True if a run is done, whether it passed its gate or not: the same command would not continue it."""
    return ended is not None and ended["code"] in (OK, GATE)


def _is_passing(ended: Mapping[str, Any] | None) -> bool:
    """True if what ended a run came from outside, such as a kill or a full disk: the same command may go well."""
    if ended is None or ended.get("error") == OutOfMemory.__name__:
        return False
    return ended["code"] in (LOST_PEER, ENVIRONMENT)


def compare(request: Request) -> Response:
    """Show runs side by side, or the table to choose them in if there are not two."""
    site = site_of(request)
    # Named by the address, so that a comparison can be kept as a link.
    run_dirs = runs_of(request)
    if len(run_dirs) < 2 or "choose" in request.query_params:
        return all_runs(request)

    if len(run_dirs) > MOST_COMPARED:
        raise ConfigError(
            f"found {len(run_dirs)} runs to compare; expected at most {MOST_COMPARED}"
        )

    # The template of a report, with what keeps an open page up to date.
    records = site.records.read(run_dirs)
    template, facts = page_of(records)
    facts["unread"] = sum(record.numbers.unread for record in records)
    facts["charts_later"] = True
    facts["is_live"] = any(record.exit_status is None for record in records)
    facts["query"] = address(site, *run_dirs, path="").removeprefix("?")
    facts["addresses"] = [address(site, run_dir) for run_dir in run_dirs]

    first, *others = map(str, run_dirs)
    verb = shlex.join(["kubetune", "report", first, "--compare", *others])
    return page(request, f"live_{template}", verb, facts)


def address(site: Site, *run_dirs: Path, path: str = "/run") -> str:
    """Return the address of a page about these runs."""
    names = [("dir", site.records.name_of(run_dir)) for run_dir in run_dirs]
    return f"{path}?{urlencode(names)}"
