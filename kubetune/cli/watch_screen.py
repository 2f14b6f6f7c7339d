"""The screen of `kubetune watch`: what is known of a run at one moment, as panels and tables for a terminal."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from kubetune.writing import brief, size, visible

_BLOCKS = "▁▂▃▄▅▆▇█"
_LATE_SECONDS = 15.0
_COLOURS = {
    "running": "green",
    "done": "green",
    "waiting": "yellow",
    "stopped": "yellow",
    "failed": "red",
    "absent": "red",
}
_MOST_RANKS = 16


@dataclass(frozen=True)
class Sight:
    """A run as it was last seen. `vitals` are vitals.take_vitals's, empty where nobody could be asked.

    `lost`: why there is no answer now; `seen`: when the last one came, on the monotonic clock.
    """

    name: str
    state: str
    why: str
    vitals: dict[str, Any]
    is_over: bool = False
    where: str = ""
    lost: str = ""
    seen: float = field(default_factory=time.monotonic)

    def without_answer(self, reason: str) -> Sight:
        """The same, as last seen, with why nothing newer is known."""
        return replace(self, lost=reason.splitlines()[0])


def draw(sight: Sight, width: int) -> RenderableType:
    """The whole screen. What runs and models say of themselves is shown, and never obeyed."""
    sight = _harmless(sight)
    told = sight.vitals.get("progress") or {}
    parts: list[RenderableType] = [_headline(sight, told)]
    if told.get("steps") and told.get("step") is not None:
        bar = Table.grid(expand=True)  # a bar alone does not end its line
        bar.add_row(ProgressBar(total=told["steps"], completed=told["step"]))
        parts.append(bar)
    parts.append(_numbers(sight.vitals, told, width))
    panels: list[RenderableType] = [
        Panel(Group(*parts), title=Text(sight.name), title_align="left", border_style="dim")
    ]
    if sight.vitals.get("ranks"):
        panels.append(_ranks(sight.vitals))
    if sight.vitals.get("gpus"):
        panels.append(_gpus(sight.vitals["gpus"]))
    if lines := sight.vitals.get("log"):
        text = Text("\n".join(lines), no_wrap=True, overflow="ellipsis", style="dim")
        panels.append(Panel(text, title="rank 0", title_align="left", border_style="dim"))
    if sight.lost:
        ago = brief(time.monotonic() - sight.seen)
        panels.append(Text(f"no answer for {ago or '0s'}, trying again: {sight.lost}", style="bold yellow"))
    elif not sight.is_over:
        panels.append(Text("Ctrl-C leaves; the run goes on", style="dim"))
    return Group(*panels)


def _harmless(sight: Sight) -> Sight:
    def cleaned(value: Any) -> Any:
        if isinstance(value, str):
            return visible(value)
        if isinstance(value, dict):
            return {key: cleaned(one) for key, one in value.items()}
        return [cleaned(one) for one in value] if isinstance(value, list) else value

    texts: dict[str, Any] = {name: visible(getattr(sight, name)) for name in ("name", "state", "why", "where", "lost")}
    return replace(sight, vitals=cleaned(sight.vitals), **texts)


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Values as blocks of eight heights, at most `width` of them; neighbours share one. A gap where none is known."""
    if not values or width < 1:
        return ""
    count = min(width, len(values))
    cells = []
    for index in range(count):
        part = [v for v in values[index * len(values) // count : (index + 1) * len(values) // count] if v is not None]
        cells.append(sum(part) / len(part) if part else None)
    known = [cell for cell in cells if cell is not None]
    if not known:
        return " " * count
    low, span = min(known), max(known) - min(known)
    return "".join(
        " " if cell is None else _BLOCKS[round((cell - low) / span * (len(_BLOCKS) - 1)) if span else 0]
        for cell in cells
    )


def _headline(sight: Sight, told: dict[str, Any]) -> Text:
    line = Text()
    line.append(sight.state, style=f"bold {_COLOURS.get(sight.state, 'white')}")
    if told.get("step") is not None:
        steps = told.get("steps")
        done = f" ({told['step'] / steps:.0%})" if steps else ""
        line.append(f"  step {told['step']:,}/{f'{steps:,}' if steps else '?'}{done}")
    if sight.state == "running" and told.get("seconds_left") is not None:
        line.append(f"  ETA {brief(told['seconds_left'])}", style="bold")
    if told.get("saved_step") is not None:
        line.append(f"  saved step {told['saved_step']:,}", style="dim")
    if told.get("restarts"):
        line.append(f"  {told['restarts']} {'restart' if told['restarts'] == 1 else 'restarts'}", style="yellow")
    if sight.where:
        line.append(f"  {sight.where}", style="dim")
    if sight.why:
        line.append(f"\n{sight.why}", style="yellow")
    return line


def _numbers(vitals: dict[str, Any], told: dict[str, Any], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    room = max(8, width - 44)
    losses, speeds = vitals.get("losses") or [], vitals.get("speeds") or []
    if told.get("loss") is not None:
        table.add_row("loss", Text(f"{told['loss']:.4f}", "bold"), Text(sparkline(losses, room), "cyan"))
    if evaluation := told.get("evaluation"):
        rest = [f"{key.removeprefix('eval_')} {value:.4f}" for key, value in evaluation.items()
                if key.startswith("eval_") and key != "eval_loss" and isinstance(value, float)]  # fmt: skip
        said = f"at step {evaluation['step']:,}  {'  '.join(rest[:3])}"
        table.add_row("evaluation", Text(f"{evaluation['eval_loss']:.4f}", "bold"), Text(said, "dim"))
    if speeds:
        table.add_row("tokens/s", Text(f"{speeds[-1]:,.0f}", "bold"), Text(sparkline(speeds, room), "cyan"))
    flops, peak = vitals.get("flops_per_token"), vitals.get("peak_tflops")
    if speeds and flops and peak:
        world = max(1, len(vitals.get("rank_seconds") or [0]))
        share = sum(speeds[-20:]) / len(speeds[-20:]) * flops / world / 1e12 / peak
        table.add_row("MFU", Text(f"{share:.1%}", "bold"), Text(f"of {peak:,.4g} TFLOP/s, over the last steps", "dim"))
    if vitals.get("peak_memory_bytes"):
        table.add_row(
            "memory", Text(size(vitals["peak_memory_bytes"]), "bold"), Text("highest so far on rank 0", "dim")
        )
    return table


def _ranks(vitals: dict[str, Any]) -> Table:
    """Where each rank is. The lag: how much longer than the fastest it computed in the last step."""
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for name in ("rank", "step", "phase", "for", "lag", "heard of"):
        table.add_column(name, justify="right" if name in ("rank", "step", "for", "lag") else "left")
    seconds = vitals.get("rank_seconds") or []
    ranks = vitals["ranks"]
    slow_first = sorted(ranks, key=lambda rank: -_lag(seconds, rank["rank"])) if len(ranks) > _MOST_RANKS else ranks
    for rank in slow_first[:_MOST_RANKS]:
        is_late = rank["silent_seconds"] > _LATE_SECONDS
        phase = f"waits in {rank['phase']}" if rank["waiting"] else rank["phase"]
        lag = f"{_lag(seconds, rank['rank']):+.0%}" if len(seconds) > 1 else ""
        heard = f"{brief(rank['silent_seconds'])} ago"
        style = "bold red" if is_late else ""
        table.add_row(
            str(rank["rank"]), f"{rank['step']:,}", Text(phase), brief(rank["phase_seconds"]), lag, heard, style=style
        )
    if len(ranks) > _MOST_RANKS:
        table.add_row("…", "", f"{len(ranks) - _MOST_RANKS} more, which lag less", "", "", "")
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
        load, used, total = gpu["utilization_percent"], gpu["memory_used_mib"], gpu["memory_total_mib"]
        bar = f"{sparkline_bar(load)} {load}%" if isinstance(load, int) else "?"
        index = f"{gpu['node']}/{gpu['index']}" if "node" in gpu else str(gpu["index"])
        heat, power = gpu["temperature_celsius"], gpu["power_watts"]
        memory = f"{used:,}/{total:,} MiB" if used is not None else "?"
        warmth = f"{heat}°C" if heat is not None else ""
        table.add_row(index, Text(str(gpu["name"])), bar, memory, warmth, f"{power:.0f} W" if power is not None else "")
    return table


def sparkline_bar(percent: int, width: int = 10) -> str:
    """A share as a bar of blocks."""
    full = round(max(0, min(100, percent)) / 100 * width)
    return "█" * full + "░" * (width - full)
