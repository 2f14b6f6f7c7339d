"""The page of a sweep: its search, and its local runs side by side."""

from __future__ import annotations

from pathlib import Path

from kubetune import errors
from kubetune.config.load import read_config
from kubetune.library.sweep.record import (
    REPORT,
    Record,
    Search,
    Trial,
    read_record,
    read_search,
    state_of,
    summary,
)
from kubetune.library.sweep.winner import result_lines
from kubetune.reporting import write_report
from kubetune.reporting.search import Attempt, SearchFacts, Setting


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a sweep to `output`, or to report.html in its folder."""
    search = read_search(folder)
    record = read_record(folder)
    # The best trial comes first, then those that failed or were given up.
    ranked = record.ranked(greater=search.greater)
    trials = ranked + [trial for trial in record.trials if trial not in ranked]
    run_dirs = []
    for trial in trials:
        for run in trial.runs:
            run_dir = folder / "trials" / run.name
            if _is_readable(run_dir):
                run_dirs.append(run_dir)

    lines = [f"{summary(record)}; {record.device_hours:.3g} device hours."]
    if ranked:
        lines += result_lines(record, search)
    facts = _facts(search, record, trials, lines)
    return write_report(run_dirs, output or folder / REPORT, facts)


def _is_readable(run_dir: Path) -> bool:
    """True if the run is on this machine and not damaged. If not, the page has only its trial."""
    # Trials of a cluster have no folder here.
    try:
        read_config(run_dir)
    except errors.KubetuneError:
        return False
    return True


def _facts(search: Search, record: Record, trials: list[Trial], lines: list[str]) -> SearchFacts:
    """Return the search as the page shows it. `lines` are sentences on the result."""
    settings = []
    for searched in search.ranges:
        importance = record.importances.get(searched.key)
        settings.append(Setting(searched.key, searched.log, importance))

    # The first line of a reason is enough; the log of the run has the rest.
    attempts = []
    for trial in trials:
        attempts.append(
            Attempt(
                label=str(trial.number),
                state=state_of(trial),
                values=tuple(trial.values[searched.key] for searched in search.ranges),
                value=trial.value,
                spread=trial.spread,
                steps=trial.progress,
                why=trial.reason.partition("\n")[0],
            )
        )
    return SearchFacts(search.name, search.metric, tuple(settings), tuple(attempts), tuple(lines))
