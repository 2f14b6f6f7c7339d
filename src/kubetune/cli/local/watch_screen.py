"""The screen of `kubetune watch`: one view of a run, drawn by rich. Curves are on the page and in the report."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from kubetune.base.humanize import brief, duration, number, size, visible
from kubetune.config.metric_names import (
    DRAWN_MEASURES,
    GRPO_MEASURES,
    PREFERENCE_MEASURES,
    SECONDS_OF_PARTS,
)

# A rank that waits for others, or writes no heartbeat, for longer than this is shown by itself.
LATE_SECONDS = 15.0
MOST_RANKS = 6
LOG_LINES = 8  # where nothing limits the screen

COLOURS = {"running": "green", "done": "green", "failed": "red"}

# What is shown of the newest lines of metrics.jsonl and timings.jsonl. `kubetune ui` shows everything.
OF_STEP = ("loss", "reward", "grad_norm", "learning_rate", *PREFERENCE_MEASURES)
OF_ANSWERS = [name for name in (*DRAWN_MEASURES, *GRPO_MEASURES) if name not in OF_STEP]
OF_SPEED = ("tokens_per_second", "peak_memory_bytes", "seconds", *SECONDS_OF_PARTS)

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

    @property
    def is_over(self) -> bool:
        """True if nothing will change any more."""
        return self.state in ("done", "stopped", "failed", "absent")


def draw(run_view: RunView, console: Console, hint: str | None = None) -> Group:
    """Return the view of a run. With a hint, which comes below the headline, it fills the terminal."""
    status = run_view.status
    progress = status.get("progress") or {}

    # From what matters most to what can be left out, since a small terminal shows the beginning.
    lines = [_headline(run_view, progress)]
    if run_view.why:
        lines.append(Text(visible(run_view.why), "yellow"))
    if hint is not None:
        lines.append(Text(visible(hint), "dim"))
    top = Group(*lines, _numbers(status, progress))

    # The log gets what is left of the terminal.
    log_lines = LOG_LINES
    if hint is not None:
        log_lines = console.height - len(console.render_lines(top))
    if log_lines <= 0:
        return top

    log = []
    for line in status.get("log") or ():
        # The table has everything that lines of steps have.
        if " [TRAIN] step " not in line:
            log.append(Text(visible(line), "dim", no_wrap=hint is not None, overflow="ellipsis"))
    return Group(top, *log[-log_lines:])


def _headline(run_view: RunView, progress: Facts) -> Text:
    """Return name, state, step, time left, and where the run is."""
    # support-bot  running  step 40/200 (20%)  ETA 12m  namespace finetune, 4 of 4 pods
    line = Text.assemble((visible(run_view.name), "bold"))
    line.append(f"  {run_view.state}", COLOURS.get(run_view.state, "yellow"))
    step = progress.get("step")
    steps = progress.get("steps")

    if step is not None:
        line.append(f"  step {step:,}")
    if step is not None and steps:
        line.append(f"/{steps:,} ({step / steps:.0%})")
    if run_view.state == "running":
        line.append(f"  ETA {brief(progress.get('seconds_left')) or 'unknown'}")
    line.append(f"  {visible(run_view.where)}", "dim")
    return line


def _numbers(status: Facts, progress: Facts) -> Table:
    """Return a row for each thing that is known. Names are those of the run's files and of --json."""
    step = status.get("numbers") or {"loss": progress.get("loss")}
    speed = status.get("timing") or {"tokens_per_second": progress.get("tokens_per_second")}

    rewards = [name for name in step if name.startswith("reward/")]
    rows: dict[str, Facts] = {
        "step": _chosen(step, OF_STEP),
        "answers": _chosen(step, (*rewards, *OF_ANSWERS)),
        "speed": _chosen(speed, OF_SPEED),
        "evaluation": progress.get("evaluation") or {},
        "checkpoint": {"step": progress.get("saved_step")},
        "best": progress.get("best") or {},
    }
    if progress.get("restarts"):
        last_exit = progress.get("last_exit") or {}
        rows["restarts"] = {
            "times": progress["restarts"],
            "reason": last_exit.get("reason"),
        }
    for gpu in status.get("gpus") or ():
        rows[f"GPU {gpu['index']}"] = gpu
    rows |= _ranks(status.get("ranks") or ())

    table = Table.grid(padding=(0, 2))
    for title, facts in rows.items():
        line = Text()
        for name, value in facts.items():
            if value is not None:
                line.append(f"{visible(name)}=", "dim")
                line.append(f"{_written(name, value)} ")
        if line:
            table.add_row(visible(title), line)
    return table


def _chosen(facts: Facts, names: Iterable[str]) -> Facts:
    return {name: facts[name] for name in names if name in facts}


def _written(name: str, value: float | str) -> str:
    """Return a value with the unit that its name ends with."""
    if name.endswith("_bytes"):
        return size(float(value))
    if name.endswith("seconds"):
        return duration(float(value))
    return visible(number(value))


def _ranks(ranks: Sequence[Facts]) -> dict[str, Facts]:
    """Return one row about all ranks; if they differ, a row for each, those that the others wait for first."""
    if not ranks:
        return {}
    longest = max(rank["phase_seconds"] for rank in ranks)
    silent = max(rank["silent_seconds"] for rank in ranks)
    phases = {(rank["phase"], rank["waiting"]) for rank in ranks}
    # Ranks of a healthy run are in different phases too, but only for a moment.
    if silent <= LATE_SECONDS and (longest <= LATE_SECONDS or len(phases) == 1):
        return {"ranks": {"number": len(ranks), "phase": ranks[0]["phase"]}}

    slowest = sorted(ranks, key=lambda rank: (rank["waiting"], -rank["silent_seconds"]))
    rows = {}
    for rank in slowest[:MOST_RANKS]:
        rows[f"rank {rank['rank']}"] = rank
    if len(ranks) > MOST_RANKS:
        rows["ranks"] = {"more": len(ranks) - MOST_RANKS}
    return rows
