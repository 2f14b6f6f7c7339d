"""A sweep's folder as facts for pages, and the page that is written: the trials, and the best runs side by side."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from kubetune import errors
from kubetune.base.humanize import counted, duration, number, share
from kubetune.config.resolved import read_config
from kubetune.library.sweep.ranges import ENDLESS, Range
from kubetune.library.sweep.sweep_list import sweep_state
from kubetune.library.sweep.sweep_record import (
    BEST,
    LEAST_FOR_IMPORTANCE,
    REPORT,
    TRIAL_RUNS,
    Record,
    Search,
    Trial,
    TrialRun,
    at_rest,
    mean,
    read_record,
    read_search,
    state_of,
)
from kubetune.library.sweep.winner import lead_of
from kubetune.reporting.cards import Card
from kubetune.reporting.look.metric_values import label_of, measured
from kubetune.reporting.sweeps.facts import RunLink, Setting, SweepFacts, TrialFacts
from kubetune.reporting.sweeps.sweep_page import write_sweep_report

# Runs whose curves the page draws over each other. With more, the lines cannot be distinguished.
_MOST_COMPARED = 12

# Returns the address of a run's page, "" if it has none.
Address = Callable[[Path], str]


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a sweep to `output`, or to report.html in its folder."""
    search = read_search(folder)
    ranked = read_record(folder).ranked(greater=search.greater)
    run_dirs: list[Path] = []
    for trial in ranked:
        for run in trial.runs:
            run_dir = folder / TRIAL_RUNS / run.name
            if len(run_dirs) < _MOST_COMPARED and _is_readable(run_dir):
                run_dirs.append(run_dir)
    return write_sweep_report(sweep_facts(folder), run_dirs, output or folder / REPORT)


def _is_readable(run_dir: Path) -> bool:
    """True if the run is on this machine and not damaged. If not, the page has only its trial."""
    # Trials of a cluster have no folder here.
    try:
        read_config(run_dir)
    except errors.KubetuneError:
        return False
    return True


def sweep_facts(folder: Path, address: Address = lambda run_dir: "") -> SweepFacts:
    """Return a sweep as pages show it.

    Raise ConfigError if no sweep is in the folder, EnvironmentFault if its files are damaged.
    """
    search = read_search(folder)
    record = read_record(folder)
    state, reason = sweep_state(folder, record, search)
    # A driver that was killed left runs as running. On a cluster they do go on without it.
    if state != "running" and search.namespace is None:
        record = at_rest(record)

    # The best trial comes first, then those that are not done.
    ranked = record.ranked(greater=search.greater)
    numbers = {trial.number for trial in ranked}
    in_order = ranked + [trial for trial in record.trials if trial.number not in numbers]
    trials = [_trial_facts(trial, search, folder, address) for trial in in_order]
    best = None
    if ranked:
        best = trials[0]

    # If the forest predicts nothing, its shares are chance.
    shares: dict[str, float] = {}
    if record.importance is not None and record.importance.predicted > 0:
        shares = record.importance.shares
    settings = []
    for searched in search.ranges:
        settings.append(_setting(searched, shares.get(searched.key)))
    # The driver writes it when the first trial is done.
    shown_file = ""
    if (folder / BEST).is_file():
        shown_file = str(folder / BEST)
    return SweepFacts(
        name=search.name,
        state=state,
        reason=reason,
        lead=_lead(search),
        metric=search.metric,
        greater=search.greater,
        settings=tuple(settings),
        trials=tuple(trials),
        cards=tuple(_cards(record, search, best)),
        best=best,
        advice=lead_of(record, search),
        run_file=shown_file,
        importance=_importance(record, len(ranked)),
    )


def _lead(search: Search) -> str:
    """Return a sentence on what is searched, and how."""
    direction = "lowest"
    if search.greater:
        direction = "highest"
    pruner = "no trial is stopped early"
    if search.pruner != "none":
        pruner = f"pruner {search.pruner}"
    seeds = ""
    if search.repeat > 1:
        seeds = f" · {search.repeat} seeds for each"
    settings = counted(len(search.ranges), "setting")
    return (
        f"The {direction} {label_of(search.metric)} over {settings} · "
        f"sampler {search.sampler}, {pruner}{seeds}"
    )


def _setting(searched: Range, importance: float | None) -> Setting:
    """Return a range as the page has it."""
    return Setting(
        key=searched.key,
        low=searched.low,
        high=searched.high,
        log=searched.log,
        whole=searched.kind == "int",
        choices=searched.choices,
        importance=importance,
    )


def _trial_facts(trial: Trial, search: Search, folder: Path, address: Address) -> TrialFacts:
    """Return a trial as the page has it."""
    # A trial that goes on is shown with what its runs have reached so far.
    value = trial.value
    if value is None and trial.state == "open":
        value = mean([run.value for run in trial.runs])
    if value is not None and not math.isfinite(value):
        value = None
    return TrialFacts(
        number=trial.number,
        state=state_of(trial),
        values=tuple(trial.values.get(searched.key) for searched in search.ranges),
        value=value,
        spread=trial.spread,
        steps=trial.progress,
        # The first line of a reason is enough; the log of the run has the rest.
        why=trial.reason.partition("\n")[0],
        runs=tuple(_link(run, search, folder, address) for run in trial.runs),
    )


def _link(run: TrialRun, search: Search, folder: Path, address: Address) -> RunLink:
    """Return a run with the address of its page. On a cluster its name begins with the sweep's."""
    if search.namespace is not None:
        return RunLink(f"{search.name}-{run.name}")
    return RunLink(run.name, address(folder / TRIAL_RUNS / run.name))


def _cards(record: Record, search: Search, best: TrialFacts | None) -> list[Card]:
    """Return the most important numbers, for the top of the page."""
    about = "no trial is done yet"
    value = None
    if best is not None:
        value = best.value
        about = f"trial {best.number}"
        if best.spread is not None:
            about += f", ± {number(best.spread)} over {search.repeat} seeds"

    states = Counter(state_of(trial) for trial in record.trials)
    of_all = ""
    if record.total not in (0, ENDLESS):
        of_all = f"of at most {counted(record.total, 'trial')}"
    waiting = ""
    if states["waiting"]:
        waiting = f"{states['waiting']} waiting"
    failed = ""
    if states["failed"]:
        failed = f"{states['failed']} failed"
    cards = [
        Card(f"Best {label_of(search.metric)}", measured(value, search.metric), about),
        Card("Done", number(states["done"]), of_all),
    ]
    # Cards of no trial are left out.
    if states["running"] or waiting:
        cards.append(Card("Running", number(states["running"]), waiting))
    if states["stopped early"] or failed:
        cards.append(Card("Stopped early", number(states["stopped early"]), failed))
    cards.append(Card("Device time", duration(record.device_hours * 3600), _elapsed(record)))
    return cards


def _elapsed(record: Record) -> str:
    """Return the time for which somebody waited. Each trial is a process, whose start counts in both."""
    if not record.seconds:
        return ""
    return f"in {duration(record.seconds)}, with each trial's start"


def _importance(record: Record, done: int) -> str:
    """Return a sentence on how the importances were computed, or on why there are none."""
    if done < LEAST_FOR_IMPORTANCE:
        return (
            f"Too few trials: {done} done, at least {LEAST_FOR_IMPORTANCE} are needed to tell how much each "
            "setting matters. With fewer, the numbers would be chance."
        )
    importance = record.importance
    if importance is None:
        return "Not computed yet, or all trials have the same result."
    if importance.predicted <= 0:
        return (
            f"The settings explain the results of {importance.trials} trials no better than chance, "
            "so no importance is shown. More trials or wider ranges may show a difference."
        )

    sentence = (
        f"A random forest over the {importance.trials} trials that are done measures how much each "
        "setting reduces the spread of their results; the shares add up to 100 %. The forest explains "
        f"{share(importance.predicted)} of the differences between trials that it has not seen; the "
        "rest is chance, or needs more trials."
    )
    without_result = len(record.trials) - done
    if without_result:
        sentence += (
            f" It leaves out the other {without_result}, which have no final result. So a setting "
            "that makes trials stop early looks less important than it is."
        )
    return sentence
