"""Forecast and actuals of a run side by side: peak memory, hours and price, for report.json and the log.

The forecast is that of `kubetune plan`, with the tokens that the prepared data really have.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from kubetune.base.humanize import duration, size
from kubetune.config.schema import Config
from kubetune.planning import earlier_runs
from kubetune.planning.cost import bill, kind_of, price_line, time_line
from kubetune.planning.forecast import forecast
from kubetune.planning.model_shapes import read_weights
from kubetune.planning.plan import Plan
from kubetune.rundir import metrics


def compare(
    config: Config,
    plan: Plan,
    *,
    tokens: int,
    longest: int | None = None,
    peak_memory_bytes: int,
    step_seconds: float,
    events: Sequence[Mapping[str, Any]],
    until: str,
) -> dict[str, Any]:
    """`memory`, `hours` and `price` as report.json holds them; None for what was not, or could not be, forecast.

    `tokens` are those of all steps planned, `longest` those of the longest row, `step_seconds` the time within steps,
    `until` when the run ended.
    """
    weights = read_weights(config.model.path, os.environ)
    starts = [event for event in events if event["event"] in ("start", "resume")]
    begun: Mapping[str, Any] = starts[-1] if starts else {}
    plan = plan.model_copy(update={"spared_share": begun.get("spared_share") or 0.0})
    memory = forecast(config, plan, weights, begun.get("device_bytes"), longest) if weights is not None else None
    # Runs that ended since this one began, itself among them, were no part of its forecast.
    known = earlier_runs.read(before=str(starts[0]["time"]) if starts else None)
    found = bill(config, plan, weights, tokens, _gpu(plan, begun), known)
    assert found is not None
    step_hours, total_hours = step_seconds / 3600, max(step_seconds, held_seconds(events, until)) / 3600
    forecast_bytes = memory.allocated_bytes if memory is not None else None
    rate = config.compute.price_per_gpu_hour
    each_hour = None if rate is None else rate * plan.world_size
    return {
        "memory": {
            "forecast_bytes": forecast_bytes,
            "measured_bytes": peak_memory_bytes,
            "relative_error": _relative_error(peak_memory_bytes, forecast_bytes),
        },
        "hours": {
            "forecast": found.hours,
            "step_hours": step_hours,
            "total_hours": total_hours,
            "relative_error": _relative_error(step_hours, found.hours),
            "tokens": tokens,
            "source": found.source,
            "spans": [asdict(span) for span in found.spans],
        },
        "price": None
        if each_hour is None
        else {
            "forecast": found.price,
            "steps": step_hours * each_hour,
            "total": total_hours * each_hour,
            "relative_error": _relative_error(step_hours * each_hour, found.price),
            "per_device_hour": rate,
        },
    }


def outlook(config: Config, plan: Plan, tokens: int, gpu: str | None) -> Iterator[str]:
    """Forecast for a run that begins, as lines of its log; none where nobody can know. `gpu`: the device's name."""
    weights = read_weights(config.model.path, os.environ)
    found = bill(config, plan, weights, tokens, gpu, earlier_runs.read())
    if found is None or found.hours is None:
        return
    yield f"forecast for the steps: {time_line(found)}"
    if price := price_line(found, config.compute.price_per_gpu_hour):
        yield f"forecast of the price: {price}"


def remember(
    config: Config, plan: Plan, *, tokens_per_second: float, seconds: float, events: Sequence[Mapping[str, Any]]
) -> None:
    """Keep the speed of a run that ended, for the forecasts of later ones. Not of one that went on, perhaps elsewhere,
    after a stop."""
    starts = [event for event in events if event["event"] in ("start", "resume")]
    weights = read_weights(config.model.path, os.environ)
    kind = kind_of(config, plan, weights, _gpu(plan, starts[0])) if len(starts) == 1 else None
    if kind is not None and tokens_per_second > 0 and seconds > 0:
        earlier_runs.keep(earlier_runs.Speed(kind, tokens_per_second, seconds, metrics.now()))


def _gpu(plan: Plan, begun: Mapping[str, Any]) -> str | None:
    return begun.get("device") if plan.device == "cuda" else None


def held_seconds(events: Sequence[Mapping[str, Any]], until: str) -> float:
    """Seconds that devices were held: each start from its launch to its end, or to when it was last seen alive."""
    total, begun, last = 0.0, None, None
    for event in events:
        now = _moment(str(event["time"]))
        if event["event"] == "launch" and not event.get("node", 0):
            if begun is not None and last is not None:
                seen = event.get("last_seen")
                total += (max(last, _moment(seen)) if seen else last) - begun
            begun = now
        elif event["event"] == "exit" and not event.get("node", 0) and begun is not None:
            total += now - begun
            begun = None
        elif begun is None and event["event"] in ("start", "resume"):
            begun = now  # ranks that no agent started
        last = now
    return total + (_moment(until) - begun if begun is not None else 0.0)


def tell(found: Mapping[str, Any]) -> Iterator[str]:
    """The same as lines of the log."""
    memory, hours, price = found["memory"], found["hours"], found["price"]
    if memory["forecast_bytes"] is not None:
        measured, expected = (size(memory[key]) for key in ("measured_bytes", "forecast_bytes"))
        yield f"peak memory {measured}, forecast {expected} ({memory['relative_error']:+z.0%})"
    steps, total, expected = (
        duration(None if hours[key] is None else 3600 * hours[key]) for key in ("step_hours", "total_hours", "forecast")
    )
    time = f"time {steps} in steps, {total} in all"
    if hours["forecast"] is not None:
        time += f"; forecast for the steps {expected} ({hours['relative_error']:+z.0%}), by {hours['source']}"
        if span := next((span for span in hours.get("spans", ()) if span["source"] == hours["source"]), None):
            is_within = span["low_hours"] <= hours["step_hours"] <= span["high_hours"]
            low, high = (duration(3600 * span[key]) for key in ("low_hours", "high_hours"))
            time += f": {'within' if is_within else 'NOT within'} {low}–{high}"
    yield time
    if price is not None:
        line = f"price {price['total']:,.2f}, {price['steps']:,.2f} of it for the steps"
        if price["forecast"] is not None:
            line += f", forecast {price['forecast']:,.2f} ({price['relative_error']:+z.0%})"
        yield f"{line}, at {price['per_device_hour']:g} a device and hour"


def _relative_error(measured: float, expected: float | None) -> float | None:
    return measured / expected - 1 if expected else None


def _moment(time: str) -> float:
    return datetime.fromisoformat(time).timestamp()
