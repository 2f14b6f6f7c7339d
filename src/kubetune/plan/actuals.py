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
from kubetune.config.schema import ComputeConfig, Config
from kubetune.plan import earlier_runs
from kubetune.plan.cost import Bill, bill, kind_of, price_line, time_line
from kubetune.plan.forecast import Forecast, forecast
from kubetune.plan.model_shapes import read_weights
from kubetune.plan.plan import Plan
from kubetune.plan.rank_work import RankWork
from kubetune.rundir import metrics

# A forecast that is off by more than this factor is named beside what came.
_FAR_OFF = 2.0


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
    is_busy: bool = False,
) -> dict[str, Any]:
    """Return `memory`, `hours` and `price` as report.json holds them; None for what was not forecast.

    `is_busy`: other programs wanted the processor too.

    `tokens` are those of all steps planned, `longest` those of the longest row, `step_seconds` the time
    within steps, `until` when the run ended.
    """
    # The memory forecast needs what the last start saw: its device, and the share of tokens that it computed once.
    weights = read_weights(config.model.path, os.environ)
    starts = [event for event in events if event["event"] in ("start", "resume")]
    last_start: Mapping[str, Any] = {}
    if starts:
        last_start = starts[-1]
    plan = plan.model_copy(update={"saved_share": last_start.get("saved_share") or 0.0})
    memory = None
    if weights is not None:
        work = RankWork.of(config, plan, longest)
        memory = forecast(work, weights, last_start.get("device_bytes"))

    # Runs that ended after this one began, this one too, were no part of its forecast.
    began = None
    if starts:
        began = str(starts[0]["time"])
    known = earlier_runs.read(before=began)
    work = RankWork.of(config, plan)
    gpu = _gpu(plan, last_start)
    planned = bill(work, config.compute, plan, weights, tokens, gpu, known)
    assert planned is not None, "tokens are known"

    # Devices cost money from the launch to the end, not only within steps.
    held_hours = max(step_seconds, held_seconds(events, until)) / 3600
    hours = _hours(planned, step_seconds / 3600, held_hours) | {"busy": is_busy}
    return {
        "memory": _memory(memory, peak_memory_bytes),
        "hours": hours,
        "price": _price(config.compute.price_per_gpu_hour, plan.world_size, planned, hours),
    }


def _memory(planned: Forecast | None, measured_bytes: int) -> dict[str, Any]:
    """Return the peak memory of a device, forecast and measured."""
    forecast_bytes = None
    if planned is not None:
        forecast_bytes = planned.allocated_bytes
    return {
        "forecast_bytes": forecast_bytes,
        "measured_bytes": measured_bytes,
        "relative_error": _relative_error(measured_bytes, forecast_bytes),
    }


def _hours(planned: Bill, step_hours: float, total_hours: float) -> dict[str, Any]:
    """Return the hours forecast and measured. The forecast is of the steps alone, so its error is too."""
    return {
        "forecast": planned.hours,
        "step_hours": step_hours,
        "total_hours": total_hours,
        "relative_error": _relative_error(step_hours, planned.hours),
        "tokens": planned.tokens,
        "source": planned.source,
        "spans": [asdict(span) for span in planned.spans],
    }


def _price(
    per_device_hour: float | None, devices: int, planned: Bill, hours: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the price forecast and measured; None where the config names no price."""
    if per_device_hour is None:
        return None
    per_hour = per_device_hour * devices
    steps = hours["step_hours"] * per_hour
    return {
        "forecast": planned.price,
        "steps": steps,
        "total": hours["total_hours"] * per_hour,
        "relative_error": _relative_error(steps, planned.price),
        "per_device_hour": per_device_hour,
    }


def outlook(
    work: RankWork,
    compute: ComputeConfig,
    plan: Plan,
    model_path: str,
    tokens: int,
    gpu: str | None,
) -> Iterator[str]:
    """Yield the forecast for a run that begins, as lines of its log; none where the speed is not known.

    `gpu`: the device's name.
    """
    weights = read_weights(model_path, os.environ)
    estimate = bill(work, compute, plan, weights, tokens, gpu, earlier_runs.read())
    if estimate is None or estimate.hours is None:
        return
    yield f"forecast for the steps: {time_line(estimate)}"
    price = price_line(estimate, compute.price_per_gpu_hour)
    if price:
        yield f"forecast of the price: {price}"


def remember(
    work: RankWork,
    plan: Plan,
    model_path: str,
    *,
    tokens_per_second: float,
    seconds: float,
    events: Sequence[Mapping[str, Any]],
    waiting_share: float | None = None,
) -> None:
    """Keep the speed of a run that ended, for the forecasts of later ones.

    `waiting_share`: of its seconds, those in which steps waited for drawn answers.

    A run that went on after a stop is not kept: it may have gone on on another machine.
    """
    starts = [event for event in events if event["event"] in ("start", "resume")]
    if len(starts) != 1:
        return
    weights = read_weights(model_path, os.environ)
    kind = kind_of(work, plan, weights, _gpu(plan, starts[0]))
    # A run that only read its checkpoint and ended has no speed.
    if kind is not None and tokens_per_second > 0 and seconds > 0:
        speed = earlier_runs.Speed(
            kind, tokens_per_second, seconds, metrics.now(), waiting_share=waiting_share
        )
        earlier_runs.keep(speed)


def _gpu(plan: Plan, begun: Mapping[str, Any]) -> str | None:
    """Return the name of the GPU that a `start` event names; None for a run on CPUs."""
    if plan.device != "cuda":
        return None
    return begun.get("device")


def is_machine_busy() -> bool:
    """True if much more wants the processors of this machine, over the last minutes, than there are."""
    return os.getloadavg()[1] > 1.5 * (os.cpu_count() or 1)


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


def tell(actuals: Mapping[str, Any]) -> Iterator[str]:
    """Yield forecast and actuals, as `compare` returns them, as lines of the log."""
    memory = actuals["memory"]
    if memory["forecast_bytes"] is not None:
        measured = size(memory["measured_bytes"])
        expected = size(memory["forecast_bytes"])
        error = f"{memory['relative_error']:+z.0%}"
        yield f"peak memory {measured}, forecast {expected} ({error})"
    yield _time_line(actuals["hours"])
    if actuals["price"] is not None:
        yield _price_line(actuals["price"])


def _time_line(hours: Mapping[str, Any]) -> str:
    """Return the line on time: measured and, where the forecast was off by more than twice, the forecast too.

    A forecast is no promise: one that was about right, or a span that was missed by a little, needs no word.
    """
    line = (
        f"time {_duration(hours['step_hours'])} in steps, {_duration(hours['total_hours'])} in all"
    )
    expected = hours["forecast"]
    measured = hours["step_hours"]
    if not expected or not measured or 1 / _FAR_OFF <= measured / expected <= _FAR_OFF:
        return line
    line += f"; the forecast for the steps was {_duration(expected)}"
    if measured > expected and hours.get("busy"):
        line += ", and the machine was busy"
    return line


def _duration(hours: float) -> str:
    return duration(3600 * hours)


def _price_line(price: Mapping[str, Any]) -> str:
    line = f"price {price['total']:,.2f}, {price['steps']:,.2f} of it for the steps"
    if price["forecast"] is not None:
        line += f", forecast {price['forecast']:,.2f} ({price['relative_error']:+z.0%})"
    return f"{line}, at {price['per_device_hour']:g} a device and hour"


def _relative_error(measured: float, expected: float | None) -> float | None:
    """Return by how much a measured number exceeds its forecast, such as 0.1 for a tenth; None without a forecast."""
    if not expected:
        return None
    return measured / expected - 1


def _moment(time: str) -> float:
    """Return a time of an event in seconds since 1970."""
    return datetime.fromisoformat(time).timestamp()
