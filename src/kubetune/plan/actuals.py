"""Forecast and actuals of a run side by side: peak memory, hours and price, for report.json and the log.

The forecast is the one that the event of the run's last start keeps (`costs.read_kept`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from kubetune.base.humanize import duration, size
from kubetune.plan import earlier_runs
from kubetune.plan.cost import Bill
from kubetune.plan.costs import Costs
from kubetune.plan.earlier_runs import RunShape
from kubetune.rundir import metrics

# In place of a bill that nobody could make.
_NO_BILL = Bill(0, None, "")


def compare(
    forecast: Costs | None,
    *,
    peak_memory_bytes: int,
    step_seconds: float,
    events: Sequence[Mapping[str, Any]],
    until: str,
    world_size: int,
    price_per_gpu_hour: float | None,
) -> dict[str, Any]:
    """Return `memory`, `hours` and `price` as report.json holds them; None for what was not forecast.

    `step_seconds`: the time within steps. `until`: when the run ended.
    """
    memory_bytes = None
    if forecast is not None and forecast.memory is not None:
        memory_bytes = forecast.memory.allocated_bytes
    bill = _NO_BILL
    if forecast is not None and forecast.bill is not None:
        bill = forecast.bill
    # Devices cost money from the launch to the end, not only within steps.
    step_hours = step_seconds / 3600
    total_hours = max(step_seconds, held_seconds(events, until)) / 3600
    price = None
    if price_per_gpu_hour is not None:
        per_hour = price_per_gpu_hour * world_size
        price = {
            "forecast": bill.price,
            "steps": step_hours * per_hour,
            "total": total_hours * per_hour,
            "relative_error": _relative_error(step_hours * per_hour, bill.price),
            "per_device_hour": price_per_gpu_hour,
        }
    return {
        "memory": {
            "forecast_bytes": memory_bytes,
            "measured_bytes": peak_memory_bytes,
            "relative_error": _relative_error(peak_memory_bytes, memory_bytes),
        },
        "hours": {
            "forecast": bill.hours,
            "low": bill.low_hours,
            "high": bill.high_hours,
            "step_hours": step_hours,
            "total_hours": total_hours,
            "relative_error": _relative_error(step_hours, bill.hours),
            "source": bill.source,
        },
        "price": price,
    }


def remember(
    shape: RunShape | None,
    *,
    tokens_per_second: float,
    seconds: float,
    events: Sequence[Mapping[str, Any]],
    waiting_share: float | None = None,
) -> None:
    """Keep the speed of a run that ended, for the forecasts of later ones.

    `waiting_share`: of its seconds, those in which steps waited for drawn answers.

    A run that continued after a stop is not kept: it may have continued on another machine.
    """
    starts = [event for event in events if event["event"] in ("start", "resume")]
    if len(starts) != 1:
        return
    # A run that only read its checkpoint and ended has no speed.
    if shape is not None and tokens_per_second > 0 and seconds > 0:
        speed = earlier_runs.Speed(
            shape, tokens_per_second, seconds, metrics.now(), waiting_share=waiting_share
        )
        earlier_runs.keep(speed)


def held_seconds(events: Sequence[Mapping[str, Any]], until: str) -> float:
    """Return the seconds that devices were held: each start from its launch to its end, or to its last sign of life."""
    # launch 9:00, exit 9:30, launch 10:00 (killed), launch 11:00 (the one before was last seen at 10:20), exit 11:10
    #     30 min          + 20 min                                                                      + 10 min
    total = 0.0
    begun = None  # when the start that holds the devices began; None between starts
    last = None  # time of the event before
    for event in events:
        now = _moment(str(event["time"]))
        if event["event"] == "launch" and not event.get("node", 0):
            if begun is not None and last is not None:
                # The start before was killed and could not write when. The next launch writes when it was last alive.
                seen = event.get("last_seen")
                ended = last
                if seen:
                    ended = max(last, _moment(seen))
                total += ended - begun
            begun = now
        elif event["event"] == "exit" and not event.get("node", 0) and begun is not None:
            total += now - begun
            begun = None
        elif begun is None and event["event"] in ("start", "resume"):
            begun = now  # ranks that no agent started
        last = now

    # The start that writes this is not over yet.
    if begun is not None:
        total += _moment(until) - begun
    return total


def line(actuals: Mapping[str, Any]) -> str:
    """Return the actuals, as `compare` returns them, as a line of the log, each next to its forecast if there is one."""
    hours = actuals["hours"]
    text = (
        f"time {_duration(hours['total_hours'])}, {_duration(hours['step_hours'])} of it in steps"
    )
    if hours["forecast"] is not None:
        text += f" (forecast {_duration(hours['forecast'])})"
    memory = actuals["memory"]
    text += f"; peak memory {size(memory['measured_bytes'])}"
    if memory["forecast_bytes"] is not None:
        text += f" (forecast {size(memory['forecast_bytes'])})"
    price = actuals["price"]
    if price is None:
        return text
    text += f"; price {price['total']:,.2f}, {price['steps']:,.2f} of it for the steps"
    if price["forecast"] is not None:
        text += f" (forecast {price['forecast']:,.2f})"
    return text


def _duration(hours: float) -> str:
    return duration(3600 * hours)


def _relative_error(measured: float, expected: float | None) -> float | None:
    """Return by how much a measured number exceeds its forecast, such as 0.1 for a tenth; None without a forecast."""
    if not expected:
        return None
    return measured / expected - 1


def _moment(time: str) -> float:
    """Return a time of an event in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
