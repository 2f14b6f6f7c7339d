"""The page of a sweep: its search, and the runs that lie here side by side."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from kubetune import errors
from kubetune.config.load import read_config
from kubetune.library.sweep.record import (
    REPORT,
    Record,
    Search,
    read_record,
    read_search,
    state_of,
    summary,
)
from kubetune.library.sweep.winner import told
from kubetune.reporting import write_report
from kubetune.reporting.search import Attempt, SearchFacts, Setting


def write_page(folder: Path, output: Path | None = None) -> Path:
    """Write the page of a sweep's folder, report.html there unless `output` says otherwise."""
    search, record = read_search(folder), read_record(folder)
    ranked = record.ranked(greater=search.greater)
    trials = [*ranked, *(trial for trial in record.trials if trial not in ranked)]
    runs = [folder / "trials" / run.name for trial in trials for run in trial.runs]
    here = [run_dir for run_dir in runs if _is_readable(run_dir)]
    return write_report(here, output or folder / REPORT, _facts(search, record))


def _is_readable(run_dir: Path) -> bool:
    """The run lies here, and no other version or damage keeps it off the page; the table has its trial all the same."""
    with suppress(errors.KubetuneError):
        return bool(read_config(run_dir))
    return False


def _facts(search: Search, record: Record) -> SearchFacts:
    ranked = record.ranked(greater=search.greater)
    trials = [*ranked, *(trial for trial in record.trials if trial not in ranked)]
    lines = [
        f"{summary(record)}; {record.device_hours:.3g} device hours.",
        *(told(record, search) if ranked else ()),
    ]
    return SearchFacts(
        search.name,
        search.metric,
        tuple(Setting(one.key, one.log, record.importances.get(one.key)) for one in search.ranges),
        tuple(
            Attempt(
                str(trial.number),
                state_of(trial),
                tuple(trial.values[one.key] for one in search.ranges),
                trial.value,
                trial.spread,
                f"{max(run.step for run in trial.runs)}/{max(run.steps for run in trial.runs) or '?'}",
                trial.reason.partition("\n")[0],
            )
            for trial in trials
        ),
        tuple(lines),
    )
