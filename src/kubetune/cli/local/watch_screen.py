"""The screen of `kubetune watch`: one view of a run, drawn by rich, with small curves of what tells how it goes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kubetune.base.humanize import brief, duration, number, size, sparkline, visible
from kubetune.config.metric_names import TELLING, main_metric

# If a rank is in one phase, or writes no heartbeat, for longer than this, ranks are shown one by one.
LATE_SECONDS = 15.0
MOST_RANKS = 6
LOG_LINES = 8  # where nothing limits the screen
_BESIDE_CURVE = 40  # columns for its name and two values

COLOURS = {"running": "green", "done": "green", "failed": "red"}

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class RunView:
    """A run as it was last seen."""

    name: str
    state: str  # starting, running, waiting, done, stopped, failed or absent
    why: str  # why it is in this state; empty if that needs no reason
    where: str  # "on this machine", or the namespace with the pods that run
    # What rundir.status.read_status returns; with `progress` alone, or empty, where no pod could be asked.
    status: dict[str, Any] = field(default_factory=dict)
    best_by: str | None = None  # metric_for_best_model, where the config is at hand


def draw(run_view: RunView, console: Console, hint: str | None = None) -> Group:
    """Return the view of a run. With a hint, which comes below the headline, it fills the terminal."""
    # From what matters most to what can be left out, since a small terminal shows the beginning.
    lines = [_headline(run_view)]
    if run_view.why:
        lines.append(Text(visible(run_view.why), "yellow"))
    if hint is not None:
        lines.append(Text(visible(hint), "dim"))
    about = _about(run_view)
    if about:
        lines.append(about)
    top = Group(*lines, _curves(run_view.status, console.width), _table(run_view.status))

    # The log gets what is left of the terminal.
    log_lines = LOG_LINES
    if hint is not None:
        log_lines = console.height - len(console.render_lines(top))
    if log_lines <= 0:
        return top
    log = []
    for line in run_view.status.get("log") or ():
        # The table has everything that lines of steps have.
        if " [TRAIN] step " not in line:
            log.append(Text(visible(line), "dim", no_wrap=hint is not None, overflow="ellipsis"))
    return Group(top, *log[-log_lines:])


def _headline(run_view: RunView) -> Text:
    """Return name, state, step, time left, and where the run is."""
    # support-bot  running  step 40/200 (20%)  ETA 12m  namespace finetune, 4 of 4 pods
    progress = run_view.status.get("progress") or {}
    line = Text.assemble((visible(run_view.name), "bold"))
    line.append(f"  {run_view.state}", COLOURS.get(run_view.state, "yellow"))
    step = progress.get("step")
    steps = progress.get("steps")
    if step is not None:
        line.append(f"  step {step:,}")
        if steps:
            line.append(f"/{steps:,} ({step / steps:.0%})")
    if run_view.state == "running":
        line.append(f"  ETA {brief(progress.get('seconds_left')) or 'unknown'}")
    line.append(f"  {visible(run_view.where)}", "dim")
    return line


def _about(run_view: RunView) -> Text:
    """Return what the task is about, of the newest evaluation and of the newest step; empty while neither has it."""
    # accuracy 0.94 at step 75  in training: accuracy 0.97, margin 1.3
    progress = run_view.status.get("progress") or {}
    line = Text()
    evaluation = progress.get("evaluation") or {}
    name = main_metric(evaluation, run_view.best_by)
    if name is not None:
        line.append(f"{visible(name.removeprefix('eval_'))} {number(evaluation[name])}", "bold")
        line.append(f" at step {evaluation.get('step', 0):,}  ")

    measures = progress.get("measures") or {}
    texts = [f"{key} {number(measures[key])}" for key in TELLING if key in measures]
    if texts:
        line.append(f"in training: {', '.join(texts)}", "bold" if name is None else "")
    return line


def _curves(status: Facts, width: int) -> Table:
    """Return a line for each curve: its first value, its blocks, and its last value."""
    # reward  0.12 ▁▂▃▅▆▇█ 0.83
    table = Table.grid(padding=(0, 1))
    for name, values in (status.get("curves") or {}).items():
        blocks = sparkline(values, max(1, width - _BESIDE_CURVE))
        first = Text(number(values[0]), "dim", justify="right")
        last = Text(number(values[-1]), "bold")
        table.add_row(visible(name), first, Text(blocks, "blue", no_wrap=True), last)
    return table


def _table(status: Facts) -> Table:
    """Return a row for each thing that is known. Names are those of the run's files and of --json."""
    progress = status.get("progress") or {}
    rows: dict[str, Facts] = {
        "numbers": status.get("numbers") or {"loss": progress.get("loss")},
        "timing": status.get("timing") or {"tokens_per_second": progress.get("tokens_per_second")},
        "evaluation": progress.get("evaluation") or {},
        "checkpoint": {"step": progress.get("saved_step")},
        "best": progress.get("best") or {},
    }
    if progress.get("restarts"):
        last_exit = progress.get("last_exit") or {}
        rows["restarts"] = {"times": progress["restarts"], **last_exit}

    for gpu in status.get("gpus") or ():
        rows[f"GPU {gpu['index']}"] = gpu
    rows |= _ranks(status.get("ranks") or ())

    table = Table.grid(padding=(0, 2))
    for title, facts in rows.items():
        line = Text()
        for name, value in facts.items():
            # A list, such as the seconds of each rank, has no room here.
            if isinstance(value, int | float | str):
                line.append(f"{visible(name)}=", "dim")
                line.append(f"{_written(name, value)}", "bold")
                line.append(" ")
        if line:
            table.add_row(visible(title), line)
    return table


def _written(name: str, value: float | str) -> str:
    """Return a value with the unit that its name ends with."""
    if name.endswith("_bytes"):
        return size(float(value))
    if name.endswith("seconds"):
        return duration(float(value))
    return visible(number(value))


def _ranks(ranks: Sequence[Facts]) -> dict[str, Facts]:
    """Return one row about all ranks; if some are late, a row for each, those that the others wait for first."""
    rows: dict[str, Facts] = {}
    longest = 0.0
    for rank in ranks:
        longest = max(longest, rank["phase_seconds"], rank["silent_seconds"])
    if longest > LATE_SECONDS:
        slowest = sorted(ranks, key=lambda rank: (rank["waiting"], -rank["silent_seconds"]))
        for rank in slowest[:MOST_RANKS]:
            rows[f"rank {rank['rank']}"] = rank
    if ranks:
        rows["ranks"] = {"number": len(ranks), "phase": ranks[0]["phase"]}
    return rows
