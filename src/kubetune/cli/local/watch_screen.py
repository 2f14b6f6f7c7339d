"""The screen of `kubetune watch`: one view of a run, drawn by rich. Curves are on the page and in the report."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.layout import Layout
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kubetune.base.humanize import brief, counted, duration, number, share, size, visible
from kubetune.config.metric_names import SECONDS_OF_PARTS

LATE_SECONDS = 15.0  # a rank that says nothing for so long is marked
OLD_SECONDS = 8.0  # a view that is older is not how the run is now
MOST_RANKS = 16
LOG_LINES = 8  # where nothing limits the screen
HINT = "Ctrl-C leaves; the run goes on"

COLOURS = {"running": "green", "done": "green", "waiting": "yellow", "stopped": "yellow"}

# Steps have their numbers in the table.
TRAIN_LINE = re.compile(r"\S+ \S+ \[TRAIN\] ")
WARNING_LINE = re.compile(r"\S+ \S+ \[(\w+\] (WARNING|ERROR|CRITICAL): |ERROR\])")
DATE = re.compile(r"\d{4}-\d\d-\d\d ")

# What is measured: its name, its newest value, a remark.
Line = tuple[str, str, str]


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


def full_screen(run_view: RunView, console: Console) -> Layout:
    """Return the view as it fills the terminal. The last line stays in view, however little of the rest fits."""
    body = draw(run_view, console, max(1, console.height - 1))
    layout = Layout()
    layout.split_column(Layout(body), Layout(_last_line(run_view), size=1))
    return layout


def _last_line(run_view: RunView) -> Text:
    """Return how to leave, or for how long nobody has answered."""
    age = time.monotonic() - run_view.seen
    if not run_view.lost and age <= OLD_SECONDS:
        return _text(HINT, "dim")
    reason = run_view.lost or "it takes long"
    return _text(f"no answer for {brief(age)}, trying again: {reason}", "bold yellow")


def draw(run_view: RunView, console: Console, height: int | None = None) -> Group:
    """Return the view of a run. With a height, the last lines of the log fill what the rest leaves of it."""
    status = run_view.status
    progress = status.get("progress") or {}

    # From what matters most to what can be left out.
    parts: list[RenderableType] = [_headline(run_view, progress)]
    if progress.get("steps") and progress.get("step") is not None:
        parts.append(ProgressBar(total=progress["steps"], completed=progress["step"]))
        parts.append(Text())
    parts.append(_numbers(status, progress))
    if status.get("ranks"):
        most_ranks = MOST_RANKS
        if height is not None:
            most_ranks = min(MOST_RANKS, max(3, height // 3))
        parts.append(_ranks(status["ranks"], most_ranks))

    log_lines = LOG_LINES
    if height is not None:
        # One line stays empty above the log.
        log_lines = height - len(console.render_lines(Group(*parts))) - 1
    if log_lines > 0:
        parts.append(Text())
        parts += _log(status.get("log") or (), log_lines, is_cut=height is not None)
    return Group(*parts)


def _text(text: str, style: str = "", *, is_cut: bool = True) -> Text:
    """Return a text for the screen. Whatever a terminal would obey is spelt out: runs and models write these texts."""
    if is_cut:
        return Text(visible(text), style, no_wrap=True, overflow="ellipsis")
    return Text(visible(text), style)


def _headline(run_view: RunView, progress: Mapping[str, Any]) -> Text:
    """Return name, state, step and time left; where the run is, and why it is in this state."""
    # support-bot  running  step 40/200 (20%)  ETA 12m  namespace finetune, 4 of 4 pods
    line = _text(run_view.name, "bold", is_cut=False)
    colour = COLOURS.get(run_view.state, "red")
    line.append_text(_text(f"  {run_view.state}", f"bold {colour}"))

    step = progress.get("step")
    steps = progress.get("steps")
    if step is not None and steps:
        line.append(f"  step {step:,}/{steps:,} ({step / steps:.0%})")
    elif step is not None:
        line.append(f"  step {step:,}")
    if run_view.state == "running" and progress.get("seconds_left") is not None:
        line.append(f"  ETA {brief(progress['seconds_left'])}", style="bold")
    if run_view.where:
        line.append_text(_text(f"  {run_view.where}", "dim"))
    if run_view.why:
        line.append_text(_text(f"\n{run_view.why}", "yellow"))
    return line


def _numbers(status: Mapping[str, Any], progress: Mapping[str, Any]) -> Table:
    """Return what is known, a line each: its name, its newest value, and what belongs to it."""
    numbers = status.get("numbers") or {}
    timing = status.get("timing") or {}
    lines: list[Line] = []
    if progress.get("loss") is not None:
        lines.append(("loss", number(progress["loss"]), ""))
    if "reward" in numbers:
        lines += _of_answers(numbers, timing)
    else:
        for name, value in (progress.get("measures") or {}).items():
            lines.append((name.replace("_", " "), number(value), ""))
    if progress.get("evaluation"):
        lines.append(_of_evaluation(progress["evaluation"]))

    lines += _of_machine(status.get("gpus") or (), progress, timing)

    table = Table.grid(padding=(0, 2))
    for name, value, remark in lines:
        table.add_row(name, Text(value, "bold"), _text(remark, "dim", is_cut=False))
    return table


def _of_machine(
    gpus: Sequence[Mapping[str, Any]], progress: Mapping[str, Any], timing: Mapping[str, Any]
) -> list[Line]:
    """Return the lines about speed, memory and what is kept of the run."""
    lines: list[Line] = []
    if progress.get("tokens_per_second") is not None:
        memory = ""
        if timing.get("peak_memory_bytes"):
            memory = f"memory of rank 0 at most {size(timing['peak_memory_bytes'])} so far"
        lines.append(("tokens/s", number(progress["tokens_per_second"]), memory))
    for gpu in gpus:
        memory = f"{number(gpu['memory_used_mib'])} of {number(gpu['memory_total_mib'])} MiB"
        load = f"{number(gpu['utilization_percent'])} %"
        lines.append((f"GPU {gpu['index']}", load, f"{memory}  {gpu['name']}"))

    if progress.get("saved_step") is not None:
        remark = ""
        best = progress.get("best")
        if best:
            remark = f"best: step {number(best['step'])} with {number(best['value'])}"
        lines.append(("checkpoint", f"step {progress['saved_step']:,}", remark))
    if progress.get("restarts"):
        last_exit = progress.get("last_exit") or {}
        lines.append(("restarts", number(progress["restarts"]), last_exit.get("reason") or ""))
    return lines


def _of_evaluation(evaluation: Mapping[str, Any]) -> Line:
    """Return the newest loss of an evaluation, and its step with the other metrics."""
    remarks = [f"at step {number(evaluation['step'])}"]
    for key, value in evaluation.items():
        # Losses of single sources are too many for a line.
        if key.startswith("eval_") and "eval_loss" not in key and isinstance(value, float):
            remarks.append(f"{key.removeprefix('eval_')} {number(value)}")
    return "eval loss", number(evaluation["eval_loss"]), "  ".join(remarks)


# What is shown of the answers that a step learnt from, by key of its line in metrics.jsonl.
SHARES = {"solved": "solved", "zero_variance": "all alike", "truncated": "cut off"}
OF_POLICY = {"kl": "KL", "sampling_difference": "sampler off"}
CLIPPED = {"clip_low": "clipped", "clip_high": "and"}


def _of_answers(numbers: Mapping[str, Any], timing: Mapping[str, Any]) -> list[Line]:
    """Return the lines about the answers of the newest step."""
    rewards = {key: key.removeprefix("reward/") for key in numbers if key.startswith("reward/")}
    parts = {}
    for key in SECONDS_OF_PARTS:
        if key in timing:
            parts[key] = key.removesuffix("_seconds")
    shares = _remark(numbers, SHARES, share)
    policy = _remark(numbers, OF_POLICY, number)
    clipped = _remark(numbers, CLIPPED, share)
    lines: list[Line] = [
        ("reward", number(numbers["reward"]), _remark(numbers, rewards, number)),
        ("answer", number(numbers.get("completion_length")), f"tokens  {shares}"),
        ("entropy", number(numbers.get("entropy")), f"{policy}  {clipped}".strip()),
    ]
    if "seconds" in timing:
        lines.append(("step", duration(timing["seconds"]), _remark(timing, parts, duration)))
    return lines


def _remark(
    values: Mapping[str, Any], labels: Mapping[str, str], write: Callable[[Any], str]
) -> str:
    """Return the values that are known, each after its label."""
    return "  ".join(
        f"{label} {write(values[key])}" for key, label in labels.items() if key in values
    )


def _ranks(ranks: Sequence[Mapping[str, Any]], most: int) -> Table:
    """Return step and phase of each rank; of many, first those that the others wait for, the longest silent first."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "step", "phase", "for", "heard of"):
        table.add_column(name, justify="left" if name == "phase" else "right")
    shown = list(ranks)
    if len(ranks) > most:
        shown.sort(key=lambda rank: (rank["waiting"], -rank["silent_seconds"]))
    for rank in shown[:most]:
        phase = rank["phase"]
        if rank["waiting"]:
            phase = f"waits in {phase}"
        table.add_row(
            str(rank["rank"]),
            number(rank["step"]),
            _text(phase),
            brief(rank["phase_seconds"]),
            f"{brief(rank['silent_seconds'])} ago",
            style="bold red" if rank["silent_seconds"] > LATE_SECONDS else "",
        )
    if len(ranks) > most:
        table.add_row("…", "", f"{counted(len(ranks) - most, 'rank')} more")
    return table


def _log(log: Sequence[str], most: int, *, is_cut: bool) -> list[Text]:
    """Return the last lines of rank 0's log that no other part of the screen shows."""
    lines = []
    for line in log:
        if not TRAIN_LINE.match(line):
            style = "yellow" if WARNING_LINE.match(line) else "dim"
            lines.append(_text(DATE.sub("", line, count=1), style, is_cut=is_cut))
    return lines[-most:]
