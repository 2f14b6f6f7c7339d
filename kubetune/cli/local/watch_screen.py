"""The screen of `kubetune watch`: what is known of a run at one moment, as panels and tables for a terminal."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.box import HORIZONTALS
from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kubetune.base.humanize import brief, counted, limits_of, size, sparkline, visible
from kubetune.cli.local.watch_charts import bar, curve
from kubetune.cli.local.watch_keys import View
from kubetune.rundir.metrics import utilization

_LATE_SECONDS = 15.0
_COLOURS = {
    "running": "green",
    "done": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "absent": "red",
}
_FAMILY_STYLES = {"ERROR": "bold red", "EVAL": "green", "RESULT": "green", "DONE": "bold green"}
_LOG_LINE = re.compile(r"(\d{4}-\d\d-\d\d) (\d\d:\d\d:\d\d) \[(\w+)\] (.*)", re.DOTALL)
_MOST_RANKS = 16
_FEW_LOG_LINES = 8
_BESIDE_SPARKS = 29
# Lines of the screen, with what frames them.
_LEAST_LOG, _LEAST_CURVE, _MOST_CURVE = 7, 6, 18


@dataclass(frozen=True)
class RunView:
    """A run as it was last seen. `status` are status.read_status's, empty where nobody could be asked.

    `lost`: why there is no answer now; `seen`: when the last one came, on the monotonic clock.
    """

    name: str
    state: str
    why: str
    status: dict[str, Any]
    is_over: bool = False
    where: str = ""
    lost: str = ""
    seen: float = field(default_factory=time.monotonic)

    @property
    def log(self) -> list[str]:
        """The last lines of a rank's log, as far as they are known."""
        return list(self.status.get("log") or ())

    def without_answer(self, reason: str) -> RunView:
        """The same, as last seen, with why nothing newer is known."""
        return replace(self, lost=reason.splitlines()[0])


@dataclass(frozen=True)
class Screen:
    """The view of a run at one moment, and how many lines of its log are."""

    content: RenderableType
    page: int

    def __rich__(self) -> RenderableType:
        return self.content


def draw(
    run_view: RunView,
    width: int,
    height: int | None = None,
    *,
    view: View | None = None,
    hint: str = "",
) -> Screen:
    """The whole screen. What runs and models say of themselves is shown, and never obeyed.

    With `height` the curve of the loss and the log fill what the rest leaves of it. `hint`: the last line.
    """
    run_view = _harmless(run_view)
    status, told = run_view.status, run_view.status.get("progress") or {}
    head, foot = _head(run_view, told, width), _foot(run_view, hint)
    room, most_ranks = None, _MOST_RANKS
    if height is not None:
        room = height - _lines(head, width) - (1 if foot else 0)
        most_ranks = room - _LEAST_LOG - 2 - (len(status["gpus"]) + 1 if status.get("gpus") else 0)
    parts: list[RenderableType] = [head]
    if status.get("verdict"):
        parts.append(_verdict(status["verdict"]))
    if status.get("ranks"):
        parts.append(_ranks(status, max(1, min(_MOST_RANKS, most_ranks))))
    if status.get("gpus"):
        parts.append(_gpus(status["gpus"]))
    if room is not None:
        room -= sum(_lines(part, width) for part in parts[1:])
        if len(status.get("losses") or ()) > 1 and room // 3 >= _LEAST_CURVE:
            lines = min(_MOST_CURVE, room // 3)
            room -= lines
            parts.insert(1, _curve(status, width, lines - 2))
    page = _FEW_LOG_LINES if room is None else max(0, room - 2)
    if (log := status.get("log")) and page:
        parts.append(
            _log(log, status.get("log_rank", 0), width, page, view.above_end if view else 0)
        )
    return Screen(Group(*parts, *([foot] if foot else [])), page)


def _lines(part: RenderableType, width: int) -> int:
    return len(Console(width=width, file=io.StringIO()).render_lines(part))


def _head(run_view: RunView, told: dict[str, Any], width: int) -> Panel:
    parts: list[RenderableType] = [_headline(run_view, told)]
    if told.get("steps") and told.get("step") is not None:
        grid = Table.grid(expand=True)  # a bar alone does not end its line
        grid.add_row(ProgressBar(total=told["steps"], completed=told["step"]))
        parts.append(grid)
    parts.append(_numbers(run_view.status, told, width))
    return Panel(Group(*parts), title=Text(run_view.name), title_align="left", border_style="dim")


def _foot(run_view: RunView, hint: str) -> Text | None:
    if run_view.lost:
        ago = brief(time.monotonic() - run_view.seen)
        line = Text(
            f"no answer for {ago or '0s'}, trying again: {run_view.lost}", style="bold yellow"
        )
    elif hint and not run_view.is_over:
        line = Text(hint, style="dim")
    else:
        return None
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _curve(status: dict[str, Any], width: int, height: int) -> Panel:
    """The loss of the last steps, with its range at the left."""
    losses = status["losses"]
    low, high = limits_of(losses) or (0.0, 0.0)
    marks = [f"{high:.4f}", *[""] * (height - 2), f"{low:.4f}"]
    room = max(map(len, marks))
    rows = curve(losses, width - room - 5, height)
    text = Text(no_wrap=True)
    for mark, row in zip(marks, rows, strict=False):
        text.append(f"{mark:>{room}} ", "dim").append(f"{row}\n", "cyan")
    text.rstrip()
    steps = status.get("loss_steps")
    title = f"loss of steps {steps[0]:,} to {steps[1]:,}" if steps else "loss"
    return Panel(text, title=title, title_align="left", border_style="dim")


def _log(lines: Sequence[str], rank: int, width: int, page: int, above_end: int) -> Panel:
    above_end = max(0, min(above_end, len(lines) - page))
    shown = lines[max(0, len(lines) - page - above_end) : len(lines) - above_end]
    text = Text("\n", no_wrap=True, overflow="ellipsis").join(
        _log_line(line, width - 2) for line in shown
    )
    text.no_wrap, text.overflow = True, "ellipsis"
    dates = [found[1] for line in shown if (found := _LOG_LINE.match(line))]
    title = f"rank {rank}, {dates[-1]}" if dates else f"rank {rank}"
    below = f"{counted(above_end, 'newer line')} below" if above_end else None
    return Panel(
        text, box=HORIZONTALS, padding=0, title=title, subtitle=below, title_align="left", subtitle_align="left",
        border_style="dim",
    )  # fmt: skip


def _log_line(line: str, width: int) -> Text:
    """A line of a rank's log without its date; of a training step first of all the numbers."""
    found = _LOG_LINE.match(line)
    if found is None:
        return Text(line, "dim")
    _, clock, family, told = found.groups()
    if family != "TRAIN":
        return Text.assemble(
            (f"{clock} ", "dim"), (f"[{family}] {told}", _FAMILY_STYLES.get(family, "dim"))
        )
    for needless in (
        "tokens/s",
        "epoch",
        "lr",
    ):  # shown above, or known; half a number would be another number
        if len(clock) + 1 + len(told) > width:
            told = re.sub(rf" {needless} \S+", "", told)
    return Text.assemble((f"{clock} ", "dim"), told)


def _harmless(run_view: RunView) -> RunView:
    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return visible(value)
        if isinstance(value, dict):
            return {key: cleaned(one) for key, one in value.items()}
        return [cleaned(one) for one in value] if isinstance(value, list) else value

    texts: dict[str, Any] = {
        name: visible(getattr(run_view, name)) for name in ("name", "state", "why", "where", "lost")
    }
    return replace(run_view, status=cleaned(run_view.status), **texts)


def _headline(run_view: RunView, told: dict[str, Any]) -> Text:
    line = Text()
    line.append(run_view.state, style=f"bold {_COLOURS.get(run_view.state, 'white')}")
    if told.get("step") is not None:
        steps = told.get("steps")
        done = f" ({told['step'] / steps:.0%})" if steps else ""
        line.append(f"  step {told['step']:,}/{f'{steps:,}' if steps else '?'}{done}")
    if run_view.state == "running" and told.get("seconds_left") is not None:
        line.append(f"  ETA {brief(told['seconds_left'])}", style="bold")
    if told.get("saved_step") is not None:
        line.append(f"  saved step {told['saved_step']:,}", style="dim")
    if told.get("restarts"):
        line.append(
            f"  {told['restarts']} {'restart' if told['restarts'] == 1 else 'restarts'}",
            style="yellow",
        )
    if run_view.where:
        line.append(f"  {run_view.where}", style="dim")
    if run_view.why:
        line.append(f"\n{run_view.why}", style="yellow")
    return line


def _numbers(status: dict[str, Any], told: dict[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    losses, speeds = status.get("losses") or [], status.get("speeds") or []
    if told.get("loss") is not None:
        table.add_row("loss", Text(f"{told['loss']:.4f}", "bold"), _spark(losses, width, "{:.4f}"))
    if measures := told.get("measures"):
        first, *others = [
            f"{name.replace('_', ' ')} {value:.4g}" for name, value in measures.items()
        ]
        table.add_row("accuracy", Text(first.split()[-1], "bold"), Text("  ".join(others), "dim"))
    if experts := told.get("experts"):
        said = "the fullest expert, as a multiple of the mean, in the worst layer; "
        said += (
            f"{experts['experts_unused']:.1%} unused, {experts['dropped_tokens']:,} tokens dropped"
        )
        table.add_row(
            "experts", Text(f"{experts['expert_load_max']:.2f}×", "bold"), Text(said, "dim")
        )
    if evaluation := told.get("evaluation"):
        rest = [f"{key.removeprefix('eval_')} {value:.4f}" for key, value in evaluation.items()
                if key.startswith("eval_") and "eval_loss" not in key and isinstance(value, float)]  # fmt: skip
        said = f"at step {evaluation['step']:,}  {'  '.join(rest if told.get('measures') else rest[:3])}"
        table.add_row(
            "evaluation", Text(f"{evaluation['eval_loss']:.4f}", "bold"), Text(said, "dim")
        )
    if speeds:
        table.add_row(
            "tokens/s", Text(f"{speeds[-1]:,.0f}", "bold"), _spark(speeds, width, "{:,.0f}")
        )
    recent = speeds[-20:]
    _, mfu = utilization(
        status, sum(recent) / max(1, len(recent)), max(1, len(status.get("rank_seconds") or ()))
    )
    if mfu is not None:
        about = f"of {status['peak_tflops']:,.4g} TFLOP/s, over the last steps"
        table.add_row("MFU", Text(f"{mfu:.1%}", "bold"), Text(about, "dim"))
    if status.get("peak_memory_bytes"):
        table.add_row(
            "memory",
            Text(size(status["peak_memory_bytes"]), "bold"),
            Text("highest so far on rank 0", "dim"),
        )
    return table


def _spark(values: Sequence[float | None], width: int, form: str) -> Text:
    """The last values in small, and between what they were."""
    if (limits := limits_of(values)) is None:
        return Text()
    between = "  min {0}  max {0}".replace("{0}", form).format(*limits)
    line = Text(sparkline(values, max(8, width - _BESIDE_SPARKS - len(between))), "cyan")
    return line.append(between, "dim")


def _verdict(found: dict[str, Any]) -> Table:
    """Each metric of the base model and of the best checkpoint, with the answers that turned right and wrong."""
    from kubetune.reporting.verdict import verdict

    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("metric", "base", "tuned", "95 %", "gained", "lost"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for row in (verdict(found, {}) or {"rows": []})["rows"]:
        values = ["" if row[side] is None else f"{row[side]:.4g}" for side in ("base", "best")]
        between = "–".join(f"{end:.3g}" for end in row.get("after_interval") or ())
        turned = [str(row[side]) if side in row else "" for side in ("gained", "lost")]
        table.add_row(row["name"].removeprefix("eval_"), *values, between, *turned)
    return table


def _ranks(status: dict[str, Any], most: int) -> Table:
    """Phase, step and lag of each rank. The lag: how much longer than the fastest it computed in the last step."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("rank", "step", "phase", "for", "lag", "heard of"):
        table.add_column(
            name, justify="right" if name in ("rank", "step", "for", "lag") else "left"
        )
    seconds = status.get("rank_seconds") or []
    ranks = status["ranks"]
    slow_first = (
        sorted(ranks, key=lambda rank: -_lag(seconds, rank["rank"])) if len(ranks) > most else ranks
    )
    for rank in slow_first[:most]:
        is_late = rank["silent_seconds"] > _LATE_SECONDS
        phase = f"waits in {rank['phase']}" if rank["waiting"] else rank["phase"]
        lag = f"{_lag(seconds, rank['rank']):+.0%}" if len(seconds) > 1 else ""
        heard = f"{brief(rank['silent_seconds'])} ago"
        style = "bold red" if is_late else ""
        table.add_row(
            str(rank["rank"]),
            f"{rank['step']:,}",
            Text(phase),
            brief(rank["phase_seconds"]),
            lag,
            heard,
            style=style,
        )
    if len(ranks) > most:
        table.add_row("…", "", f"{len(ranks) - most} more, which lag less", "", "", "")
    return table


def _lag(seconds: Sequence[float], rank: int) -> float:
    if rank >= len(seconds) or min(seconds) <= 0:
        return 0.0
    return float(seconds[rank] / min(seconds) - 1)


def _gpus(gpus: Sequence[dict[str, Any]]) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("GPU", "name", "load", "memory", "heat", "power"):
        table.add_column(name, justify="left" if name == "name" else "right")
    for gpu in gpus:
        load, used, total = (
            gpu["utilization_percent"],
            gpu["memory_used_mib"],
            gpu["memory_total_mib"],
        )
        use = f"{bar(load)} {load}%" if isinstance(load, int) else "?"
        index = f"{gpu['node']}/{gpu['index']}" if "node" in gpu else str(gpu["index"])
        heat, power = gpu["temperature_celsius"], gpu["power_watts"]
        memory = f"{used:,}/{total:,} MiB" if used is not None else "?"
        warmth = f"{heat}°C" if heat is not None else ""
        table.add_row(
            index,
            Text(str(gpu["name"])),
            use,
            memory,
            warmth,
            f"{power:.0f} W" if power is not None else "",
        )
    return table
