"""The screen of `kubetune watch`: one view of a run, drawn by rich. Curves are on the page and in the report."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kubetune.base.humanize import brief, counted, number, share, size, visible
from kubetune.rundir.throughput import utilization

# A rank that says nothing for so long is marked.
LATE_SECONDS = 15.0
# A view that is older is not how the run is now.
OLD_SECONDS = 8.0
# What a screen holds.
MOST_RANKS = 16
MOST_WARNINGS = 3
LOG_LINES = 8  # where nothing limits the screen
STEPS_OF_SPEED = 20  # over which the utilization is a mean

# By the state of the run.
COLOURS = {
    "running": "green",
    "done": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "absent": "red",
}
HINT = "Ctrl-C leaves; the run goes on"

# Steps have their numbers in the table, and warnings their own lines.
TRAIN_LINE = re.compile(r"\S+ \S+ \[TRAIN\] ")
WARNING_LINE = re.compile(r"\S+ \S+ \[(\w+\] (WARNING|ERROR|CRITICAL): |ERROR\])")
DATE = re.compile(r"\d{4}-\d\d-\d\d ")


@dataclass(frozen=True)
class RunView:
    """A run as it was last seen."""

    name: str
    state: str  # running, waiting, done, stopped, failed or absent
    why: str  # why it is in this state; empty where nothing is to be said
    # What rundir.status.read_status returns; with `progress` alone, or empty, where no pod could be asked.
    status: dict[str, Any]
    is_over: bool = False
    where: str = ""  # "on this machine", or the namespace with the pods that run
    lost: str = ""  # why there is no newer view
    seen: float = field(default_factory=time.monotonic)  # time of this view on the monotonic clock

    def without_answer(self, reason: str) -> RunView:
        """Return the same view, with the reason why there is no newer one."""
        return replace(self, lost=reason.splitlines()[0])


class LiveScreen:
    """The whole terminal, drawn anew from the latest view each time that rich asks for it."""

    def __init__(self, run_view: RunView, console: Console) -> None:
        self.run_view = run_view
        self._console = console

    def __rich__(self) -> Layout:
        """Return what rich draws."""
        # The last line stays in view, however little of the rest fits.
        body_height = max(1, self._console.height - 1)
        layout = Layout()
        layout.split_column(
            Layout(draw(self.run_view, self._console, body_height)),
            Layout(_last_line(self.run_view), size=1),
        )
        return layout


def _last_line(run_view: RunView) -> Text:
    """Return how to leave, or for how long nobody has answered."""
    age = time.monotonic() - run_view.seen
    line = Text(HINT, style="dim")
    if run_view.lost or age > OLD_SECONDS:
        reason = visible(run_view.lost) or "it takes long"
        line = Text(f"no answer for {brief(age)}, trying again: {reason}", style="bold yellow")
    line.no_wrap = True
    line.overflow = "ellipsis"
    return line


def draw(run_view: RunView, console: Console, height: int | None = None) -> Group:
    """Return the view of a run. With a height, the last lines of the log fill what the rest leaves of it."""
    run_view = _escaped(run_view)
    status = run_view.status
    progress = status.get("progress") or {}
    most_ranks = MOST_RANKS
    if height is not None:
        most_ranks = min(MOST_RANKS, max(3, height // 3))

    # From what matters most to what can be left out.
    parts: list[RenderableType] = [_headline(run_view, progress)]
    if progress.get("steps") and progress.get("step") is not None:
        parts.append(ProgressBar(total=progress["steps"], completed=progress["step"]))
        parts.append(Text())

    parts.append(_numbers(status, progress))

    warnings = [line for line in status.get("log") or () if WARNING_LINE.match(line)]
    for line in warnings[-MOST_WARNINGS:]:
        # Where the height is limited, a long one must not push the ranks away.
        is_cut = height is not None
        parts.append(Text(line, style="yellow", no_wrap=is_cut, overflow="ellipsis"))

    if status.get("verdict"):
        parts.append(_verdict(status["verdict"]))
    if status.get("ranks"):
        parts.append(_ranks(status["ranks"], status.get("rank_seconds") or [], most_ranks))
    if status.get("gpus"):
        parts.append(_gpus(status["gpus"]))

    log_lines = LOG_LINES
    if height is not None:
        # One line stays empty above the log.
        log_lines = height - len(console.render_lines(Group(*parts))) - 1
    if log_lines > 0:
        parts.append(_log(status.get("log") or (), log_lines))
    return Group(*parts)


def _escaped(run_view: RunView) -> RunView:
    """Return the view with whatever a terminal would obey spelt out: runs and models write these texts."""
    return replace(
        run_view,
        name=visible(run_view.name),
        state=visible(run_view.state),
        why=visible(run_view.why),
        where=visible(run_view.where),
        status=_escaped_value(run_view.status),
    )


def _escaped_value(value: Any) -> Any:
    """Return a value of JSON with all texts in it escaped."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: _escaped_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped_value(item) for item in value]
    return value


def _headline(run_view: RunView, progress: Mapping[str, Any]) -> Text:
    """Return name, state, step and time left; where the run is, and why it is in this state."""
    # support-bot  running  step 40/200 (20%)  ETA 12m  namespace finetune, 4 of 4 pods
    colour = COLOURS.get(run_view.state, "white")
    line = Text()
    line.append(run_view.name, style="bold")
    line.append(f"  {run_view.state}", style=f"bold {colour}")

    step = progress.get("step")
    steps = progress.get("steps")
    if step is not None and steps:
        line.append(f"  step {step:,}/{steps:,} ({step / steps:.0%})")
    elif step is not None:
        line.append(f"  step {step:,}")

    if run_view.state == "running" and progress.get("seconds_left") is not None:
        line.append(f"  ETA {brief(progress['seconds_left'])}", style="bold")
    if run_view.where:
        line.append(f"  {run_view.where}", style="dim")
    if run_view.why:
        line.append(f"\n{run_view.why}", style="yellow")
    return line


def _numbers(status: Mapping[str, Any], progress: Mapping[str, Any]) -> Table:
    """Return what is measured, a line each: its name, its newest value, and what belongs to it."""
    table = Table.grid(padding=(0, 2))

    # Only what is known has a line.
    def add(name: str, value: str, remark: str = "") -> None:
        table.add_row(name, Text(value, "bold"), Text(remark, "dim"))

    # What the run learns.
    if progress.get("loss") is not None:
        add("loss", number(progress["loss"]), _range(status))
    for name, value in (progress.get("measures") or {}).items():
        add(name.replace("_", " "), number(value))
    experts = progress.get("experts")
    if experts:
        unused = f"{share(experts['experts_unused'])} unused"
        dropped = f"{experts['dropped_tokens']:,} tokens dropped"
        remark = f"tokens of the fullest expert over the mean; {unused}, {dropped}"
        add("experts", f"{number(experts['expert_load_max'])}×", remark)
    if progress.get("evaluation"):
        loss, remark = _evaluation(progress["evaluation"])
        add("evaluation", loss, remark)
    if status.get("learning_rate") is not None:
        add("learning rate", number(status["learning_rate"]))
    if status.get("grad_norm") is not None:
        add("gradient norm", number(status["grad_norm"]))

    # What it takes, and what is kept of it.
    if status.get("speeds"):
        add("tokens/s", number(status["speeds"][-1]), _utilization(status))
    if status.get("peak_memory_bytes"):
        add("memory", size(status["peak_memory_bytes"]), "highest so far on rank 0")
    if progress.get("saved_step") is not None:
        add("checkpoint", f"step {progress['saved_step']:,}", _best(progress.get("best")))
    if progress.get("restarts"):
        last_exit = progress.get("last_exit") or {}
        add("restarts", number(progress["restarts"]), last_exit.get("reason") or "")
    return table


def _range(status: Mapping[str, Any]) -> str:
    """Return between which values the loss of the last steps lies; empty before there are two."""
    losses = [loss for loss in status.get("losses") or () if loss is not None]
    if len(losses) < 2 or not status.get("loss_steps"):
        return ""
    first, last = status["loss_steps"]
    low = number(min(losses))
    high = number(max(losses))
    return f"{low} to {high} in steps {first:,} to {last:,}"


def _evaluation(evaluation: Mapping[str, Any]) -> tuple[str, str]:
    """Return the newest loss of an evaluation, and its step with the other metrics."""
    # Losses of single sources are too many for a line.
    others = []
    for key, value in evaluation.items():
        if key.startswith("eval_") and "eval_loss" not in key and isinstance(value, float):
            others.append(f"{key.removeprefix('eval_')} {number(value)}")
    step = f"at step {number(evaluation['step'])}"
    remark = "  ".join([step, *others])
    return number(evaluation["eval_loss"]), remark


def _utilization(status: Mapping[str, Any]) -> str:
    """Return the share of the GPUs' arithmetic that is used, or "" if it is not known."""
    # The mean of some steps, since single ones differ much.
    speeds = status["speeds"][-STEPS_OF_SPEED:]
    mean = sum(speeds) / len(speeds)
    ranks = max(1, len(status.get("rank_seconds") or ()))
    _, mfu = utilization(status, mean, ranks)
    if mfu is None:
        return ""
    return f"MFU {share(mfu)} of {number(status['peak_tflops'])} TFLOP/s, over the last steps"


def _best(best: Mapping[str, Any] | None) -> str:
    """Return step and value of the best checkpoint, or "" before there is one."""
    if not best:
        return ""
    return f"best: step {number(best['step'])} with {number(best['value'])}"


def _table(*names: str, left: Sequence[str] = ()) -> Table:
    """Return a table without rows. Columns in `left` hold texts, the others numbers."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in names:
        if name in left:
            table.add_column(name, justify="left")
        else:
            table.add_column(name, justify="right")
    return table


def _verdict(facts: Mapping[str, Any]) -> Table:
    """Return each metric of the base model and of the best checkpoint, with the answers that changed."""
    from kubetune.reporting.verdict import verdict

    table = _table("metric", "base", "tuned", "95 %", "gained", "lost", left=("metric",))
    rows = (verdict(facts, {}) or {}).get("rows", [])
    for row in rows:
        # Only metrics of answers have an interval, and rows gained and lost.
        interval = ""
        if row.get("after_interval"):
            low, high = row["after_interval"]
            interval = f"{low:.3g}–{high:.3g}"
        table.add_row(
            row["name"].removeprefix("eval_"),
            _known(row["base"]),
            _known(row["best"]),
            interval,
            str(row.get("gained", "")),
            str(row.get("lost", "")),
        )
    return table


def _known(value: float | None) -> str:
    """Return a number, and nothing for one that was not measured."""
    if value is None:
        return ""
    return number(value)


def _ranks(ranks: Sequence[Mapping[str, Any]], rank_seconds: Sequence[float], most: int) -> Table:
    """Return phase, step and lag of each rank; of many, those that lag most.

    The lag is how much longer than the fastest rank it computed in the last step.
    """
    table = _table("rank", "step", "phase", "for", "lag", "heard of", left=("phase", "heard of"))

    # Ranks that took 2.0, 2.2 and 2.0 s lag by 0, 10 and 0 %.
    lags: dict[int, float] = {}  # by rank
    if len(rank_seconds) > 1 and min(rank_seconds) > 0:
        for index, seconds in enumerate(rank_seconds):
            lags[index] = seconds / min(rank_seconds) - 1

    shown = list(ranks)
    if len(ranks) > most:
        shown.sort(key=lambda rank: lags.get(rank["rank"], 0.0), reverse=True)

    for rank in shown[:most]:
        phase = rank["phase"]
        if rank["waiting"]:
            phase = f"waits in {phase}"
        lag = ""
        if rank["rank"] in lags:
            lag = f"{lags[rank['rank']]:+.0%}"
        style = ""
        if rank["silent_seconds"] > LATE_SECONDS:
            style = "bold red"
        table.add_row(
            str(rank["rank"]),
            number(rank["step"]),
            Text(phase),
            brief(rank["phase_seconds"]),
            lag,
            f"{brief(rank['silent_seconds'])} ago",
            style=style,
        )
    if len(ranks) > most:
        table.add_row("…", "", f"{counted(len(ranks) - most, 'rank')} more with less lag")
    return table


def _gpus(gpus: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each GPU; on a cluster, with the number of its node."""
    table = _table("GPU", "name", "load", "memory", "heat", "power", left=("name",))
    for gpu in gpus:
        index = str(gpu["index"])
        if "node" in gpu:
            index = f"{gpu['node']}/{index}"
        memory = f"{number(gpu['memory_used_mib'])}/{number(gpu['memory_total_mib'])} MiB"
        table.add_row(
            index,
            Text(str(gpu["name"])),
            f"{number(gpu['utilization_percent'])} %",
            memory,
            f"{number(gpu['temperature_celsius'])} °C",
            f"{number(gpu['power_watts'])} W",
        )
    return table


def _log(log: Sequence[str], most: int) -> Text:
    """Return the last lines of rank 0's log that no other part of the screen shows."""
    lines = []
    for line in log:
        if not TRAIN_LINE.match(line) and not WARNING_LINE.match(line):
            lines.append(DATE.sub("", line, count=1))
    return Text("\n".join(["", *lines[-most:]]), style="dim", no_wrap=True, overflow="ellipsis")
